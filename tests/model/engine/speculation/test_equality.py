"""Answers with drafts equal those without: in all families, greedy and drawn, with every parameter of an answer.

Planted drafts are right up to a random token (planted.py), so that every number of accepted tokens occurs. Other runs
look drafts up. The model computes in fp32. Rows beside a row change its logits by rounding alone. So two greedy answers
may part at a step whose two likeliest tokens are that near: 1e-3 nats, and 0.05 with KV rounded to whole numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.attention.cpu import instruction_sets
from inlay.engine import forward
from inlay.engine.request import Request
from inlay.engine.speculator import Speculator
from inlay.models.load import load_model
from inlay.types import RequestOutput
from tests.adapters import write_adapter
from tests.conftest import CONFIGS, tiny
from tests.model.engine.speculation.planted import FREE, Hopeful, Name, Planted

SCHEMA = Schema.from_string(
    '<schema name="s">Front. <module name="a">The first of them, say, the first.</module>'
    '<module name="b">The second one is longer, as it has to be.</module></schema>'
)
STRUCTURES: list[dict[str, Any]] = [
    {"regex": "(ab|cd)[a-f]{3,20}"},
    {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}},
    {"choice": ["one of them", "one or the other", "another"]},
]
#: Settings of the engine, one per run.
SETTINGS: list[dict[str, Any]] = [
    {"chunk_size": 4},
    {"chunk_size": 1, "max_num_seqs": 5, "prefill_chunk": 7},
    {"chunk_size": 16, "kv_cache_dtype": "int8"},
    {"chunk_size": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    {"chunk_size": 4, "kv_memory": "small"},
]


class Asked(NamedTuple):
    """A request: its prompt, its parameters, and the name of its adapter."""

    prompt: Any
    params: SamplingParams
    adapter: str | None


def parameters(draw: random.Random, seed: int) -> SamplingParams:
    """Random parameters. Half of the requests are greedy."""
    made: dict[str, Any] = {"seed": seed, "max_tokens": draw.choice([1, 2, 7, 24, 40]), "temperature": 0}
    if draw.random() < 0.5:
        made |= {"temperature": draw.choice([0.3, 0.9, 1.5]), "n": draw.choice([1, 1, 3])}
        made |= draw.choice([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.9}])
    if draw.random() < 0.3:
        made |= draw.choice([{"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.5}])
    if draw.random() < 0.2:
        made["logit_bias"] = {draw.randrange(256): draw.choice([-50, 3]) for _ in range(4)}
    if draw.random() < 0.2:
        made["bad_words"] = ["e", "th", "abc"]
    if draw.random() < 0.3:
        made["logprobs"] = draw.choice([0, 3])
    if draw.random() < 0.1:
        made["prompt_logprobs"] = 1
    if draw.random() < 0.2:
        made["stop"] = draw.choice([["a"], ["q", "z1"], ["\x00", "ab"]])
    if draw.random() < 0.2:
        made |= {"stop_token_ids": list(range(60, 256, 7)), "min_tokens": min(5, made["max_tokens"])}
    if draw.random() < 0.25 and "bad_words" not in made and "stop_token_ids" not in made:
        made["structured_outputs"] = draw.choice(STRUCTURES)
        made |= draw.choice([{}, {}, {"reasoning_end": "d"}, {"reasoning_start": "a", "reasoning_end": "d"}])
    else:
        made["ignore_eos"] = draw.random() < 0.5
    return SamplingParams(**made)


def prompt(draw: random.Random, number: int) -> Any:
    kind = draw.random()
    if kind < 0.4:
        built = SCHEMA.prompt()
        for name in ("a", "b"):
            built = built.use(name) if draw.random() < 0.6 else built
        return built.text(f"Number {number}: what?")
    word = "".join(draw.choice("abcde") for _ in range(draw.randrange(3, 9)))
    return f"{number} {word} {word} {word} and {word}"


def requests(seed: int, count: int, adapters: Sequence[str | None]) -> list[Asked]:
    draw = random.Random(seed)
    return [
        Asked(prompt(draw, number), parameters(draw, 1000 * seed + number), draw.choice(adapters))
        for number in range(count)
    ]


def answers(llm: LLM, asked: Sequence[Asked]) -> list[RequestOutput]:
    llm.add_schema(SCHEMA)
    made = llm.generate(
        [each.prompt for each in asked], [each.params for each in asked], adapter=[each.adapter for each in asked]
    )
    assert llm.stats().running == 0
    llm.store.clear()
    assert llm.store.pool.free_chunks == llm.store.pool.chunks, "slots have leaked"
    return made


def contents(output: RequestOutput, within: float) -> list[Any]:
    """All that an answer consists of. ``within``: the tolerance of its log-probability."""
    return [
        (
            each.token_ids,
            each.text,
            each.finish_reason,
            each.stop_reason,
            pytest.approx(each.cumulative_logprob, abs=within),
            None if each.logprobs is None else [list(one) for one in each.logprobs],
        )
        for each in output.outputs
    ]


def compare(family: str, settings: dict[str, Any], seed: int, count: int, folder: Path, *, planted: bool) -> int:
    """Answer random requests with and without drafts. Returns the number of answers."""
    loaded = tiny(family)
    names: list[str | None] = [None]
    if seed % 3 == 0:
        settings = settings | {"adapters": {"x": write_adapter(folder / f"{family}-{seed}", loaded, seed=1)}}
        names = [None, "x"]
    if settings.get("kv_memory") == "small":  # answers lose their places to each other
        per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in loaded.spec.layers)
        settings = settings | {"kv_memory": 500 * per_token}
    asked = requests(seed, count, names)
    common: dict[str, Any] = {"kv_memory": "16MiB", "seed": 0, "profile": "off", "promotion_memory": 0} | settings
    expected = answers(LLM(loaded, speculation="off", **common), asked)
    known: dict[Name, Sequence[int]] = {
        (output.prompt_token_ids, each.params.seed, one.index): one.token_ids
        for each, output in zip(asked, expected, strict=True)
        for one in output.outputs
    }
    llm = LLM(loaded, speculation="lookup", **common)
    drafts = Planted(known, loaded.spec.vocab_size, seed) if planted else Speculator(FREE, Hopeful)
    llm.local.engine.speculator = drafts
    found = answers(llm, asked)
    drafted, accepted = (dict(counts) for counts in (llm.stats().drafted_tokens, llm.stats().accepted_tokens))
    assert sum(drafted.values()) > sum(accepted.values()) >= planted
    assert sum(output.usage.drafted_tokens for output in found) <= sum(drafted.values())
    within = 0.05 if settings.get("kv_cache_dtype") == "int8" else 1e-3  # rounding decides between two whole numbers
    plain: LLM | None = None
    for each, before, after in zip(asked, expected, found, strict=True):
        if contents(after, within) != contents(before, within):
            plain = plain or LLM(loaded, speculation="off", **common)
            assert near_tie(plain, each, before, after, within), each
    return len(known)


def near_tie(llm: LLM, asked: Asked, before: RequestOutput, after: RequestOutput, within: float) -> bool:
    """True if two greedy answers part at a step at which both tokens are likeliest within this many nats."""
    if asked.params.temperature != 0 or asked.params.structured_outputs is not None:
        return False
    (one,), (other,) = (output.outputs for output in (before, after))
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    step = next((number for number, (mine, its) in pairs if mine != its), None)
    if step is None:
        return False
    llm.add_schema(SCHEMA)
    (shown,) = llm.distributions([asked.prompt], [one.token_ids[: step + 1]], adapter=asked.adapter)
    likeliest, second = shown[step].topk(2).values.tolist()
    either = min(float(shown[step][output.token_ids[step]]) for output in (one, other))
    return likeliest - second < within and either >= second


def test_answers_are_equal(tmp_path):
    count = 0
    for number, family in enumerate(("llama", "mistral", "gpt2", "qwen2-mixed", "gemma4_text")):
        count += compare(family, SETTINGS[number], number, 30, tmp_path, planted=True)
    assert count >= 200


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_with_drafts_from_texts_are_equal(tmp_path, family):
    assert compare(family, SETTINGS[0], 11, 30, tmp_path, planted=False) >= 30


@pytest.mark.long
@pytest.mark.parametrize("family", list(CONFIGS))
def test_many_answers_are_equal(tmp_path, family):
    count = 0
    for seed in range(5):
        count += compare(family, SETTINGS[seed], 100 + seed, 40, tmp_path, planted=seed % 2 == 0)
    assert count >= 2000 / len(CONFIGS)


def test_wrongly_accepted_token_is_detected(monkeypatch, tmp_path):
    monkeypatch.setattr(forward, "agrees", lambda draft, number, token: number < len(draft.tokens))
    with pytest.raises(AssertionError):
        compare("llama", SETTINGS[0], 1, 30, tmp_path, planted=True)


def drafting(answer: Sequence[int] | None, prompt: str, **parameters: Any) -> RequestOutput:
    """The answer to a prompt, with this draft in its first pass behind the prompt; None for no drafts."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, speculation="lookup" if answer else "off")
    params = SamplingParams(temperature=0, max_tokens=40, **parameters)
    if answer is not None:
        name = (tuple(llm.encoder.text(prompt)), params.seed, 0)
        llm.local.engine.speculator = Certain({name: answer}, 0)
    (output,) = llm.generate([prompt], [params])
    return output


class Certain(Planted):
    """Drafts the whole answer."""

    def _draft(self, request: Request) -> list[int]:
        coming = self.answers[(request.ids, request.params.seed, request.index)]
        return list(coming[len(request.token_ids) :])[: max(0, request.sampling.limit - len(request.token_ids) - 1)]


def test_tokens_behind_a_stop_string_do_not_count_as_accepted():
    whole = drafting(None, "abcdefgh abcdefgh abcd").outputs[0]
    stop = whole.text[2:4]
    alone = drafting(None, "abcdefgh abcdefgh abcd", stop=[stop])
    output = drafting(whole.token_ids, "abcdefgh abcdefgh abcd", stop=[stop])
    assert contents(output, 1e-4) == contents(alone, 1e-4)
    said = len(output.outputs[0].token_ids)
    assert output.usage.accepted_tokens == said - 1 < output.usage.drafted_tokens


def test_a_stop_string_in_a_draft_comes_before_the_error_of_a_later_row():
    """Behind "abcdef" the grammar wants "g", which is not allowed."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, speculation="off")
    limits = {"structured_outputs": {"regex": "abcdefgh"}, "allowed_token_ids": llm.encoder.text("abcdef")}
    expected = drafting(None, "abcdefgh", stop=["f"], **limits)
    output = drafting(llm.encoder.text("abcdefgh"), "abcdefgh", stop=["f"], **limits)
    assert contents(output, 1e-4) == contents(expected, 1e-4)
    assert output.usage.accepted_tokens > 0


@pytest.mark.skipif(not instruction_sets(), reason="PyTorch attends")
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", None), ("float32", None)]
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_lone_answer_has_the_same_bits_with_drafts(dtype, quantization, kv_cache_dtype):
    loaded = load_model("random:tiny", dtype=dtype, quantization=quantization)
    if loaded.model.model.layers[0].mlp.down.product() is None:
        pytest.skip("PyTorch multiplies these weights on this processor")
    common: dict[str, Any] = {"kv_memory": "16MiB", "seed": 0, "promotion_memory": 0, "kv_cache_dtype": kv_cache_dtype}
    alone, llm = LLM(loaded, speculation="off", **common), LLM(loaded, speculation="lookup", **common)
    for number in range(6):
        prompt = f"{number}: " + "a text that is longer than a few tiles of keys, " * (2 + 5 * number)
        params = SamplingParams(temperature=number % 2, seed=number, max_tokens=60, ignore_eos=True, logprobs=0)
        (expected,) = alone.generate([prompt], [params])
        name = (expected.prompt_token_ids, params.seed, 0)
        llm.local.engine.speculator = Planted({name: expected.outputs[0].token_ids}, loaded.spec.vocab_size, number)
        (found,) = llm.generate([prompt], [params])
        assert found.usage.accepted_tokens > 10
        assert found.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob
        assert contents(found, 0.0) == contents(expected, 0.0)
