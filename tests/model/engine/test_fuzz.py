"""Random requests of every kind over a small pool and a store on disk: each answer is correct.

Every finished answer is compared with an oracle that gets only the composed prompt of the request (composed_oracle.py).
Requests that accept no approximation are compared with the stock model too. Random choices: the model and its settings,
policies, salts, adapters, number of answers, lifetimes, priorities and deadlines. Between steps the test cancels,
promotes, profiles, forgets, damages files on disk, and starts a new process over the same folder.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from inlay import SamplingParams, Schema
from inlay.client.local import InProcessClient
from inlay.engine.encoder import Encoding
from inlay.engine.request import Request
from inlay.errors import DeadlineError
from inlay.prompt.composed import CachedSpan, NewSpan
from inlay.types import Scope
from tests.adapters import merged, write_adapter
from tests.clock import Clock
from tests.model.engine.driving import Driver, ids, placed_requests, step
from tests.model.engine.reading import Read, description_of, lossy_of
from tests.model.equivalence.composed_oracle import ComposedOracle
from tests.model.equivalence.oracle import prefill

PUBLIC = Schema.from_string(
    '<schema name="s">Front. <module name="a">The first of them, say.</module>'
    '<union><module name="u">One way.</module><module name="v">Another way of it.</module></union>'
    '<module name="b">The second one is longer, as it has to be.</module>'
    '<module name="c">The third <param name="p" len="5" default="of"/> all.</module>'
    '<module name="d">First, and <module name="e">more of it</module> last.</module>'
    '<scaffold modules="a b"/></schema>'
)
OWN = Schema.from_string(
    '<schema name="own">Mine. <module name="a">The first of them, say.</module>'
    '<module name="b">What nobody else may see.</module></schema>'
)
DOCUMENTS = ["A document of some length.", "Another one, not like it.", "A document of other things.", "Short one."]
TRUNKS = [ids(24, seed) for seed in range(3)]
POLICIES = [
    *("exact", "exact", "off", "modular", "modular", "modular", "anchored", "isolated", "modular+promote:off"),
    *("anchored+linked:3", "isolated+linked:2", "anchored+profiled:0.3", "modular+profiled:0.2", "isolated+blend:0.3"),
    *("anchored+query:0.2", "modular+blend:0.3", "modular+query:0.4+promote:off", "anchored+profiled*query:0.3"),
    *("modular+across", "anchored+across+linked:2", "modular+across+blend:0.2"),
]


class Fuzz:
    """A sequence of engines over one folder, and their requests."""

    def __init__(self, seed: int, folder: Path, clock: Clock) -> None:
        self.random, self.seen, self.clock = random.Random(seed), Counter[str](), clock
        pick = self.random.choice
        self.model = pick(["llama", "qwen2", "mistral", "gpt2", "llama"])
        self.settings = {
            "kv_tokens": pick([1100, 1200, 1400, 2200]),  # the largest has room for primers
            "chunk_size": pick([1, 4, 8]),
            "max_num_seqs": pick([2, 5, 8]),
            "prefill_chunk": pick([5, 16, 64]),
            "eviction": pick(["hybrid", "lru", "lru2", "lfu", "cost"]),
            "promotion_memory": pick([0.3, 0.6]),
            "shadow": pick([0.0, 0.5]),
            "store": folder / "store",
            "store_private": True,
            "store_codec": pick(["none", "int8", "int8", "fp8"]),
            "store_bytes": pick(["16GiB", "256KiB"]),
        }
        self.elsewhere = placed_requests()
        self.adapters: dict[str, Path] = {}
        self.start()
        loaded = self.driver.loaded
        for name, number in (("x", 1), ("y", 2)):
            self.adapters[name] = write_adapter(folder / name, loaded, seed=number)
        self.stop()
        self.settings["adapters"] = self.adapters
        self.start()
        digests = self.driver.llm.client.model.adapters
        self.models = {b"": loaded} | {digests[name]: merged(loaded, path) for name, path in self.adapters.items()}
        self.oracle = ComposedOracle(self.models)
        self.alive: list[Request] = []

    def start(self) -> None:
        # The test steps the engine itself, so no other thread may make it poll.
        with patch.object(InProcessClient, "wake"):
            self.driver = Driver(self.model, **self.settings)
        llm = self.driver.llm
        self.read = Read(self.driver)
        llm.observe(self.read)
        _, specs = llm.schemas.add(PUBLIC, llm.policy("modular"))
        llm.schemas.add(OWN, llm.policy("modular"), Scope("one"))
        if self.random.random() < 0.4:
            self.driver.add(Encoding("a schema", tuple(specs)))

    def stop(self) -> None:
        self.settle()
        self.driver.llm.shutdown()

    def prompt(self, salt: str, packed: bool) -> Any:
        draw = self.random
        kind = draw.random()
        if kind < 0.2:
            trunk = draw.choice(TRUNKS)
            return trunk[: draw.randrange(1, 25)] + [draw.randrange(256) for _ in range(draw.randrange(1, 5))]
        if kind < 0.45:
            parts = []
            for text in draw.sample(DOCUMENTS, draw.randrange(1, 4)):
                mark = {"type": "ephemeral"} | draw.choice([{}, {}, {"ttl": "5m"}, {"ttl": "20s"}])
                parts.append({"type": "text", "text": text} | ({"cache_control": mark} if draw.random() < 0.8 else {}))
            parts.append({"type": "text", "text": draw.choice(["What?", "Go"])})
            system = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
            return [*system, {"role": "user", "content": parts}]
        if salt == "one" and draw.random() < 0.4:
            built, names = OWN.prompt(), ["a", "b"]
        else:
            built, names = PUBLIC.prompt(), ["a", draw.choice("uv"), "b", "c", "d"]
        chosen = [name for name in names if draw.random() < 0.6]
        if packed and draw.random() < 0.3:
            draw.shuffle(chosen)
        for name in chosen:
            built = built.use(name, **({"p": "in"} if name == "c" and draw.random() < 0.4 else {}))
        return built.text(draw.choice(["What?", "Well, then?", "Go"]))

    def request(self) -> Request:
        draw, llm = self.random, self.driver.llm
        salt, reuse = draw.choice(["", "", "one", "two"]), draw.choice(POLICIES)
        policy = llm.policy(reuse, draw.choice([None, None, "schema"]))
        params: dict[str, Any] = {"temperature": 0}
        if draw.random() < 0.3:
            params = {"temperature": 0.8, "seed": draw.randrange(9), "n": draw.choice([1, 3])}
        made = llm.processor.process(
            self.prompt(salt, policy.packed),
            SamplingParams(**params, ignore_eos=True, max_tokens=draw.choice([1, 2, 4, 12])),
            policy,
            Scope(salt, draw.choice(["", "t"]), draw.choice([None, None, None, "x", "y"])),
            priority=draw.choice([0, 0, 1, -1]),
            deadline=time.perf_counter() + draw.random() if draw.random() < 0.05 else None,
        )
        return llm.local.prepare(made)

    def step(self) -> None:
        """One step of the engine, and at times something else between two."""
        draw, engine = self.random, self.driver.engine
        step(self.driver.llm)
        if engine.stalled:
            engine.residency.wait(0.01)
        happens = draw.random()
        if happens < 0.04 and self.alive:
            self.cancel(draw.choice(self.alive))
        elif happens < 0.05:
            self.clock.advance(draw.choice([1, 15, 200]))
        elif happens < 0.055:
            self.damage()
        elif happens < 0.06:
            engine.forget()
        elif not engine.busy:
            for _ in range(draw.randrange(12)):
                engine.idle_step()

    def cancel(self, request: Request) -> None:
        self.seen["cancelled"] += 1
        self.alive.remove(request)
        for member in request.family:
            if not member.finished:
                self.driver.engine.release(member)

    def damage(self) -> None:
        files = sorted(self.settings["store"].glob("v1/*.safetensors"))
        if files:
            path = self.random.choice(files)
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.unlink()
            path.write_bytes(data)
            self.seen["damaged"] += 1

    def run(self, requests: int) -> None:
        made = 0
        while made < requests or self.alive:
            while made < requests and len(self.alive) < 8 and self.random.random() < 0.5:
                self.alive.append(self.request())
                self.driver.add(self.alive[-1])
                made += 1
            if self.alive or self.random.random() < 0.5:
                self.step()
            for request in [one for one in self.alive if one.answered]:
                self.alive.remove(request)
                self.check(request)
            if not self.alive and self.random.random() < 0.2:
                self.settle()

    def check(self, request: Request) -> None:
        for member in request.family:
            rows = self.driver.logits.pop(member, [])
            if isinstance(member.error, DeadlineError):
                self.seen["deadlines"] += 1
                continue
            assert member.error is None, member.error
            self.seen["preempted"] += member.preemptions
            self.compare(member, torch.stack(rows))

    def compare(self, request: Request, rows: Tensor) -> None:
        composed, said = request.prompt.composed, request.token_ids
        self.seen["answers"] += 1
        assert len(rows) == len(said)
        if all(part.exact if isinstance(part, CachedSpan) else isinstance(part, NewSpan) for part in composed):
            behind = [request.positions[-1] + 1 + step for step in range(len(said) - 1)]
            ids, positions = [*request.ids, *said[:-1]], [*request.positions, *behind]
            stock = prefill(self.models[request.adapter], ids, positions)[len(request.ids) - 1 :]
            self.hold(request, rows, stock, "exact")
        lossy = lossy_of(request)
        expected = self.oracle.logits(composed, request.adapter, said[:-1])
        if lossy and not same(rows, expected):
            if request.preemptions:  # before a preemption it may have read another form
                return
            found = self.read.found[request]
            expected = self.oracle.logits(composed, request.adapter, said[:-1], self.oracle.stand_in(lossy, found))
        recomputed = request.prompt.recomputed.tokens > 0
        self.hold(request, rows, expected, "lossy" if lossy else "recomputed" if recomputed else "composed")
        self.seen["promoted"] += request.usage.promoted_tokens > 0
        self.seen["across"] += request.usage.across_tokens > 0
        self.seen["disk"] += request.usage.disk_tokens > 0

    def hold(self, request: Request, rows: Tensor, expected: Tensor, kind: str) -> None:
        self.seen[kind] += 1
        assert same(rows, expected), (kind, float((rows - expected).abs().max()), description_of(request))

    def settle(self) -> None:
        """With no request left and no load in progress, the accounting is right and only the store has chunks."""
        engine, run = self.driver.engine, self.driver.llm.local.thread.run
        while engine.busy:
            step(self.driver.llm)
        until = time.monotonic() + 20
        while not engine.residency.settled or engine.residency.moving:
            run(engine.poll)
            engine.residency.wait(0.005)
            assert time.monotonic() < until, "something is on its way for ever"
        run(engine.poll)
        for worker in (engine.profiler, engine.promoter, engine.shadow):
            if worker is not None:
                worker.give_up()
        self.driver.audit()
        assert not any(segment.holds for segment in self.driver.store)
        assert not engine.kv_manager.pending
        assert not placed_requests(self.elsewhere)


def same(rows: Tensor, expected: Tensor) -> bool:
    """Within 1e-4 absolute, the contract of fp32."""
    return bool((rows - expected).abs().max() < 1e-4)


def fuzz(seed: int, folder: Path, clock: Clock, requests: int) -> Counter[str]:
    """So many requests to one process, and as many to the next one over the same store."""
    made = Fuzz(seed, folder, clock)
    made.run(requests)
    made.stop()
    made.start()
    made.run(requests)
    made.stop()
    assert made.driver.all_free()
    return made.seen


@pytest.mark.long
def test_a_few_requests_of_every_kind(tmp_path, clock):
    assert fuzz(1, tmp_path, clock, requests=12)["answers"] > 12


@pytest.mark.slow
def test_many_requests_of_every_kind(tmp_path, clock):
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen += fuzz(seed, tmp_path / str(seed), clock, requests=40)
    assert seen["answers"] > 1000
    kinds = ("exact", "composed", "recomputed", "lossy", "promoted", "across", "disk")
    ends = ("preempted", "cancelled", "damaged")
    assert min(seen[kind] for kind in kinds + ends) > 3, seen
