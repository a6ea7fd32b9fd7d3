"""LLM on an engine that it reaches only through bytes: messages are plain data, and may arrive late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from inlay import LLM, AbortedError, CapacityError, ParameterError, SamplingParams, Schema
from inlay.client.engine import Prepared, SteppedEngine
from inlay.client.local import InProcessClient
from inlay.events import events_from_bytes, events_to_bytes
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.request import EncodeRequest, EngineRequest
from inlay.types import EngineStats
from tests.conftest import tiny
from tests.raising import raises

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First <param name="p" len="6" default="one"/> module.</module>'
    '<module name="b">Second.</module> Behind.</schema>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Wire(SteppedEngine):
    """An engine whose requests and events are bytes on their way. Events of a step arrive after the next one."""

    def __init__(self, inner: InProcessClient) -> None:
        self._inner = inner
        self._on_the_way: list[tuple[str, Callable[[Any], None], bytes]] = []
        self.finished: list[tuple[str, int]] = []

    @property
    def model(self) -> ModelInfo:
        return self._inner.model

    def compile_grammar(self, params: SamplingParams, salt: str = "") -> None:
        self._inner.compile_grammar(params, salt)

    def prepare(self, request: EngineRequest, grammar: Any = None) -> Prepared:
        assert grammar is None
        return self._inner.prepare(EngineRequest.from_bytes(request.to_bytes(), self.model.keys))

    def submit(self, request: Prepared, listener: Callable[[Any], None]) -> None:
        self._inner.submit(request, self._sent(request.id, listener))

    def encode(self, request: EncodeRequest, listener: Callable[[Any], None]) -> None:
        read = EncodeRequest.from_bytes(request.to_bytes(), self.model.keys)
        self._inner.encode(read, self._sent(request.request_id, listener))

    def _sent(self, name: str, listener: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda events: self._on_the_way.append((name, listener, events_to_bytes(events)))

    def finish(self, request_id: str, index: int) -> None:
        self.finished.append((request_id, index))
        self._inner.finish(request_id, index)

    def cancel(self, request_id: str, *, report: bool = False) -> None:
        if not report:
            self._on_the_way = [one for one in self._on_the_way if one[0] != request_id]
        self._inner.cancel(request_id, report=report)

    def stored(self, request: EncodeRequest) -> Future[frozenset[bytes]]:
        return self._inner.stored(EncodeRequest.from_bytes(request.to_bytes(), self.model.keys))

    def resident(self, request: EncodeRequest) -> Future[list[dict[str, int]]]:
        return self._inner.resident(EncodeRequest.from_bytes(request.to_bytes(), self.model.keys))

    def forget(self, request: EncodeRequest | None = None) -> Future[int]:
        return self._inner.forget(request)

    def pump(self) -> bool:
        arriving, self._on_the_way = self._on_the_way, []
        more = self._inner.pump()
        for _, listener, data in arriving:
            listener(events_from_bytes(data))
        return more or bool(self._on_the_way)

    def stats(self) -> EngineStats:
        return self._inner.stats()

    def check_health(self) -> None:
        self._inner.check_health()

    def shutdown(self) -> None:
        self._inner.shutdown()


class RemoteLLM(LLM):
    def connect(self, seed: int | None) -> SteppedEngine:
        return Wire(super().connect(seed))


def made(kind: type[LLM], **settings: Any) -> LLM:
    # The number of drafts depends on measured times, which differ between two engines.
    fixed = {"kv_memory": "16MiB", "seed": 0, "chunk_size": 4, "speculation": "off"}
    return kind(tiny("llama"), **{**fixed, **settings})


def results_of(llm: LLM, prompts: Any, params: Any, **how: Any) -> list[Any]:
    """The output without its dependence on the clock and on the batch: of log-probabilities the ranks."""
    llm.reset_prefix_cache()
    found = []
    for output in llm.generate(prompts, params, **how):
        assert output.metrics.total_s >= output.metrics.ttft_s > 0
        answers = [
            (
                one.text,
                one.token_ids,
                one.finish_reason,
                one.stop_reason,
                [[(token, each.rank, each.decoded_token) for token, each in at.items()] for at in one.logprobs or ()],
                one.cumulative_logprob is None,
            )
            for one in output.outputs
        ]
        found.append(
            (output.request_id, output.prompt, output.prompt_token_ids, output.finished, output.usage, answers)
        )
    return found


CASES = {
    "greedy": GREEDY,
    "drawn": SamplingParams(n=3, max_tokens=12, logprobs=2),  # with the engine's seeds
    "min_tokens": SamplingParams(n=2, max_tokens=30, min_tokens=8, seed=4, stop=["a", "e", " ", "t"]),
    "grammar": SamplingParams(n=2, max_tokens=30, seed=3, structured_outputs={"regex": "[a-c]{3,9}"}),
}


@pytest.mark.parametrize("name", CASES)
def test_remote_answers_equal_local_answers(name):
    prompts = ["Hello", [1, 2, 3], [{"role": "user", "content": "Well?"}]]
    assert results_of(made(RemoteLLM), prompts, CASES[name]) == results_of(made(LLM), prompts, CASES[name])


@pytest.mark.parametrize("include", [False, True])
def test_tokens_after_a_stop_string_are_dropped(include):
    local, remote = made(LLM), made(RemoteLLM)
    params = SamplingParams(n=4, max_tokens=40, seed=1, ignore_eos=True)
    whole = local.generate("Tell me something.", params)[0].outputs
    stop = next(char for char in whole[0].text[3:] if char in whole[1].text)
    cut = replace(params, stop=stop, include_stop_str_in_output=include)
    expected = results_of(local, "Tell me something.", cut)
    assert {answer[3] for answer in expected[0][-1]} >= {stop}
    assert results_of(remote, "Tell me something.", cut)[0][1:] == expected[0][1:]
    assert len(remote.client.finished) == len(set(remote.client.finished)) > 1
    assert remote.stats().running == 0, "the engine has heard of it"
    steps = remote.stats().steps
    remote.client.pump()
    assert remote.stats().steps == steps


def test_schemas_and_streams_and_distributions_cross():
    local, remote = made(LLM), made(RemoteLLM)
    told: list[tuple[int, int]] = []
    for llm in (local, remote):
        llm.add_schema(SCHEMA, cache_salt="mine", progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    prompt = SCHEMA.prompt().use("a", p="two").use("b").text("Q")
    outputs = [llm.generate(prompt, GREEDY, cache_salt="mine")[0] for llm in (local, remote)]
    assert outputs[1].usage == outputs[0].usage
    assert outputs[1].usage.module_tokens > 0, "it reads what was encoded"
    assert outputs[1].outputs == outputs[0].outputs
    *_, last = remote.stream("Hello", GREEDY)
    assert last.outputs == local.generate("Hello", GREEDY)[0].outputs
    expected, found = (llm.distributions(["Hello", "You"], [[5, 6], [7]]) for llm in (local, remote))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_errors_cross():
    remote = made(RemoteLLM, kv_memory=2 * 64 * made(LLM).client.model.bytes_per_token)
    with raises("engine.kv_memory", CapacityError) as caught:
        remote.generate(["Hello", "Too long " * 100], GREEDY)
    assert caught.value.outputs[0].finished
    stream = remote.stream("Hello", GREEDY)
    next(stream)
    remote.client.cancel(str(2), report=True)
    with raises("request.aborted", AbortedError, names="2"):
        list(stream)


def test_duplicate_request_id_is_rejected():
    llm = made(LLM)
    first, second = (llm.processor.process("Hello", GREEDY, llm.policy(), request_id="x") for _ in range(2))
    states = [llm.outputs.begin(request) for request in (first, second)]
    for request, state in zip((first, second), states, strict=True):
        llm.client.submit(llm.client.prepare(request), state.add)
    assert isinstance(states[1].failure, ParameterError)
    assert str(states[1].failure) == "request_id 'x' is taken by a request that is under way; give another one"
    while not states[0].answered:
        llm.client.pump()
    assert len(states[0].output().outputs[0].token_ids) == 12
