"""Modules of a model with short convolutions in the engine: each has the state after its last token, or is none."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from inlay import LLM, ParameterError, SamplingParams, Schema
from inlay.engine.request import Request
from inlay.pml import PromptBuilder
from tests.model.engine.test_state_fuzz import Fuzz
from tests.model.engine.test_states import StateDriver
from tests.model.equivalence.recorder import Recorder, close
from tests.model.families.configs import tiny, tiny_with_tools

NAMES = ("sea", "hills", "town", "road", "inn")
SCHEMA = Schema.from_string(
    '<schema name="trip">Plan a trip.'
    + "".join(f'<module name="{name}">The {name} is warm and quiet in the month of May.</module>' for name in NAMES)
    + "</schema>"
)
REUSE = "anchored+linked:3"


class ModuleDriver(StateDriver):
    """LFM2 with a schema that is not encoded yet."""

    def __init__(self, *, slots: int = 64, tokens: int = 4000, encode: bool = False, **settings: object) -> None:
        super().__init__("lfm2", slots=slots, tokens=tokens, reuse="anchored", **settings)
        self.schema(SCHEMA, encode=encode)

    def asking(self, *names: str, text: str = "Where to?", **more: object) -> Request:
        """A request that imports modules."""
        return self.request(prompt(names, text), reuse=REUSE, **more)

    def check(self, request: Request) -> None:
        """Every logit is that of an engine with room for all."""
        answer = request.token_ids
        assert answer, request.error
        close(torch.stack(self.logits[request][-len(answer) :]), expected(tuple(request.ids), len(answer)))


def prompt(names: tuple[str, ...], text: str) -> PromptBuilder:
    found = SCHEMA.prompt()
    for name in names:
        found = found.use(name)
    return found.text(text)


ASKED: dict[tuple[int, ...], tuple[tuple[str, ...], str]] = {}


@cache
def reference() -> Recorder:
    recorder = Recorder(tiny("lfm2"))
    recorder.llm.add_schema(SCHEMA)
    return recorder


@cache
def expected(ids: tuple[int, ...], tokens: int) -> Tensor:
    """The logits of a prompt alone in an engine with room for all. Greedy answers are equal, so the rows are, too."""
    names, text = ASKED[ids]
    ((output, logits),) = reference().greedy([prompt(names, text)], tokens, reuse=REUSE)
    assert tuple(output.prompt_token_ids) == ids
    return logits


def ask(driver: ModuleDriver, names: tuple[str, ...], text: str = "Where to?", **more: object) -> Request:
    request = driver.asking(*names, text=text, **more)
    ASKED[tuple(request.ids)] = names, text
    return request


def test_stored_module_is_read_after_any_other_module():
    driver = ModuleDriver()
    first, second = ask(driver, NAMES[:3]), ask(driver, NAMES[2::-1])
    for request in (first, second):
        driver.run(request)
        driver.check(request)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.misses
    assert first.usage.cached_tokens == 0
    assert not second.usage.misses
    assert second.usage.shifted_tokens > 0
    assert second.usage.computed_tokens == 2 * 3 + len("Where to?")  # the module after the anchor is exact


def test_encoding_a_schema_stores_a_state_after_each_module():
    driver = ModuleDriver(encode=True)
    request = ask(driver, NAMES)
    driver.run(request)
    driver.check(request)
    assert request.usage is not None
    assert not request.usage.misses
    assert request.usage.recomputed_tokens == 3 * (len(NAMES) - 1)  # the one after the anchor is exact


def test_a_schema_with_more_modules_than_slots_is_encoded():
    driver = ModuleDriver(slots=5, encode=True)
    request = ask(driver, NAMES[:1])
    driver.run(request)
    driver.check(request)
    assert driver.states.evicted


def test_a_module_without_its_state_is_encoded_again():
    driver = ModuleDriver(encode=True)
    stored = [segment for segment in driver.store if segment.module and segment.state is not None]
    for segment in stored:
        driver.states.drop(segment)
    request = ask(driver, NAMES)
    driver.run(request)
    driver.check(request)
    assert request.usage is not None
    assert request.usage.misses
    again = ask(driver, NAMES)
    driver.run(again)
    driver.check(again)
    assert again.usage is not None
    assert not again.usage.misses


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_cancelled_request_leaks_no_state_slot(steps):
    driver = ModuleDriver(max_num_batched_tokens=30, prefill_chunk=16)
    requests = [ask(driver, NAMES[number : number + 3]) for number in range(3)]
    driver.add(*requests)
    driver.step(steps)
    driver.engine.release(requests[0])
    driver.audit()
    driver.finish()
    for request in requests[1:]:
        driver.check(request)
    assert driver.all_free()
    assert driver.states.free_slots == driver.states.slots - 1


def test_modules_and_states_are_kept_apart_by_salt():
    """A part of a message is private. So is the state after it."""
    llm = LLM(tiny_with_tools("lfm2"), kv_memory="16MiB", reuse="isolated")
    part = {"type": "text", "text": "The sea is warm in May, and it is quiet.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Where to?"}]}]
    found = []
    for salt in ("one", "two", "one", None):
        (output,) = llm.chat([messages], SamplingParams(max_tokens=1), cache_salt=salt)
        found.append((bool(output.usage.misses), output.usage.cached_tokens > 0))
    assert found == [(True, False), (True, False), (False, True), (True, False)]


def test_a_prompt_with_more_modules_than_slots_is_refused():
    driver = ModuleDriver(slots=5)
    request = ask(driver, NAMES)
    driver.run(request)
    assert request.error is not None
    assert getattr(request.error, "code", "") == "cache.too_many_states"
    driver.audit()


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"recompute": "profiled:0.2"}, "policy.unsupported"),
        ({"recompute": "query:0.2"}, "policy.unsupported"),
        ({"find": "content"}, "policy.unsupported"),
    ],
)
def test_tokens_within_a_module_are_not_recomputed(asked, code):
    llm = LLM(tiny("lfm2"), kv_memory="16MiB")
    with pytest.raises(ParameterError) as refused:
        llm.generate(["Where to?"], reuse="modular", **asked)
    assert refused.value.code == code


class ModuleFuzz(Fuzz):
    """Random prompts of modules, of which some lose their states."""

    disturbs, found = "drop", "read"
    driver: ModuleDriver

    def made(self, name: str) -> ModuleDriver:
        pick = self.random.choice
        return ModuleDriver(
            slots=pick([8, 12, 30]),
            tokens=pick([500, 900]),
            chunk_size=pick([1, 4, 8]),
            max_num_seqs=pick([2, 4]),
            max_num_batched_tokens=pick([16, 40, 200]),
            prefill_chunk=pick([7, 32]),
        )

    def request(self) -> Request:
        draw = self.random
        names = tuple(draw.sample(NAMES, draw.randint(0, 4)))
        text = draw.choice(["Where to?", "And now, where do we go?"])
        return ask(self.driver, names, text, tokens=draw.randint(1, 6))

    def disturb(self) -> None:
        """Drop a state that no request reads."""
        driver = self.driver
        states = [segment for segment in driver.store if segment.state and not segment.state.readers]
        if states:
            driver.states.drop(self.random.choice(states))

    def read(self, request: Request) -> bool:
        return bool(request.usage and request.usage.module_tokens and not request.usage.misses)


def test_random_prompts_of_modules():
    seen = Counter[str]()
    for seed in range(4):
        fuzz = ModuleFuzz(seed, "lfm2")
        fuzz.run(40)
        seen += fuzz.seen
    assert min(seen[kind] for kind in ("add", "cancel", "preempt", "drop", "read", "evicted")) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_more_random_prompts_of_modules(seed):
    ModuleFuzz(seed, "lfm2").run(80)
