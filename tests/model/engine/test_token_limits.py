"""Allowed and banned tokens, prompt truncation, and answers without text."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from inlay import LLM, ContextError, ParameterError, Prompt, SamplingParams, Schema
from inlay.engine import factory
from inlay.sampling.row import BadWords, Row, adjust, seen_of, tokenized
from tests.conftest import tiny
from tests.raising import raises
from tests.tokenizers_for_tests import gpt2
from tests.unit.sampling.rows import row

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = [(7 * n) % 256 for n in range(200)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


def ids(llm: LLM, params: SamplingParams, prompt="Hello") -> tuple[int, ...]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_only_allowed_tokens_are_generated(llm):
    allowed = [70, 71, 72]
    for params in (GREEDY, replace(GREEDY, temperature=1.0, seed=3)):
        assert set(ids(llm, replace(params, allowed_token_ids=allowed))) <= set(allowed)
    both = llm.generate(["Hello", "Hello"], [replace(GREEDY, allowed_token_ids=allowed), GREEDY])
    assert both[1].outputs[0].token_ids == ids(llm, GREEDY)


def test_allowed_tokens_keep_their_logits_beside_other_rows():
    logits = torch.arange(8.0)[None].repeat(2, 1)
    found = adjust(logits, [row(SamplingParams(allowed_token_ids=(5, 2, 5))), row(SamplingParams())], 8)
    assert found[0].tolist() == [-torch.inf, -torch.inf, 2.0, -torch.inf, -torch.inf, 5.0, -torch.inf, -torch.inf]
    assert torch.equal(found[1], logits[1])


def test_last_token_of_a_bad_word_is_banned_after_the_others():
    words = BadWords([(1, 2, 3), (1, 4), (9,), (2, 3, 5, 6)])
    assert words.next.tolist() == [9]
    seen = []
    for token in (1, 2, 3, 5, 1):
        words.take(token)
        seen.append(words.next.tolist())
    assert seen == [[4, 9], [3, 9], [9], [6, 9], [4, 9]]


def test_bad_word_is_banned_at_the_start_and_after_a_space():
    tokenizer = gpt2()
    found = tokenized(["the", " the"], tokenizer)
    encoded = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("the", " the")}
    assert set(found) <= encoded
    assert tuple(tokenizer.encode("the", add_special_tokens=False)) in found


def test_answer_continues_without_a_bad_word(llm):
    params = replace(GREEDY, allowed_token_ids=llm.tokenizer.encode("abcdefghij"))
    said = llm.generate("Hello", params)[0].outputs[0]
    word = said.text[4:7]
    assert said.text.index(word) == 4
    (other,) = llm.generate("Hello", replace(params, bad_words=[word]))
    assert word not in other.outputs[0].text
    assert other.outputs[0].text[:6] == said.text[:6]


@pytest.mark.parametrize("prompt", [LONG, "A text that is cut in front.", [{"role": "user", "content": "One. Two."}]])
def test_a_prompt_keeps_its_end(llm, prompt):
    whole = llm.lay_out(prompt).ids
    (output,) = llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=5))
    assert output.prompt_token_ids == whole[-5:]
    assert output.prompt_positions == (0, 1, 2, 3, 4)
    assert output.outputs[0].token_ids == ids(llm, GREEDY, [whole[-5:]])
    (short,) = llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=1_000))
    assert short.prompt_token_ids == whole


def test_prompt_is_truncated_to_leave_space_for_the_answer(llm):
    longest = llm.loaded.spec.max_positions
    prompt = LONG * (longest // len(LONG) + 1)
    with pytest.raises(ContextError):
        llm.generate([prompt], GREEDY)
    (output,) = llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == longest - GREEDY.max_tokens
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize("word", ["river ", "Größe ", "<|im_end|> ", "no-space"])
@pytest.mark.parametrize("kept", [1, 50, -1])
def test_a_text_far_beyond_the_context_keeps_its_end(llm, word, kept):
    longest = llm.loaded.spec.max_positions
    text = "".join(f"{word}{number}" for number in range(20 * longest))
    tokens = longest - GREEDY.max_tokens if kept == -1 else kept
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(ContextError):
            llm.generate([prompt], GREEDY)
        (output,) = llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=kept))
        if isinstance(prompt, str):
            assert list(output.prompt_token_ids) == llm.tokenizer.encode(text)[-tokens:]
        else:
            whole = llm.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = llm.tokenizer.encode(whole.replace(word, "x"), add_special_tokens=False)
            assert output.prompt_token_ids[-3:] == tuple(ids[-3:])[-tokens:]
            assert len(output.prompt_token_ids) == tokens


def test_start_of_a_truncated_text_is_not_tokenized(llm):
    bound = llm.encoder.bound
    longest = llm.loaded.spec.max_positions
    text = "river " * 100 * longest
    (end,) = bound.ending([text], 50)
    assert text.endswith(end)
    assert len(end) < len(text) / 10
    assert bound.ending([text], longest) is None  # so many tokens do not fit either
    assert bound.ending(["short"], 50) is None
    assert "".join(bound.ending([text, "b " * 10, "c"], 50)).endswith("b c")
    with pytest.raises(ContextError):
        llm.generate([text], replace(GREEDY, truncate_prompt_tokens=longest))


def test_prompt_with_modules_is_not_truncated(llm):
    llm.add_schema(Schema.from_string('<schema name="cut"><module name="a">The first module.</module></schema>'))
    prompt = Prompt.from_string('<prompt schema="cut"><a/>What then?</prompt>')
    with raises("prompt.not_cut", ParameterError, names="truncate_prompt_tokens"):
        llm.generate(prompt, replace(GREEDY, truncate_prompt_tokens=3))


def test_an_answer_without_text_has_the_same_tokens(llm):
    (output,) = llm.generate("Hello", replace(GREEDY, detokenize=False))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == ids(llm, GREEDY)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bad_words": "the"}, "bad_words is 'the'; it must be a list of at most 256 texts of at most 256 characters"),
        ({"bad_words": [" "]}, "bad_words is [' ']; it must be a list"),
        ({"bad_words": ["a"] * 257}, "bad_words is ['a', "),
        ({"allowed_token_ids": []}, "allowed_token_ids is []; it must be None or a list of token ids, at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids is [-1]; it must be None or a list of token ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be None, -1 or a whole number of at"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens is True; it must be None, -1"),
        ({"detokenize": 1}, "detokenize is 1; it must be True or False"),
        ({"detokenize": False, "stop": "."}, "stop is '.'; it must be None where detokenize is False"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_parameters_are_rejected(changes, sentence):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**changes)
    assert str(caught.value).startswith(sentence)


def test_a_token_beyond_the_vocabulary_is_refused(llm):
    with raises("prompt.unknown_token", ParameterError, names="9999"):
        llm.generate("x", SamplingParams(allowed_token_ids=[9999]))


def test_token_rules_are_built_once_per_call(llm, monkeypatch):
    """It may be long, and a thousand answers are made of it while others wait."""
    words, rules = Mock(wraps=factory.tokenized), Mock(wraps=factory.TokenRules)
    monkeypatch.setattr(factory, "tokenized", words)
    monkeypatch.setattr(factory, "TokenRules", rules)
    params = SamplingParams(n=8, max_tokens=2, bad_words=["a b", "c"], allowed_token_ids=range(200), seed=1)
    llm.generate(["Hello", "you", "all"], params)
    assert len(words.mock_calls) == len(rules.mock_calls) == 1
    llm.generate("Hello", replace(params))
    assert len(rules.mock_calls) == 2


def test_penalties_of_several_answers_share_only_the_prompt():
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    begun = seen_of(params, [5, 3, 5])
    assert begun is not None
    one, other = (Row(params, 0, seen=begun) for _ in range(2))
    for token in (3, 9, 3, 9):
        one.take(token)
    other.take(8)
    counted = [
        dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) for seen in (one.seen, other.seen, begun)
    ]
    assert counted == [{3: 2, 5: 0, 9: 2}, {3: 0, 5: 0, 8: 1}, {3: 0, 5: 0}]


def test_request_that_forbids_every_token_is_rejected_and_others_run(llm):
    nothing = replace(GREEDY, allowed_token_ids=[70], structured_outputs={"regex": "[0-9]+"})
    with raises("request.no_token_left", ParameterError, names="allowed_token_ids"):
        llm.generate(["Hello", "Hello"], [nothing, GREEDY])
    assert ids(llm, GREEDY)
