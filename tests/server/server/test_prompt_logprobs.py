"""Log-probabilities of prompts over HTTP: echo, vLLM's own field, and the requests of evaluation harnesses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.equivalence.oracle import prefill
from tests.server.server.conftest import CHAT, COMPLETIONS, Site

CONTEXT, CONTINUATION = [72, 105, 32, 116, 104, 101], [114, 101, 46]
IDS = CONTEXT + CONTINUATION


def expected(site: Site, ids: list[int]) -> Any:
    """(tokens - 1, vocabulary): the stock model's log-probabilities after every token but the last."""
    return prefill(site.service.llm.loaded, ids)[:-1].log_softmax(-1)


def test_a_harness_reads_the_likelihood_of_continuations(site):
    """The request and the reading of lm-eval's local-completions."""
    prompts = [IDS, IDS[2:]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}
    answer = site.post(COMPLETIONS, model="tiny", **body)
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        begin = len(ids) - len(CONTINUATION)
        found = choice["logprobs"]["token_logprobs"][begin:-1]
        truth = expected(site, ids)[begin - 1 :]
        wanted = [float(row[token]) for row, token in zip(truth, ids[begin:], strict=True)]
        assert found == pytest.approx(wanted, abs=1e-4)
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][begin:-1]]
        assert best == pytest.approx(truth.max(-1).values.tolist(), abs=1e-4)


def test_an_echo_without_an_answer(site):
    body = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = site.post(COMPLETIONS, **body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (body["prompt"], "length")
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == body["prompt"]
    assert told["text_offset"] == list(range(len(body["prompt"])))
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(list(top) == [token] for token, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True))
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_streamed_echo_equals_the_whole_one(site, logprobs, as_ids):
    prompt = site.service.llm.tokenizer.encode("Once upon") if as_ids else "Once upon"
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": logprobs}
    (whole,) = site.post(COMPLETIONS, **body)["choices"]
    choices = [event["choices"][0] for event in site.stream(COMPLETIONS, **body)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert whole["text"].startswith("Once upon")
    if logprobs is not None:
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        streamed = {name: [value for part in parts for value in part[name]] for name in whole["logprobs"]}
        assert streamed["tokens"] == whole["logprobs"]["tokens"]
        assert streamed["text_offset"] == whole["logprobs"]["text_offset"]
        # The second request may draft what the first one said. Tokens that are verified together round differently.
        assert streamed["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)
        for one, other in zip(streamed["top_logprobs"][1:], whole["logprobs"]["top_logprobs"][1:], strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    else:
        assert whole["logprobs"] is None


def test_echoed_prompts_share_the_cache(site):
    body = {"prompt": "Something that is said twice over", "max_tokens": 1, "echo": True}
    site.post(COMPLETIONS, **body)
    assert site.post(COMPLETIONS, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_prompt_logprobs_work_on_both_endpoints(site):
    (choice,) = site.post(COMPLETIONS, prompt=IDS, max_tokens=0, prompt_logprobs=1)["choices"]
    truth = expected(site, IDS)
    first, *steps = choice["prompt_logprobs"]
    assert first is None
    for token, step, row in zip(IDS[1:], steps, truth, strict=True):
        assert step[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert set(step) == {str(token), str(int(row.argmax()))}
        assert step[str(int(row.argmax()))]["rank"] == 1
    answer = site.post(CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in site.post(CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)


def test_too_many_logprobs_are_rejected(site):
    prompts = [IDS * 100] * 15
    status, error = site.refusal(COMPLETIONS, {"prompt": prompts, "echo": True, "logprobs": 19, "max_tokens": 1})
    assert (status, error["param"]) == (400, "logprobs")
    assert error["message"].startswith("the request asks for about 270,000 log-probabilities of its prompts (tokens ×")
    status, error = site.refusal(COMPLETIONS, {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 1})
    assert (status, error["param"]) == (400, "prompt_logprobs")


def test_tokenize_accepts_template_options(site):
    messages = [{"role": "user", "content": "Hi"}]
    whole = site.post("/tokenize", messages=messages)
    opened = site.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert whole["tokens"][: opened["count"]] == opened["tokens"]
    assert opened["count"] < whole["count"]
