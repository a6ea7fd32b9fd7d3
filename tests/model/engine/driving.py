"""An LLM whose engine the test steps in its own thread, so that the test controls each step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from inlay import LLM, SamplingParams, Schema
from inlay.attention.plan import FIRST, LENGTH, PlanContext
from inlay.engine.encoder import Encoding
from inlay.engine.request import Request
from inlay.kv.identity import SegmentSpec
from inlay.models.load import LoadedModel
from inlay.pml import PromptBuilder
from inlay.sampling import sampler
from inlay.types import Scope
from tests.conftest import tiny
from tests.model.engine.observing import Observed, observed
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import close
from tests.unit.kv.accounting import audit


def step(llm: LLM) -> list[Request]:
    """One step of an engine, under the lock that a tier's threads take when they report a finished load or copy."""
    return llm.local.thread.run(llm.local.engine.step)


class Driver:
    """Args:
    kv_tokens: the size of the pool.
    loaded: the model, in place of a named one.
    record: whether the logits of every request are kept, and passes noted, of which ``passes`` holds the number
        of tokens.
    """

    def __init__(
        self,
        name: str = "llama",
        *,
        kv_tokens: int = 4000,
        record: bool = True,
        loaded: LoadedModel | None = None,
        **settings: Any,
    ) -> None:
        self.loaded: LoadedModel = loaded or tiny(name)
        per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in self.loaded.spec.layers)
        settings.setdefault("chunk_size", 4)
        settings.setdefault("max_pass_s", None)  # which pass computes what depends on no clock
        settings.setdefault("kv_memory", kv_tokens * per_token)
        settings.setdefault("speculation", "off")  # one token a step
        settings.setdefault("reuse", "anchored")  # no primer, so that counts are small
        self.llm = LLM(self.loaded, seed=0, **settings)
        self.engine = self.llm.local.engine
        self.store = self.llm.store
        seen = observed(self.llm) if record else Observed()
        self.logits, self.passes = seen.logits, seen.tokens

    def schema(self, schema: Schema, *, encode: bool = True, **policy: Any) -> None:
        """Make a schema known."""
        _, specs = self.llm.schemas.add(schema, self.llm.policy(**policy))
        if encode:
            self.encode(specs)

    def encode(self, specs: Sequence[SegmentSpec]) -> None:
        """Step until these segments are stored."""
        encoding = Encoding("a schema", tuple(specs))
        self.engine.add(encoding)
        while not encoding.finished:
            self.step()
        if encoding.error is not None:
            raise encoding.error

    def request(
        self,
        prompt: Any,
        tokens: int = 5,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        forced: str = "",
        salt: str = "",
        **params: Any,
    ) -> Request:
        """A request that is not queued yet, greedy by default. forced: the text that it has to generate."""
        ids = self.llm.encoder.text(forced)
        chosen = {"temperature": 0, "ignore_eos": True, "max_tokens": len(ids) or tokens} | params
        made = self.llm.processor.process(
            prompt,
            SamplingParams(**chosen),
            self.llm.policy(reuse, positions),
            Scope(salt),
            priority=priority,
            deadline=deadline,
            forced=ids,
        )
        return self.llm.local.prepare(made)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self, times: int = 1) -> list[Request]:
        """Step, and check the books."""
        heard: list[Request] = []
        for _ in range(times):
            heard += step(self.llm)
            self.audit()
        return heard

    def finish(self, most: int = 2000) -> None:
        """Step until no request is left. Fails after ``most`` steps."""
        while self.engine.busy:
            self.step()
            most -= 1
            assert most, "somebody never ends"

    def run(self, *requests: Request) -> list[tuple[int, ...]]:
        """The answers of requests that arrive at the same time."""
        self.add(*requests)
        self.finish()
        return [tuple(request.token_ids) for request in requests]

    def audit(self) -> None:
        def check() -> None:
            audit(self.store, [request.allocation for request in self.engine.scheduler.running])

        self.llm.local.thread.run(check)
        waiting = [request.allocation for request in self.engine.scheduler.waiting]
        assert not any(allocation.tail or allocation.modules for allocation in waiting)

    def all_free(self) -> bool:
        """True if the pool is empty once the store has dropped all segments without references."""
        self.store.clear()
        return len(self.store) == 0 and self.store.pool.free_chunks == self.store.pool.chunks


def prompt_of(schema: Schema, names: Iterable[str], text: str = "Well?") -> PromptBuilder:
    """A prompt of these modules in this order, and a question."""
    built = schema.prompt()
    for name in names:
        built = built.use(name)
    return built.text(text)


def work_off(worker: Any, tokens: int = 7) -> int:
    """Let a worker of idle time finish in steps of so many tokens. Returns the number of steps."""
    steps = 0
    while worker.step(tokens):
        steps += 1
    return steps


def sample_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample as on a device, where a step starts before the tokens of the last one are known."""
    monkeypatch.setattr(sampler, "on_device", lambda logits: True)


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def slots(context: PlanContext, tokens: int) -> list[int]:
    """Where the first tokens of a context lie."""
    first, length = context.table[[FIRST, LENGTH]]
    return [slot for begin, count in zip(first, length, strict=True) for slot in range(begin, begin + count)][:tokens]


def check_stock(driver: Driver, request: Request) -> None:
    """Every logit that a request's tokens were chosen from is that of the stock model over prompt and answer."""
    answer = request.token_ids
    assert answer, request.error
    behind = [request.positions[-1] + 1 + step for step in range(len(answer) - 1)]
    positions = [*request.positions, *behind]
    expected = prefill(driver.loaded, [*request.ids, *answer[:-1]], positions)[len(request.ids) - 1 :]
    close(torch.stack(driver.logits[request][-len(answer) :]), expected)
    if not request.sampling.forced and request.params.greedy:
        assert answer == expected.argmax(-1).tolist()


def placed_requests(elsewhere: Sequence[object] = ()) -> list[object]:
    """The requests and encodings alive that have slots in a pool, but for those of other tests."""
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (Request, Encoding)]
    placed = [one for one in alive if one.allocation.tail or one.allocation.modules]
    return [one for one in placed if not any(one is other for other in elsewhere)]
