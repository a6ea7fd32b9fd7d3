"""Checks on the device of effects that Triton's interpreter cannot show: races, alignment, shared memory, graphs.

    python lab/benchmarks/gpu/checks.py

Each check prints a line and a result. The script ends with status 1 if one fails. docs/internals/gpu-kernels.md
lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from common import device_of, options, report
from layerwise import check_layers

#: Largest norm of the difference to the reference, as a share of the reference's norm, by dtype.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def layers(dry: bool) -> Iterator[tuple[str, int, int, int, Any]]:
    """dtype, query heads, KV heads, head size and options: all compiled variants."""
    import torch

    from inlay.attention.backend import AttentionOptions
    from inlay.attention.rope import Rotary

    widths = (64,) if dry else (64, 80, 96, 128, 256)
    dtypes = ("float32",) if dry else tuple(TOLERANCES)
    for dtype, width, (heads, kv_heads) in product(dtypes, widths, [(4, 2)] if dry else [(8, 8), (8, 2), (24, 1)]):
        turn = Rotary(1000.0 ** (-torch.arange(0, width, 2).float() / width), interleaved=width == 80)
        plain = AttentionOptions(scale=width**-0.5, rotary=turn)
        yield dtype, heads, kv_heads, width, plain
        yield dtype, heads, kv_heads, width, replace(plain, window=50, softcap=20.0, sinks=torch.zeros(heads))
        yield dtype, heads, kv_heads, width, replace(plain, slopes=torch.linspace(0.01, 0.3, heads))


def passes(dry: bool) -> Iterator[tuple[str, list[Any]]]:
    """Decode behind shared keys at different shifts, ragged prefill, and modules packed for encoding."""
    from inlay.attention.plan import Item, Part
    from inlay.slots import SlotRange

    keys, rows = (70, 3) if dry else (1500, 40)
    shared = [
        Part.of(
            keys + n * 9, 1, (Item(SlotRange(0, keys), 0, n * 9 % 27), Item(SlotRange(keys, 33), 40, 11)),
            (SlotRange(keys + 40 + n, 1),),
        )
        for n in range(rows)
    ]  # fmt: skip
    yield "decode", shared
    at = keys + 40
    yield (
        "prefill",
        [
            Part.of(keys, keys // 3, (Item(SlotRange(0, keys), 0),), (SlotRange(at, keys // 3),)),
            Part.of(5, 7, (Item(SlotRange(0, 5), 0),), (SlotRange(at + keys // 3 + 1, 7),)),
        ],
    )
    sizes = (3, 40) if dry else (1, 17, 64, 130, 700, 3)
    yield "encode", [Part.of(0, size, (), (SlotRange(at + 800 * n, size),)) for n, size in enumerate(sizes)]


def check_passes(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Every layer over every pass: near the reference, and bitwise equal each time (a race would change bits)."""
    import torch

    from inlay.attention.plan import build_plan
    from inlay.attention.reference import ReferenceBackend
    from inlay.attention.storage import KVStorage, LayerShape
    from inlay.attention.triton.backend import TritonBackend
    from inlay.attention.triton.tables import CostModel

    eager = CostModel(partial_byte_s=0.0, multiply_s=0.0, launch_s=0.0, work_s=0.0)
    backend = TritonBackend(device, costs=eager)
    for (dtype, heads, kv_heads, width, attention), (name, parts) in product(layers(asked.dry), passes(asked.dry)):
        kind = getattr(torch, dtype)
        slots = max(run.end for part in parts for run in part.ranges) + 1
        shape = LayerShape(kv_heads, width)
        host, pool = KVStorage([shape], kind, slots), backend.make_pool([shape], kind, slots)
        for here, there in ((host.keys[0], pool.keys[0]), (host.values[0], pool.values[0])):
            here.copy_(torch.randn(here.shape))
            there.copy_(here)
        rows = sum(part.rows for part in parts)
        fresh = [torch.randn(each, rows, width).to(kind) for each in (heads, kv_heads, kv_heads)]
        expected = ReferenceBackend().attend(*fresh, host, build_plan(parts), 0, attention).float()
        found = []
        for _ in range(2 if asked.dry else 20):
            query, key, value = (odd(each, device) for each in fresh)
            found.append(backend.attend(query, key, value, pool, build_plan(parts), 0, attention).cpu())
        apart = float((found[0].float() - expected).norm() / expected.norm())
        steady = all(torch.equal(each, found[0]) for each in found)
        yield {
            "check": name, "dtype": dtype, "heads": heads, "kv_heads": kv_heads, "head_dim": width,
            "window": attention.window, "slopes": attention.slopes is not None, "difference": apart,
            "passed": steady and apart <= TOLERANCES[dtype], "same_bits": steady,
        }  # fmt: skip


def odd(tensor: Any, device: Any) -> Any:
    """A copy on the device at an address that is not aligned for vector loads, with rows further apart."""
    import torch

    heads, rows, width = tensor.shape
    memory = torch.empty(heads * rows * (width + 3) + 1, dtype=tensor.dtype, device=device)[1:]
    there = memory.view(heads, rows, width + 3)[:, :, :width]
    there.copy_(tensor)
    return there


def check_answers(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """A whole model in fp32: answers equal the CPU's, alone and in a batch, launched and replayed from graphs.

    It also compares seeded answers with stop strings, and answers of the compiled model.
    """
    from inlay import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=3 if asked.dry else 40, ignore_eos=True)
    prompts = ["One two three", "One two three four five", "Six"]
    settings = {"dtype": "float32", "seed": 0, "kv_memory": "64MiB"}
    expected = LLM("random:tiny", device="cpu", **settings).generate(prompts, params)
    llm = LLM("random:tiny", device=str(device), attention_backend="triton", **settings)
    for name, batches in (("alone", [[each] for each in prompts]), ("together", [prompts])):
        answers = [answer for batch in batches for answer in llm.generate(batch, params)]
        same = [one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(answers, expected)]  # noqa: B905
        yield {"check": f"answers {name}", "passed": all(same)}
    seeded = [SamplingParams(seed=n, max_tokens=params.max_tokens, top_p=0.9, n=3, stop=["e"]) for n in range(3)]
    wanted = LLM("random:tiny", device="cpu", **settings).generate(prompts, seeded)
    yield {"check": "answers seeded", "passed": _texts(llm.generate(prompts, seeded)) == _texts(wanted)}
    graphs = llm.local.engine.runner.graphs
    yield {"check": "recorded steps", "passed": asked.dry or (graphs is not None and graphs.played > 0)}
    for _ in range(3):  # the same shapes of new text
        llm.generate([prompt + " and so on" for prompt in prompts], params)
        llm.reset_prefix_cache()
    yield {"check": "recorded prefills", "passed": asked.dry or (graphs is not None and graphs.played_prefills > 0)}
    if not asked.dry:
        compiled = LLM("random:tiny", device=str(device), attention_backend="triton", compile=True, **settings)
        yield {"check": "answers compiled", "passed": _texts(compiled.generate(prompts, params)) == _texts(expected)}


def check_rounded_answers(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """A whole model with 8-bit KV: int8 as on the CPU, and fp8 at most 30 times as far from fp32 as int8."""
    from inlay import LLM

    prompts, said = ["One two three four five", "Six"], [[5, 77, 12], [9, 3, 200]]
    settings = {"dtype": "float32", "seed": 0, "kv_memory": "64MiB", "store": "off"}

    def distributions(**more: Any) -> Any:
        llm = LLM("random:tiny", **settings, **more)
        found = llm.distributions(prompts, said)
        llm.shutdown()
        return found

    def apart(one: Any, other: Any) -> float:
        return float(sum((a - b).abs().mean() for a, b in zip(one, other, strict=True)))

    exact, expected = (distributions(device="cpu", kv_cache_dtype=kept) for kept in ("auto", "int8"))
    rounding = apart(exact, expected)
    for kept in ("int8", "fp8") if _has_fp8(device) else ("int8",):
        found = distributions(device=str(device), attention_backend="triton", kv_cache_dtype=kept)
        if kept == "int8":
            off = apart(found, expected) / rounding
            yield {"check": "answers in int8", "of_rounding": off, "passed": off < 0.2}
        else:
            off = apart(found, exact) / rounding
            yield {"check": "answers in fp8", "of_rounding": off, "passed": 1 < off < 30}


def check_host(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Modules of twice the pool's size move to host memory and back. None may be computed twice.

    Answers must equal those of a pool with room for all modules. In int8, scales move with their rows.
    """
    from inlay import LLM, Prompt, SamplingParams, Schema

    count, tokens = (4, 48) if asked.dry else (32, 400)
    schemas = [
        Schema.from_string(
            f'<schema name="s{n}"><module name="m">{str(n) * 2} {"word " * (tokens // 5)}</module></schema>'
        )
        for n in range(count)
    ]
    prompts = [Prompt.from_string(f'<prompt schema="s{n}"><m/>And?</prompt>') for n in range(count)] * 2
    params = SamplingParams(temperature=0, max_tokens=1 if asked.dry else 30, ignore_eos=True)
    for kept, kept_bytes in (("auto", 4096),) if asked.dry else (("auto", 4096), ("int8", 4096 * 36 // 128)):
        found = []
        for memory in (4 * count * tokens * kept_bytes, count * tokens * kept_bytes // 2):
            llm = LLM(
                "random:tiny", device=str(device), attention_backend="triton", dtype="float32", seed=0, store="off",
                kv_memory=memory, kv_cache_dtype=kept, chunk_size=16, host_memory="256MiB", profile="off",
                promotion_memory=0,
            )  # fmt: skip
            for schema in schemas:
                llm.add_schema(schema)
            encoded = llm.stats().encoded_tokens
            answers = [_texts(llm.generate([prompt], params)) for prompt in prompts]
            stats = llm.stats()
            found.append((answers, stats.encoded_tokens == encoded, stats.host_tokens, dict(stats.host.misses)))
            llm.shutdown()
        (expected, _, none, _), (answers, once, read, misses) = found
        yield {
            "check": "memory of the host", "kept": kept, "host_tokens": read, "misses": misses,
            "passed": answers == expected and once and none == 0 < read and not misses,
        }  # fmt: skip


def _has_fp8(device: Any) -> bool:
    import torch

    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def _texts(outputs: Any) -> list[Any]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def check_quantized(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """8-bit KV: stored bitwise as the specification stores it, and results near the reference over it."""
    import torch

    from inlay.attention.backend import AttentionOptions
    from inlay.attention.plan import build_plan
    from inlay.attention.reference import ReferenceBackend
    from inlay.attention.rope import Rotary
    from inlay.attention.storage import LARGEST, DeviceStorage, KVStorage, LayerShape, dequantize, quantize
    from inlay.attention.triton.backend import TritonBackend
    from inlay.slots import SlotRange

    width = 64
    turn = AttentionOptions(width**-0.5, rotary=Rotary(1000.0 ** (-torch.arange(0, width, 2).float() / width)))
    for narrow, (name, parts) in product(LARGEST, list(passes(asked.dry))[: 1 if asked.dry else None]):
        if narrow != torch.int8 and not _has_fp8(device):
            continue
        slots = max(run.end for part in parts for run in part.ranges) + 1
        pool = DeviceStorage([LayerShape(2, width)], narrow, slots, device)
        pool.write(0, SlotRange(0, slots), *(torch.randn(2, slots, width) for _ in range(2)))
        host = KVStorage(pool.layers, torch.float32, slots)
        for there, here, scales in zip((host.keys, host.values), (pool.keys, pool.values), pool.scales[0], strict=True):
            there[0].copy_(dequantize(here[0].cpu(), scales.cpu()))
        kind = torch.float32 if asked.dry else torch.bfloat16
        fresh = [torch.randn(heads, sum(part.rows for part in parts), width).to(kind) for heads in (8, 2, 2)]
        stored = [dequantize(*quantize(each, narrow)) for each in fresh[1:]]
        expected = ReferenceBackend().attend(fresh[0].float(), *stored, host, build_plan(parts), 0, turn)
        plan = build_plan(parts)
        found = TritonBackend(device).attend(*(each.to(device) for each in fresh), pool, plan, 0, turn).float().cpu()
        apart = float((found - expected).norm() / expected.norm())
        numbers = quantize(fresh[1], narrow)[0].float()
        same = torch.equal(pool.keys[0].float().cpu()[:, plan.slots], numbers)
        yield {
            "check": f"{name} in 8 bits", "dtype": str(narrow), "difference": apart, "same_bits": same,
            "passed": same and apart <= TOLERANCES["float32" if asked.dry else "bfloat16"],
        }  # fmt: skip


def check_plain(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Plain passes through the installed libraries: near the reference."""
    import torch

    from inlay.attention.backend import AttentionOptions
    from inlay.attention.plan import Item, Part, build_plan
    from inlay.attention.reference import ReferenceBackend
    from inlay.attention.storage import KVStorage, LayerShape
    from inlay.attention.triton.backend import TritonBackend
    from inlay.attention.triton.plain import PlainPrefill, installed
    from inlay.slots import SlotRange

    found = installed(device)
    parts = [
        Part.of(300, 700, (Item(SlotRange(0, 300), 0),), (SlotRange(300, 700),)),
        Part.of(0, 130, (), (SlotRange(1000, 130),)),
    ]
    for name, call in {} if found is None else found.libraries.items():
        for dtype, width, attention in product(
            (torch.float16, torch.bfloat16),
            (64, 128, 256),
            (AttentionOptions(0.1), AttentionOptions(0.1, window=50, softcap=20.0)),
        ):
            shape, rows = LayerShape(2, width), 830
            host, pool = KVStorage([shape], dtype, 1200), TritonBackend(device).make_pool([shape], dtype, 1200)
            for here, there in ((host.keys[0], pool.keys[0]), (host.values[0], pool.values[0])):
                here.copy_(torch.randn(here.shape))
                there.copy_(here)
            fresh = [torch.randn(heads, rows, width).to(dtype) for heads in (8, 2, 2)]
            expected = ReferenceBackend().attend(*fresh, host, build_plan(parts), 0, attention).float()
            times = iter((2.0, 1.0))  # so that it is chosen
            plain = PlainPrefill({name: call}, lambda run, times=times: next(times))
            using = TritonBackend(device, plain=plain)
            query, key, value = (each.to(device) for each in fresh)
            for _ in range(2):  # once measured, once as chosen
                output = using.attend(query, key, value, pool, build_plan(parts), 0, attention).float().cpu()
            apart = float((output - expected).norm() / expected.norm())
            yield {
                "check": f"plain passes in {name}", "dtype": str(dtype), "head_dim": width, "window": attention.window,
                "difference": apart, "passed": apart <= TOLERANCES["bfloat16"] and name in plain.libraries,
            }  # fmt: skip


def check_tokens(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Tokens sampled on the device equal the CPU's for the same logits and seeds, with their log-probabilities."""
    import torch

    from inlay import SamplingParams
    from inlay.sampling.row import Row
    from inlay.sampling.sampler import sample

    vocabulary, steps = (3000, 2) if asked.dry else (151_936, 20)
    for changes in (
        {"temperature": 0}, {}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"typical_p": 0.5},
        {"typical_p": 0.8, "top_k": 200}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 9.0}},
        {"allowed_token_ids": list(range(0, vocabulary, 7)), "logprobs": 5},
    ):  # fmt: skip
        params = SamplingParams(**changes)
        rows = [Row(params, seed, prompt_ids=range(50)) for seed in range(steps)]
        for name, scale in (("normal", 3.0), ("ties", 0.0)):
            logits = (torch.randn(steps, vocabulary) * scale).bfloat16()
            expected = sample(logits, rows)
            found = sample(logits.to(device), rows)
            yield {"check": "tokens", "params": str(changes)[:60], "logits": name, "passed": found == expected}


def main() -> int:
    asked = options(__doc__ or "")
    device = device_of(asked)
    rows = []
    answers = (check_answers, check_rounded_answers, check_host, check_layers)
    for check in (check_passes, check_quantized, check_plain, check_tokens, *answers):
        for row in check(asked, device):
            rows.append(row)
            print("passed" if row["passed"] else "FAILED", {k: v for k, v in row.items() if k != "passed"}, flush=True)
    report("checks", asked, device, None, rows)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
