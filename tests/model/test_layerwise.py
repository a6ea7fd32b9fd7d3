"""Modules that load from the host tier layer by layer, while the request that reads them computes.

The device is a second pool of the CPU, and a thread makes the copies. Slots hold NaN until a layer of them is copied,
so an early read makes the answer NaN.
"""

from __future__ import annotations

import math
import threading
import time

import pytest

import inlay.kv.offload.host
from inlay import LLM, SamplingParams
from inlay.engine.forward import StepObserver
from inlay.engine.request import Request
from inlay.kv.offload.host import aligned
from tests.model.attention.devices import pretend
from tests.model.hooks import failing
from tests.model.test_host_memory import GREEDY, PROMPTS, SCHEMAS, add_all, answers, keys_of, make, tokens_of
from tests.unit.kv.accounting import audit

WAIT_S = 30


@pytest.fixture
def device(monkeypatch):
    pretend(monkeypatch)


@pytest.fixture(scope="module")
def expected():
    llm = make(kv_memory="8MiB")
    add_all(llm)
    found = tokens_of(answers(llm, PROMPTS[:2]))
    llm.shutdown()
    return found


class Passes(StepObserver):
    """How many segments were on their way up in each pass, and how many requests were in it."""

    def __init__(self) -> None:
        self.arrivals: list[int] = []
        self.requests: list[int] = []

    def computed(self, made, logits, running, seconds) -> None:
        self.arrivals.append(len(made.arrivals))
        self.requests.append(len(dict.fromkeys(made.owners)))


class Copies:
    """Copies of layers to the device that poison what they have not filled yet, and of which each may be held back.

    attended: for each layer, whether a pass has attended there since the copies began. before: called with a layer
    before it is copied.
    """

    def __init__(self, llm: LLM, monkeypatch, before=lambda layer: None) -> None:
        self.attended = [threading.Event() for _ in llm.storage.keys]
        self.copied: list[int] = []
        self.before = before
        self._llm = llm
        attend = type(llm.local.engine.runner.backend).attend

        def begins(layer, slots):
            if not layer:
                self._poison(slots)
            self.before(layer)
            self.copied.append(layer)

        def noted(backend, query, key, value, pool, plan, layer, options):
            self.attended[layer].set()
            return attend(backend, query, key, value, pool, plan, layer, options)

        llm.storage.before_put = begins
        monkeypatch.setattr(type(llm.local.engine.runner.backend), "attend", noted)

    def _poison(self, slots) -> None:
        for event in self.attended:
            event.clear()
        for memory in (*self._llm.storage.keys, *self._llm.storage.values):
            for run in slots:
                memory[:, run.first : run.end] = float("nan")


def filled(**settings) -> tuple[LLM, Passes]:
    """An LLM, the modules of whose first prompts are in the host tier alone."""
    llm = make(**settings)
    add_all(llm)
    passes = Passes()
    llm.observe(passes)
    return llm, passes


def ended(llm: LLM) -> None:
    """Once late layers have been copied and no request reads them, the index owns all chunks."""
    residency, deadline = llm.local.residency, time.monotonic() + WAIT_S
    while True:
        residency.wait(0.05)
        residency.poll()
        if not (residency.moving or residency.demoting or residency.bringing(keys_of(llm, SCHEMAS[0]))):
            try:
                audit(llm.store)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            else:
                break
    llm.shutdown()


def test_the_first_layer_is_computed_before_the_last_is_copied(device, monkeypatch, expected):
    """The copy of each layer waits until the layer before it is computed. A pass that waited for all layers would
    hang.
    """
    llm, passes = filled(store_timeout_s=WAIT_S)

    def before(layer):
        if layer:
            assert copies.attended[layer - 1].wait(WAIT_S), "layer 0 is not computed before the last is copied"
            time.sleep(0.05)  # a pass that does not wait for its copy reads this layer now

    copies = Copies(llm, monkeypatch, before)
    (output,) = answers(llm, PROMPTS[:1])
    assert output.outputs[0].token_ids == expected[0]
    assert output.usage.host_tokens > 0
    assert output.usage.computed_tokens < 20
    assert max(passes.arrivals) == 2, "both modules"
    assert copies.copied == sorted(copies.copied), "a layer of all modules before the next"
    again = llm.generate(PROMPTS[0], GREEDY)[0]
    assert again.outputs[0].token_ids == expected[0]
    assert (again.usage.host_tokens, again.usage.computed_tokens) == (0, 1), "what came up is stored, and its text"
    ended(llm)


@pytest.mark.parametrize("layer", [0, 1])
def test_tokens_computed_with_a_damaged_layer_are_dropped(device, monkeypatch, expected, layer, caplog):
    """The request is recomputed with its modules. Other requests of that pass still get their answers."""
    llm, passes = filled(store_timeout_s=WAIT_S)
    go_on, first_is_up, check = threading.Event(), threading.Event(), inlay.kv.offload.host.checksum
    copies = Copies(llm, monkeypatch)
    residency, keys = llm.local.residency, keys_of(llm, SCHEMAS[0])

    def checked(data):
        coming = residency.bringing(keys) if threading.current_thread().name == "inlay-host-reader" else ()
        assert not coming or go_on.wait(WAIT_S)
        if coming and all(map(residency.arriving, coming)):
            first_is_up.set()
            assert copies.attended[0].wait(WAIT_S)
        return check(data)

    monkeypatch.setattr(inlay.kv.offload.host, "checksum", checked)
    (alone,) = llm.generate("something else", GREEDY)
    damage(llm, layer)
    encoded, engine = llm.stats().encoded_tokens, llm.local.engine
    first, other = (request(llm, prompt) for prompt in (PROMPTS[0], "something else"))
    engine.add(first)
    while not residency.bringing(keys):  # the victims are copied first
        step(llm)
    go_on.set()
    if layer:
        assert first_is_up.wait(WAIT_S)
        copied_ahead(llm)
    engine.add(other)
    while not (first.finished and other.finished):
        step(llm)
        engine.residency.wait(0.01)
    assert tuple(first.token_ids) == tuple(expected[0])
    assert tuple(other.token_ids) == tuple(alone.outputs[0].token_ids)
    assert "checksum of layer" in caplog.text
    assert llm.stats().encoded_tokens > encoded
    assert first.usage.host_tokens == 0
    assert dict(first.usage.misses).keys() == {"corrupt"}
    together = [requests for requests, arrivals in zip(passes.requests, passes.arrivals, strict=True) if arrivals]
    assert together == ([2] if layer else []), "one pass has read the layer before it"
    (again,) = answers(llm, PROMPTS[:1])
    assert again.outputs[0].token_ids == expected[0]
    assert again.usage.misses == (), "the recomputed module is stored"
    ended(llm)


def test_late_layer_ends_only_the_wait(device, monkeypatch, expected):
    llm, passes = filled(store_timeout_s=0.3)
    go_on = threading.Event()

    def before(layer):
        if layer:
            assert go_on.wait(WAIT_S)

    Copies(llm, monkeypatch, before)
    (output,) = answers(llm, PROMPTS[:1])
    assert output.outputs[0].token_ids == expected[0]
    assert max(passes.arrivals) > 0
    assert output.usage.host_tokens == 0
    go_on.set()
    ended(llm)


def test_running_answers_do_not_wait_for_layers(device, monkeypatch, expected):
    """While another answer is generated, a request waits before its pass, not in it."""
    llm, passes = filled(store_timeout_s=WAIT_S)
    Copies(llm, monkeypatch, lambda layer: time.sleep(0.05))
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    _, second = llm.generate(["x", PROMPTS[0]], [long, GREEDY])
    assert second.outputs[0].token_ids == expected[0]
    assert second.usage.host_tokens > 0
    assert max(passes.arrivals) == 0
    assert max(passes.requests) == 2, "it came up while the other went on"
    ended(llm)


def test_failed_request_releases_its_chunks_and_loading_continues(device, monkeypatch):
    """A fault of the pass ends the request. Its chunks still load, for other requests."""
    llm, _ = filled(store_timeout_s=WAIT_S)
    copies = Copies(llm, monkeypatch)

    def before(layer):
        if layer:
            copies.attended[0].wait(WAIT_S)

    copies.before = before
    with failing(llm.loaded, RuntimeError("the pass fails")), pytest.raises(RuntimeError, match="the pass fails"):
        answers(llm, PROMPTS[:1])
    copies.attended[0].set()
    (output,) = answers(llm, PROMPTS[:1])
    assert output.usage.computed_tokens < 20
    ended(llm)


def step(llm: LLM) -> None:
    """Run one step of the engine under its lock; loaded chunks enter the store between two steps."""
    llm.local.thread.run(llm.local.engine.step)


def copied_ahead(llm: LLM) -> None:
    """Copy the next victims to the host tier, so that the next step can allocate without waiting."""
    residency = llm.local.residency
    llm.local.thread.run(residency.demote)
    while residency.demoting:
        residency.wait(0.01)
        llm.local.thread.run(residency.poll)
        llm.local.thread.run(residency.demote)


def request(llm: LLM, prompt) -> Request:
    return llm.local.prepare(llm.processor.process(prompt, GREEDY, llm.policy()))


def damage(llm: LLM, layer: int) -> None:
    """A wrong byte in that layer of all that the host tier has."""
    host = llm.local.residency.tiers[0]
    for kept in host.kept.values():
        at = sum(aligned(math.prod(shape)) for shape, _ in kept.slabs[:layer])
        host.memory.write(kept.pages, at, host.memory.read(kept.pages, at, 1) ^ 1)
