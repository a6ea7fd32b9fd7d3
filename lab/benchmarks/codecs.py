"""What a codec of the store does to answers, and whether keys are better rounded before their rotation than after it.

    python lab/benchmarks/codecs.py [QUESTIONS] [DTYPE]

Questions of modular-qa over the bundled model. First scores of attention: keys of whole prompts, rounded as they are
stored and as they were before the rotation, and with a scale for each token and head, as a pool of 8 bits has them ("by
token"), against those of full prefill.
Then answers: modules are read from a store through each codec, or, for the form before the rotation that no codec has,
rounded in the pool. Prints rows, then JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay import LLM, SamplingParams
from inlay.attention.quantization import dequantize, quantize
from inlay.attention.rope import Rotary
from inlay.check.divergence import divergence
from inlay.kv.codecs import CODECS
from inlay.kv.codecs.codec import from_floats, to_floats
from inlay.kv.segment import Segment
from inlay.models.spec import dtype_name
from inlay_lab.eval.modular_cases import Round, draw_rounds
from inlay_lab.eval.modular_qa import MAX_TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SCORED = 8  # prompts whose scores are compared


def rounded(codec: str, numbers: Tensor) -> Tensor:
    """Keys, or keys and values, (2, kv_heads, tokens, head_dim) in fp32, as they come back through a codec."""
    shape = tuple(numbers.shape)
    slab = from_floats(numbers.numpy(), "float32")
    data = CODECS[codec].encode(slab, "float32")
    return torch.from_numpy(to_floats(CODECS[codec].decode(data, shape, "float32"), "float32"))


def turned(rotary: Rotary, keys: Tensor, positions: Tensor, *, back: bool) -> Tensor:
    """Keys without the rotation of their positions, or with it again."""
    cos, sin = rotary.angles([int(at) if back else -int(at) for at in positions])
    return rotary.turn(keys, cos, sin)


def before_rotation(codec: str, rotary: Rotary, slab: Tensor, positions: Tensor) -> Tensor:
    """As ``rounded``, of keys as they were before their rotation."""
    plain = torch.stack((turned(rotary, slab[0], positions, back=True), slab[1]))
    found = rounded(codec, plain)
    return torch.stack((turned(rotary, found[0], positions, back=False), found[1]))


# Scores


class Caught:
    """A backend that notes queries and keys of the passes through it."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.passes: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: Any, plan: Any, layer: int, options: Any
    ) -> Tensor:
        self.passes.append((layer, query.float().clone(), key.float().clone(), torch.tensor(plan.positions)))
        return self.backend.attend(query, key, value, pool, plan, layer, options)


def score_errors(llm: LLM, rounds: list[Round]) -> dict[str, float]:
    """Root mean square error of scores, as a share of their standard deviation, the mean over layers and prompts."""
    runner = llm.client.engine.runner
    caught = runner.backend = Caught(runner.backend)
    errors: dict[str, list[float]] = {}
    for each in rounds[: max(1, SCORED // 2)]:
        llm.add_schema(each.schema(), encode=False, replace=True)
        for case in each.cases[:2]:
            caught.passes.clear()
            llm.generate(
                each.prompt(case), SamplingParams(temperature=0, max_tokens=1), reuse="off", positions="packed"
            )
            for layer, query, key, positions in caught.passes:
                if query.shape[1] < 100:
                    continue
                rotary = llm.loaded.spec.layers[layer].rotary
                assert rotary is not None
                for codec, eight_bits in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
                    in_pool = dequantize(*quantize(key, eight_bits))
                    errors.setdefault(f"{codec} by token", []).append(_score_error(query, key, in_pool))
                both = torch.stack((key, key))
                for codec in ("int8", "fp8"):
                    for name, found in (
                        (f"{codec} after", rounded(codec, both)[0]),
                        (f"{codec} before", before_rotation(codec, rotary, both, positions)[0]),
                    ):
                        errors.setdefault(name, []).append(_score_error(query, key, found))
    runner.backend = caught.backend
    llm.client.reset_prefix_cache().result()
    return {name: statistics.fmean(values) for name, values in errors.items()}


def _score_error(query: Tensor, exact: Tensor, found: Tensor) -> float:
    """Of the last 32 rows against all keys. query: (heads, rows, head_dim); keys: (kv_heads, rows, head_dim)."""
    groups = query.shape[0] // exact.shape[0]
    last = query[:, -32:].reshape(exact.shape[0], -1, query.shape[-1])
    assert last.shape[1] == 32 * groups
    scores, others = last @ exact.mT, last @ found.mT
    return float((others - scores).pow(2).mean().sqrt() / scores.std())


# Answers


@dataclass(frozen=True)
class Way:
    """A way to read modules. store: its codec; "" for the pool. change: what happens to the pool before it is read."""

    name: str
    store: str = ""
    change: Callable[[LLM], None] | None = None


def unturned(codec: str) -> Callable[[LLM], None]:
    """Round all that is stored, as it was before its rotation."""

    def change(llm: LLM) -> None:
        for segment in llm.store:
            _round(llm, segment, codec)

    return change


def _round(llm: LLM, segment: Segment, codec: str) -> None:
    storage, dtype = llm.client.storage, dtype_name(llm.loaded.model.dtype)
    positions = torch.arange(segment.run.start, segment.run.end)
    for number, layer in enumerate(llm.loaded.spec.layers):
        assert layer.rotary is not None
        slab = torch.from_numpy(to_floats(storage.read_slab(number, segment.slots), dtype))
        storage.write_slab(
            number, segment.slots, from_floats(before_rotation(codec, layer.rotary, slab, positions).numpy(), dtype)
        )


def answers(way: Way, llm: LLM, rounds: list[Round], said: list[Any]) -> Iterator[tuple[bool, float]]:
    """Whether each answer is right, and its divergence from full prefill. said: what that said, and how likely."""
    for each, (tokens, expected) in zip(rounds, said, strict=True):
        llm.add_schema(each.schema(), replace=True)
        while llm.stats().unwritten_segments:
            llm.client.pump()
            time.sleep(0.001)
        if way.store:
            llm.client.reset_prefix_cache().result()
        if way.change is not None:
            way.change(llm)
        prompts = [each.prompt(case) for case in each.cases]
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        if way.store not in ("", "none"):
            assert all(output.usage.exact_tokens == 0 for output in outputs), "all modules are read as lossy forms"
        found = llm.distributions(prompts, tokens)
        for case, output, reference, other in zip(each.cases, outputs, expected, found, strict=True):
            yield output.outputs[0].text.strip() == case.answer, divergence(reference, other)
        llm.client.reset_prefix_cache().result()


def references(llm: LLM, rounds: list[Round]) -> list[Any]:
    """What full prefill says, and how it is distributed."""
    said = []
    for each in rounds:
        llm.add_schema(each.schema(), encode=False, replace=True)
        prompts = [each.prompt(case) for case in each.cases]
        outputs = llm.generate(prompts, GREEDY, reuse="off", positions="packed")
        tokens = [output.outputs[0].token_ids for output in outputs]
        said.append((tokens, llm.distributions(prompts, tokens, reuse="off", positions="packed")))
        llm.client.reset_prefix_cache().result()
    return said


def main() -> None:
    questions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    dtype = sys.argv[2] if len(sys.argv) > 2 else "bfloat16"
    rounds = draw_rounds(documents=6, spare=6, questions=questions, seed=0)
    settings: dict[str, Any] = {"kv_memory": "256MiB", "seed": 0, "dtype": dtype, "profile": "off"}
    llm = LLM("demo", **settings)
    found: dict[str, Any] = {"questions": questions, "dtype": dtype, "scores": score_errors(llm, rounds)}
    for name, error in found["scores"].items():
        print(f"scores, {name:12} {error:.5f}")
    said = references(llm, rounds)
    llm.shutdown()
    ways = [
        Way("pool"),
        *(Way(codec, store=codec) for codec in CODECS),
        *(Way(f"{codec} before rotation", change=unturned(codec)) for codec in ("int8", "fp8")),
    ]
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            store = {"store": Path(folder), "store_codec": way.store} if way.store else {}
            llm = LLM("demo", **settings, **store)
            rows = list(answers(way, llm, rounds, said))
            llm.shutdown()
        right, kl = statistics.fmean(each for each, _ in rows), statistics.fmean(each for _, each in rows)
        found[way.name] = {"exact_match": right, "kl": kl}
        print(f"{way.name:22} exact match {right:.4f}, {kl:.5f} nats", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
