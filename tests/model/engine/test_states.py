"""States of recurrent layers in the engine: what they continue, where they are kept, and when they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inlay import LLM, CapacityError, ModelError, ParameterError, SamplingParams
from inlay.engine import probes
from inlay.engine.request import Request
from inlay.kv.pool import LEAST_SLOTS, StatePool
from inlay.models.mixers import rebound
from inlay.models.mixers.states import StateSpan
from tests.conftest import tiny as tiny_llama
from tests.model.engine.driving import Driver, ids, sample_on_device
from tests.model.equivalence.recorder import close
from tests.model.families.configs import stock_model, tiny, tiny_with_tools
from tests.model.families.oracle import untouched

MODELS = ("qwen3_5_text", "mamba2")


def sizes(name: str) -> tuple[int, int]:
    """The bytes of a state and of a token."""
    store = LLM(tiny(name), kv_memory="16MiB").store
    assert store.states is not None
    return store.states.slot_bytes, store.pool.bytes_per_token


class StateDriver(Driver):
    """A recurrent model with a number of state slots and a number of tokens of KV."""

    def __init__(self, name: str = "qwen3_5_text", *, slots: int = 64, tokens: int = 4000, **settings: Any) -> None:
        self.name = name
        slot, token = sizes(name)
        settings.setdefault("reuse", None)  # the model's own default
        super().__init__(
            loaded=tiny(name), kv_memory=slots * slot + tokens * token, state_memory=slots * slot, **settings
        )
        assert self.store.states is not None
        self.states: StatePool = self.store.states

    def check(self, request: Request) -> None:
        """Every logit that the answer was chosen from is the stock model's."""
        answer = request.token_ids
        assert answer, request.error
        expected = untouched(self.name, [*request.ids, *answer[:-1]])[len(request.ids) - 1 :]
        close(torch.stack(self.logits[request][-len(answer) :]), expected)

    def cached(self, prompt: list[int], **more: Any) -> int:
        """Answer a prompt, check it, and return how many of its tokens came from the store."""
        request = self.request(prompt, **more)
        self.run(request)
        self.check(request)
        assert request.usage is not None
        return request.usage.cached_tokens

    def poison(self) -> None:
        """Fill all slots without an owner with NaN."""
        running = [each.allocation.state for each in self.engine.scheduler.running]
        used = {segment.state.slot for segment in self.store if segment.state is not None}
        used |= {slot for each in running if each for slot in (each.slot, *(slot for _, slot in each.kept))}
        used |= {state.slot for each in running if each for state in each.held}
        free = [slot for slot in range(self.states.slots) if slot not in used]
        assert self.engine.runner.states is not None
        for tensor in self.engine.runner.states.tensors.values():
            tensor[free] = torch.nan


@pytest.mark.parametrize("name", MODELS)
def test_fresh_slot_has_nothing_of_its_previous_request(name):
    driver = StateDriver(name, slots=6, max_num_batched_tokens=16, prefill_chunk=8)
    for seed in range(4):
        requests = [driver.request(ids(1 + 13 * number, seed + number)) for number in range(3)]
        driver.add(*requests)
        while driver.engine.busy:
            driver.poison()
            driver.step()
        for request in requests:
            driver.check(request)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_is_never_ahead_of_its_kv(name):
    """A pool of few tokens evicts ends of segments. No state is kept after tokens that the store has lost."""
    driver = StateDriver(name, tokens=160)
    begin = ids(40)
    seen = 0
    for seed in range(8):
        driver.cached(begin[: 20 + 5 * (seed % 4)] + ids(50, seed + 1), tokens=12)
        for segment in driver.store:
            if segment.state is not None:
                seen += 1
                before = segment.run.before.tokens
                whole = driver.store.longest(segment.run)
                assert whole.tokens == segment.tokens, before
    assert seen


def test_state_is_evicted_with_its_last_token():
    driver = StateDriver(chunk_size=16)
    driver.cached(ids(40))
    last = max((segment for segment in driver.store if segment.state), key=lambda segment: segment.tokens)
    stored = driver.states.stored
    pool = driver.store.pool
    lent = driver.store.allocate(pool.free_chunks * pool.chunk_size + 1)  # evicts the last chunk of the text
    assert last.state is None
    assert driver.states.stored < stored
    pool.free(lent)
    driver.audit()


@pytest.mark.parametrize("name", MODELS)
def test_fully_stored_prompt_computes_its_last_token(name):
    driver, prompt = StateDriver(name), ids(50)
    assert driver.cached(prompt) == 0
    again = driver.request(prompt)
    driver.run(again)
    driver.check(again)
    assert again.usage is not None
    assert (again.usage.cached_tokens, again.usage.computed_tokens, again.usage.duplicate_tokens) == (49, 1, 1)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_kept_apart_by_salt(name):
    driver, prompt = StateDriver(name), ids(50)
    found = [driver.cached(prompt, salt=salt) for salt in ("one", "two", "one", "")]
    assert found == [0, 0, 49, 0]
    assert driver.engine.evict_texts("one")
    assert [driver.cached(prompt, salt=salt) for salt in ("one", "two")] == [0, 49]


def test_states_are_kept_at_an_interval():
    """A prompt that leaves a stored one in the middle continues at the last multiple before that place."""
    plain, dense, prompt = StateDriver(), StateDriver(state_interval=20), ids(100)
    for driver, found in ((plain, 0), (dense, 60)):
        assert driver.cached(prompt) == 0
        assert driver.cached(prompt[:70] + ids(30, 1)) == found
        driver.audit()


def test_states_at_an_interval_take_an_eighth_of_the_slots():
    driver = StateDriver(slots=32, state_interval=10)
    driver.cached(ids(200), tokens=1)
    assert driver.states.stored <= 32 // 8 + 2  # and those before the end of the prompt and after the answer


def test_load_check_stops_after_one_pair_that_agrees():
    """On a processor that is slow in bfloat16, three pairs took a minute for a model of 0.8B."""
    loaded, stock = tiny("qwen3_5_text"), []

    def note(_module, _args, named):
        stock.extend([1] if "inlay" not in named else [])

    hook = loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    LLM(loaded, kv_memory="16MiB")
    hook.remove()
    assert len(stock) == 2


def test_stock_convolutions_of_the_load_check_are_wide():
    x, weight, bias = torch.randn(1, 6, 30).bfloat16(), torch.randn(6, 1, 4).bfloat16(), torch.randn(6).bfloat16()
    expected = torch.conv1d(x.float(), weight.float(), bias.float(), groups=6).bfloat16()
    with probes.WideConvolution():
        found = torch.nn.functional.conv1d(x, weight, bias=bias, groups=6)
    assert found.equal(expected)


def test_a_model_without_states_refuses_an_interval():
    with pytest.raises(ParameterError) as refused:
        LLM(tiny_llama("llama"), state_interval=64)
    assert refused.value.code == "parameter.conflict"


def test_off_neither_reads_nor_keeps_states():
    driver, prompt = StateDriver(), ids(50)
    assert [driver.cached(prompt, reuse="off") for _ in range(2)] == [0, 0]
    assert driver.states.stored == 0


def test_common_prefix_of_two_prompts_gets_a_state_for_the_third():
    driver, begin = StateDriver(), ids(40)
    assert [driver.cached(begin + ids(20, seed)) for seed in (1, 2, 3)] == [0, 0, 40]


def test_waiting_request_continues_the_state_of_a_running_prompt():
    driver, begin = StateDriver(max_num_batched_tokens=16, prefill_chunk=16), ids(40)
    first, second = (driver.request(begin + ids(20, seed)) for seed in (1, 2))
    driver.run(first, second)
    for request in (first, second):
        driver.check(request)
    assert second.usage is not None
    assert second.usage.cached_tokens == 40


def test_several_answers_share_the_state_before_the_last_token():
    driver = StateDriver(max_num_batched_tokens=16)
    leader = driver.request(ids(45), n=3, temperature=1, top_k=1)
    driver.run(leader)
    for request in leader.family:
        driver.check(request)
    assert [request.token_ids for request in leader.followers] == [leader.token_ids] * 2


def test_preempted_request_continues_its_released_state():
    driver = StateDriver()
    request = driver.request(ids(30), tokens=12)
    driver.add(request)
    driver.step(5)
    said = len(request.token_ids)
    driver.engine.scheduler.requeue(request)
    driver.audit()
    computed = sum(driver.passes)
    driver.finish()
    driver.check(request)
    assert 0 < said < 12
    assert sum(driver.passes) - computed == 12 - said  # no token is computed again


@pytest.mark.parametrize("ahead", [False, True])
def test_next_turn_continues_the_state_after_a_stop_token(monkeypatch, ahead):
    """A device computes the stop token before the host knows it, and its KV then counts."""
    driver, prompt = StateDriver(), ids(30)
    free = driver.request(prompt, reuse="off", tokens=6)
    driver.run(free)
    if ahead:
        sample_on_device(monkeypatch)
    stop = next(token for number, token in enumerate(free.token_ids) if number > 1 and token not in free.token_ids[:2])
    first = driver.request(prompt, tokens=20, stop_token_ids=[stop], ignore_eos=False)
    driver.run(first)
    said = first.token_ids
    assert said[-1] == stop
    assert driver.cached([*prompt, *said, *ids(5, 9)]) == len(prompt) + len(said) - (not ahead)


def test_conversation_keeps_the_state_before_its_generation_prompt():
    """A later turn may render the answer without a part of it, such as the opening of a reasoning."""
    llm = LLM(tiny_with_tools("qwen3_5_text"), kv_memory="16MiB")
    (output,) = llm.chat([{"role": "user", "content": "What is there to see?"}], SamplingParams(max_tokens=2))
    ids = list(output.prompt_token_ids)
    opening = ids[-len(llm.encoder.template("<|im_start|>assistant\n")) :]
    assert llm.tokenizer.decode(opening) == "<|im_start|>assistant\n"
    kept = {segment.run.before.tokens + segment.tokens for segment in llm.store if segment.state is not None}
    assert {len(ids) - len(opening), len(ids) - 1} <= kept


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_cancelled_request_leaks_no_slot(steps):
    driver = StateDriver(max_num_batched_tokens=16, prefill_chunk=8)
    requests = [driver.request(ids(40, seed), tokens=20) for seed in range(3)]
    driver.add(*requests)
    driver.step(steps)
    driver.engine.release(requests[1])
    driver.audit()
    driver.finish()
    for request in (requests[0], requests[2]):
        driver.check(request)
    assert driver.all_free()
    assert driver.states.free_slots == driver.states.slots - 1


def test_states_have_their_own_budget():
    driver, prompts = StateDriver(slots=7), [ids(40, seed) for seed in range(6)]
    for prompt in prompts:
        driver.cached(prompt)
    assert driver.states.evicted
    assert driver.states.stored <= 6
    assert driver.cached(prompts[-1]) == 39  # the last one used stays
    assert driver.cached(prompts[0]) == 0  # its KV is stored, and its state is not


def test_a_request_waits_while_others_hold_all_slots():
    driver = StateDriver(slots=LEAST_SLOTS, max_num_seqs=8)
    requests = [driver.request(ids(20, seed)) for seed in range(5)]
    driver.run(*requests)
    for request in requests:
        driver.check(request)


def test_states_of_an_invalid_request_are_dropped():
    driver, prompt = StateDriver(), ids(40)
    request = driver.request(prompt)
    driver.add(request)
    driver.step(2)
    assert driver.states.stored
    request.damaged, request.error = True, RuntimeError("its logits are damaged")
    driver.engine.release(request)
    assert driver.states.stored == 0
    driver.audit()


def test_too_little_memory_for_states_is_refused():
    slot, token = sizes("qwen3_5_text")
    with pytest.raises(CapacityError) as refused:
        LLM(tiny("qwen3_5_text"), kv_memory=1000 * token, state_memory=slot)
    assert refused.value.code == "cache.pool_too_small"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"shadow": 0.5}, "model.no_reuse"),
        ({"reuse": "modular"}, "policy.unsupported"),
        ({"positions": "schema"}, "policy.unsupported"),
    ],
)
def test_settings_unsupported_by_recurrent_models_are_rejected(settings, code):
    with pytest.raises(ParameterError) as refused:
        LLM(tiny("qwen3_5_text"), kv_memory="16MiB", **settings)
    assert refused.value.code == code


def test_memory_for_states_is_refused_for_a_model_without_states():
    with pytest.raises(ParameterError) as refused:
        LLM(tiny_llama("llama"), kv_memory="16MiB", state_memory="1MiB")
    assert refused.value.code == "parameter.conflict"


def test_load_check_finds_layers_that_lose_their_state(monkeypatch):
    loaded = tiny("lfm2")
    monkeypatch.setattr(probes, "StateSpan", lambda source, *rest: StateSpan(None, *rest))
    with pytest.raises(ModelError) as refused:
        LLM(loaded, kv_memory="16MiB")
    assert refused.value.code == "model.not_servable"


def test_a_mixer_with_unknown_operations_is_refused(monkeypatch):
    """As of a transformers release that renames one."""
    monkeypatch.delitem(rebound.SCANS, "mamba2_chunk_scan")
    with pytest.raises(ModelError) as refused:
        rebound.rebind(stock_model("mamba2"))
    assert refused.value.code == "model.not_servable"


@pytest.mark.long
@pytest.mark.parametrize("name", ["granite-4.0-h-350m", "lfm2-350m", "qwen3.5-0.8b"])
def test_random_models_with_recurrent_layers_are_served_in_bfloat16(name):
    """Rounding grows over many random layers, and must stay below what the check of a recurrent model allows."""
    llm = LLM(f"random:{name}", dtype="bfloat16", kv_memory="512MiB")
    assert len(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
