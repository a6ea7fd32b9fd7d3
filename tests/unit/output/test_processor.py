"""From token events to outputs, for any division into steps and any events after the end."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from inlay import InlayError, SamplingParams
from inlay.events import Fault, TokenEvent
from inlay.logprobs import FlatLogprobs
from inlay.models.shapes import bytes_tokenizer
from inlay.output import OutputProcessor, RequestState, TokenTexts
from inlay.policy import ReusePolicy
from inlay.prompt.request import EngineRequest, PromptPart
from inlay.types import RequestMetrics, Usage
from tests.counting import calls_of
from tests.tokenizers_for_tests import family

IDS = (1, 2)


def begin(finished: list[tuple[str, int]], **params: Any) -> RequestState:
    request = EngineRequest(
        request_id="r",
        text="x",
        ids=IDS,
        positions=(0, 1),
        parts=(PromptPart(IDS, 0),),
        policy=ReusePolicy.parse("off"),
        params=SamplingParams(**params),
        fingerprint=b"",
    )
    return OutputProcessor(bytes_tokenizer(), lambda *answer: finished.append(answer)).begin(request)


def tokens(text: str) -> list[int]:
    return bytes_tokenizer().encode(text, add_special_tokens=False)


def test_token_is_decoded_once_for_all_log_probabilities(monkeypatch):
    """A long prompt has hundreds of thousands of them, and all requests wait while they are decoded."""
    state = begin([], max_tokens=5, prompt_logprobs=2, logprobs=1)
    decode = PreTrainedTokenizerFast.decode
    decodes = calls_of(monkeypatch, PreTrainedTokenizerFast, "decode")
    ranked = [(65, -0.5, 1), (66, -1.0, 2), (67, -2.0, 3)]
    state.add([TokenEvent("r", 0, [65], 0, logprobs=[ranked], prompt_logprobs=FlatLogprobs([None, *[ranked] * 9]))])
    output = state.output()
    assert [entry[66].decoded_token for entry in output.prompt_logprobs[1:]] == [decode(bytes_tokenizer(), [66])] * 9
    assert output.outputs[0].logprobs[0][67].decoded_token == decode(bytes_tokenizer(), [67])
    assert sorted(token for _, ids in decodes for token in ids) == [65, 66, 67]


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_stop_string_ends_an_answer_for_any_event_size(size):
    finished: list[tuple[str, int]] = []
    state, said = begin(finished, stop="stop"), tokens("one two stop three")
    for at in range(0, len(said), size):
        state.add([TokenEvent("r", 0, said[at : at + size], at)])
    (answer,) = state.output().outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one two ", "stop", "stop")
    assert list(answer.token_ids) == tokens("one two stop")
    assert finished == [("r", 0)], "and once"
    assert state.answered


def test_stop_string_precedes_the_engines_finish_reason():
    finished: list[tuple[str, int]] = []
    state = begin(finished, stop="b")
    state.add([TokenEvent("r", 0, tokens("ab"), 0, finish_reason="length")])
    assert (state.output().outputs[0].finish_reason, state.output().outputs[0].stop_reason) == ("stop", "b")
    assert not finished, "the engine has ended it already"


def test_repeated_tokens_are_counted_once():
    state, said = begin([]), tokens("abcd")
    state.add([TokenEvent("r", 0, said[:2], 0)])
    state.add([TokenEvent("r", 0, said[1:3], 1)])
    state.add([TokenEvent("r", 0, said, 0, finish_reason="length")])
    assert list(state.output().outputs[0].token_ids) == said
    assert state.output().outputs[0].text == "abcd"


def test_answers_of_a_request_end_independently():
    finished: list[tuple[str, int]] = []
    state = begin(finished, n=2, stop="b", seed=0)
    state.add([TokenEvent("r", 0, tokens("ab"), 0), TokenEvent("r", 1, tokens("ac"), 0)])
    assert (finished, state.answered, state.tokens) == ([("r", 0)], False, 4)
    state.add([TokenEvent("r", 0, tokens("xy"), 2), TokenEvent("r", 1, tokens("d"), 2, finish_reason="length")])
    assert state.answered
    assert [one.text for one in state.output().outputs] == ["a", "acd"]


def test_usage_and_metrics_of_the_prompt_are_kept():
    state, usage = begin([]), Usage(2, 1, 1, 1, 0, 0)
    assert (state.output().usage, state.output().metrics) == (Usage(2, 0, 2, 0, 0, 0), RequestMetrics())
    metrics = RequestMetrics(ttft_s=0.5, queue_s=0.125)
    state.add([TokenEvent("r", 0, tokens("a"), 0, elapsed_s=0.5, usage=usage, metrics=metrics)])
    assert (state.output().usage, state.output().metrics) == (usage, metrics)
    state.add([TokenEvent("r", 0, tokens("b"), 1, finish_reason="length", elapsed_s=0.75)])
    assert state.output().metrics == RequestMetrics(ttft_s=0.5, queue_s=0.125, total_s=0.75)


def test_error_ends_only_its_answer():
    state = begin([], n=2, seed=0)
    state.add([TokenEvent("r", 1, error=Fault("InlayError", "broken"))])
    assert isinstance(state.failure, InlayError)
    assert not state.answered
    state.add([TokenEvent("r", 0, tokens("a"), 0, finish_reason="length")])
    assert state.answered
    assert str(state.failure) == "broken"


@pytest.mark.parametrize("name", ["llama2", "gemma", "mistral", "llama3", "qwen3"])
def test_texts_of_tokens_make_the_text(name: str):
    tokenizer = family(name)
    text = "Say the word, and say it  twice. The end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = TokenTexts(tokenizer)
    assert "".join(texts[one] for one in ids).lstrip() == tokenizer.decode(ids).lstrip()
    assert any(texts[one].startswith(" ") for one in ids)
    for token in range(len(tokenizer)):
        assert texts[token].strip() == str(tokenizer.decode([token])).strip()
