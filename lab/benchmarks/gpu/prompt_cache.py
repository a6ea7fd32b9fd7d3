"""Prompt Cache's Figures 3 to 5 (arXiv 2311.04934) on a GPU: time to first token behind cached modules.

    python lab/benchmarks/gpu/prompt_cache.py --model random:llama-2-7b random:llama-2-13b

Columns: ``device`` has modules in device memory. ``host`` has modules in pinned host memory and copies them first,
layer
by layer. ``full`` is the stock model's prefill of the same tokens.

Floors: ``new_floor`` is the new tokens' operations over the measured rate of products. ``host_floor`` is the modules'
bytes over the measured copy rate from host memory; ``of_bus`` is the share of that rate that the copies reach.

``--max-position`` allows lengths beyond the model's own positions; such rows are marked ``beyond``. They are computed
like others, but the weights mean nothing there. ``--kv-cache-dtype int8`` or ``fp8`` stores KV in 8 bits.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from common import Ceilings, Clock, device_of, options, report

MODULES = 8


def load(name: str, asked: Any, device: Any) -> Any:
    """An LLM with the requested context length, and the model's own."""
    from inlay import LLM
    from inlay.models.load import load_model

    dtype = "float32" if asked.dry else "bfloat16"
    loaded = load_model(name, dtype=dtype, weights="stock", device=str(device))
    own = loaded.spec.max_positions
    if asked.max_position > own:
        loaded = replace(loaded, spec=replace(loaded.spec, max_positions=asked.max_position))
    memory = {"kv_memory": "16MiB"} if asked.dry else {}
    kept = asked.kv_cache_dtype
    return LLM(loaded, attention_backend="triton", reuse="isolated", seed=0, kv_cache_dtype=kept, **memory), own


def workload(llm: Any, cached: int, new: int) -> tuple[Any, Any]:
    """A schema of eight modules with ``cached`` tokens of one byte, and a prompt with new text behind them."""
    from inlay import Schema

    draw = random.Random(cached * 1000 + new)
    cached -= len(llm.encoder.bos)
    sizes = [cached // MODULES] * (MODULES - 1) + [cached - cached // MODULES * (MODULES - 1)]

    def text(size: int) -> str:
        return "".join(draw.choice("abcdefghijklmnop") for _ in range(size))

    written = "".join(f'<module name="m{n}">{text(size)}</module>' for n, size in enumerate(sizes))
    schema = Schema.from_string(f'<schema name="s{cached}x{new}">{written}</schema>')
    prompt = schema.prompt()
    for number in range(MODULES):
        prompt = prompt.use(f"m{number}")
    return schema, prompt.text(text(new))


def measure(llm: Any, own: int, cached: int, new: int, clock: Clock, ceilings: Ceilings) -> dict[str, Any]:
    """One row: milliseconds of each column, floors and ratios."""
    import torch

    from inlay import SamplingParams
    from inlay.slots import SlotRange
    from inlay_lab.bench.machine import new_sender
    from inlay_lab.bench.stock import prefill

    once = SamplingParams(max_tokens=1, temperature=0)
    schema, prompt = workload(llm, cached, new)
    llm.reset_prefix_cache()
    llm.add_schema(schema)
    first = llm.generate(prompt, once)[0]
    model, storage = llm.loaded.model, llm.storage
    weights = sum(each.numel() for each in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    runs = [SlotRange(0, first.usage.cached_tokens)]
    layers = range(len(storage.layers))
    slabs = [storage.read_slab(layer, runs) for layer in layers]

    def copy_up() -> None:
        for layer in layers:
            storage.write_slab(layer, runs, slabs[layer])

    ids = torch.tensor([first.prompt_token_ids], device=model.device)
    ours = clock.seconds(lambda: llm.generate(prompt, once, cache_salt=new_sender()))
    copies = clock.seconds(copy_up)
    full = clock.seconds(lambda: prefill(model, ids))
    size = sum(slab.nbytes for slab in slabs)
    host_floor = size / (ceilings.from_host_gb_s * 1e9)
    return {
        "model": llm.model_name,
        "dtype": dtype,
        "kv_dtype": llm.client.model.keys.kv_dtype,
        "cached": first.usage.cached_tokens,
        "new": first.usage.computed_tokens,
        "beyond": len(first.prompt_token_ids) > own,
        "ms": {"device": ours * 1e3, "host": (copies + ours) * 1e3, "full": full * 1e3},
        "times_as_fast": {"device": full / ours, "host": full / (copies + ours)},
        "module_bytes": size,
        "host_floor_ms": host_floor * 1e3,
        "of_bus": host_floor / copies,
        "new_floor_ms": ceilings.floor(
            weights * model.dtype.itemsize, 2 * weights * first.usage.computed_tokens, dtype
        ) * 1e3,
    }  # fmt: skip


def main() -> None:
    asked = options(
        __doc__ or "",
        model=["random:llama-2-7b", "random:llama-2-13b"],
        cached=[1024, 2048, 3072, 5120, 8192, 16384],
        new=[32, 128],
        max_position=32768,
        kv_cache_dtype="auto",
    )
    device = device_of(asked)
    if asked.dry:
        asked.model, asked.cached, asked.new = ["random:tiny"], [64], [4]
    clock = Clock(device, asked.runs)
    dtypes = ["float32" if asked.dry else "bfloat16"]
    ceilings, rows = Ceilings.measure(clock, device, dtypes, dry=asked.dry), []
    for name in asked.model:
        llm, own = load(name, asked, device)
        for cached in asked.cached:
            for new in asked.new:
                rows.append(measure(llm, own, cached, new, clock, ceilings))
                print(name, cached, new, {key: round(each, 1) for key, each in rows[-1]["ms"].items()}, flush=True)
        llm.shutdown()
        del llm
    report("prompt_cache", asked, device, ceilings, rows)


if __name__ == "__main__":
    main()
