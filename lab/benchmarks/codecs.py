"""The effect of the store's codecs on answers, and whether keys are better rounded before or after their rotation.

    python lab/benchmarks/codecs.py [QUESTIONS] [DTYPE]

It asks modular-qa questions with the bundled model. First it compares attention scores with full prefill's. Keys of
whole prompts are rounded as stored, as before their rotation, and with a scale for each token and head as in an 8-bit
pool ("by token"). Then it compares answers: modules are read from a store through each codec. No codec rounds before
the rotation, so that form is rounded in the pool. Prints rows, then JSON.
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
from inlay.attention.rope import Rotary
from inlay.attention.storage import dequantize, quantize
from inlay.check.run import divergence
from inlay.kv.offload.codecs import CODECS, from_floats, to_floats
from inlay.kv.pool import Segment
from inlay.models.spec import dtype_name
from inlay_lab.eval.modular_cases import Round, draw_rounds
from inlay_lab.eval.modular_qa import MAX_TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SCORED = 8  # prompts with compared scores


def rounded(codec: str, numbers: Tensor) -> Tensor:
    """Keys, or keys and values, (2, kv_heads, tokens, head_dim) in fp32, after a round trip through a codec."""
    shape = tuple(numbers.shape)
    slab = from_floats(numbers.numpy(), "float32")
    data = CODECS[codec].encode(slab, "float32")
    return torch.from_numpy(to_floats(CODECS[codec].decode(data, shape, "float32"), "float32"))


def turned(rotary: Rotary, keys: Tensor, positions: Tensor, *, back: bool) -> Tensor:
    """Keys with the rotation of their positions removed (``back``) or applied again."""
    cos, sin = rotary.angles([int(at) if back else -int(at) for at in positions])
    return rotary.turn(keys, cos, sin)


def before_rotation(codec: str, rotary: Rotary, slab: Tensor, positions: Tensor) -> Tensor:
    """As ``rounded``, for keys rounded before their rotation."""
    plain = torch.stack((turned(rotary, slab[0], positions, back=True), slab[1]))
    found = rounded(codec, plain)
    return torch.stack((turned(rotary, found[0], positions, back=False), found[1]))


class Caught:
    """A backend that records queries and keys of the passes through it."""

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
    """Root mean square error of scores as a share of their standard deviation, mean over layers and prompts."""
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
    llm.reset_prefix_cache()
    return {name: statistics.fmean(values) for name, values in errors.items()}


def _score_error(query: Tensor, exact: Tensor, found: Tensor) -> float:
    """The error of the last 32 rows against all keys.

    Args:
        query: (heads, rows, head_dim).
        exact, found: (kv_heads, rows, head_dim).
    """
    groups = query.shape[0] // exact.shape[0]
    last = query[:, -32:].reshape(exact.shape[0], -1, query.shape[-1])
    assert last.shape[1] == 32 * groups
    scores, others = last @ exact.mT, last @ found.mT
    return float((others - scores).pow(2).mean().sqrt() / scores.std())


@dataclass(frozen=True)
class Way:
    """A way to read modules.

    Attributes:
        store: The store's codec; "" for the pool.
        change: Changes the pool before it is read.
    """

    name: str
    store: str = ""
    change: Callable[[LLM], None] | None = None


def unturned(codec: str) -> Callable[[LLM], None]:
    """A function that rounds all stored keys as before their rotation."""

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
    """Yield for each answer whether it is right, and its divergence from full prefill.

    Args:
        said: Full prefill's answers and distributions.
    """
    for each, (tokens, expected) in zip(rounds, said, strict=True):
        llm.add_schema(each.schema(), replace=True)
        while llm.stats().unwritten_segments:
            llm.client.pump()
            time.sleep(0.001)
        if way.store:
            llm.reset_prefix_cache()
        if way.change is not None:
            way.change(llm)
        prompts = [each.prompt(case) for case in each.cases]
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        if way.store not in ("", "none"):
            assert all(output.usage.exact_tokens == 0 for output in outputs), "all modules are read as lossy forms"
        found = llm.distributions(prompts, tokens)
        for case, output, reference, other in zip(each.cases, outputs, expected, found, strict=True):
            yield output.outputs[0].text.strip() == case.answer, divergence(reference, other)
        llm.reset_prefix_cache()


def references(llm: LLM, rounds: list[Round]) -> list[Any]:
    """Full prefill's answers and distributions."""
    said = []
    for each in rounds:
        llm.add_schema(each.schema(), encode=False, replace=True)
        prompts = [each.prompt(case) for case in each.cases]
        outputs = llm.generate(prompts, GREEDY, reuse="off", positions="packed")
        tokens = [output.outputs[0].token_ids for output in outputs]
        said.append((tokens, llm.distributions(prompts, tokens, reuse="off", positions="packed")))
        llm.reset_prefix_cache()
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
