"""``inlay run``: answers one prompt of a schema."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.loading import told_loading
from inlay.cli.options import (
    AcrossAdapters,
    Adapter,
    ChatTemplate,
    Compile,
    Device,
    DType,
    Eviction,
    HostMemory,
    KVCacheDType,
    MaxModelLen,
    Model,
    Promote,
    Quantization,
    Recompute,
    Reuse,
    ReuseTolerance,
    StateMemory,
    Store,
    StoreBytes,
    StoreCodec,
    StoreShared,
    Threads,
    Weights,
    adapters_of,
    policy_of,
    prompt_file,
    read_template,
    schema_file,
    store_of,
    told_device,
    told_store,
)
from inlay.errors import ParameterError
from inlay.kv.policies import DEFAULT_EVICTION
from inlay.pml import Prompt, resolve
from inlay.tolerance import DEFAULT
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.client.llm import LLM
    from inlay.policy import ReusePolicy
    from inlay.sampling.params import SamplingParams
    from inlay.types import RequestOutput

Row = dict[str, Any]


def run(
    schema: Annotated[Path, typer.Argument(help="The schema file (PML or JSON).")],
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt file (PML or JSON), or - for standard input.")],
    model: Model = "demo",
    threads: Threads = None,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    chat_template: ChatTemplate = None,
    max_model_len: MaxModelLen = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    state_memory: StateMemory = None,
    host_memory: HostMemory = None,
    weights: Weights = None,
    adapter: Adapter = None,
    reuse: Reuse = None,
    recompute: Recompute = None,
    promote: Promote = None,
    across_adapters: AcrossAdapters = None,
    tolerance: ReuseTolerance = str(DEFAULT),
    positions: Annotated[
        str | None, typer.Option(help="schema or packed; packed where the model allows it, if not given.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most probable token; the model's own or else 0, if not given."),
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: sample as the model's generation_config.json says; off.")
    ] = "auto",
    profile: Annotated[
        str, typer.Option(help="auto: find out how much modules' tokens move, for recompute profiled; off.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the draws, and of random weights.")] = 0,
    store: Store = None,
    store_bytes: StoreBytes = "16GiB",
    eviction: Eviction = DEFAULT_EVICTION,
    store_codec: StoreCodec = "none",
    store_shared: StoreShared = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without reuse as well, and show both.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")] = False,
) -> None:
    """Answer a prompt from cached modules: the answer as it comes, then what was reused and how long it took.

    With adapters, each of them answers, one after the other.
    """
    if max_tokens < 1:
        raise ParameterError(f"max_tokens is {max_tokens}; it must be at least 1: write --max-tokens 1, or more")
    parsed_schema, parsed_prompt = schema_file(schema), prompt_file(prompt)
    policy = policy_of(reuse, recompute, promote, across_adapters, tolerance)
    template, adapters = read_template(chat_template), adapters_of(adapter, (model,))
    resolve(parsed_schema, parsed_prompt, moves=True)  # errors are reported before a model is loaded
    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay.sampling.params import SamplingParams

    given: Row = {"max_tokens": max_tokens, "seed": seed}
    if temperature is not None:
        given["temperature"] = temperature
    SamplingParams(**given)  # likewise
    folder = store_of(store, model)
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            compile=compile,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            state_memory=state_memory,
            host_memory=host_memory,
            weights=weights,
            adapters=adapters,
            reuse=policy,
            tolerance=tolerance,
            positions=positions,
            seed=seed,
            generation_config=generation_config,
            profile=profile,
            chat_template=template,
            max_model_len=max_model_len,
            store=folder,
            store_bytes=store_bytes,
            eviction=eviction,
            store_codec=store_codec,
            store_shared=store_shared,
        )
    params = SamplingParams(**{"temperature": 0.0, **llm.sampling_defaults, **given})
    if llm.loaded.note:
        print(f"inlay: {llm.loaded.note}", file=sys.stderr)
    for line in (told_device(str(llm.loaded.model.device)), told_store(llm.stats(), folder)):
        if line:
            print(f"inlay: {line}", file=sys.stderr)
    for info in llm.adapters.values():
        print(f"inlay: {info}", file=sys.stderr)
    llm.add_schema(parsed_schema, encode=False)

    echo: Callable[[str], None] | None = None if as_json else _write
    names: list[str | None] = [*adapters] or [None]
    rows = [_row(llm, parsed_prompt, params, name, echo, compare=compare) for name in names]
    if as_json:
        print(json.dumps(rows[0] | ({"adapters": rows[1:]} if len(rows) > 1 else {}), ensure_ascii=False))
    else:
        print("\n")
        _table(rows)
    llm.shutdown()  # waits for outstanding writes


def _row(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    adapter: str | None,
    echo: Callable[[str], None] | None,
    *,
    compare: bool,
) -> Row:
    """Return the answer of an adapter, or of the model alone, with its cost."""
    before = llm.stats()
    encode_ms = _warm(llm, prompt, adapter)
    if echo and adapter is not None:
        echo(f"\n— {adapter} —\n")
    row = _answer(llm, prompt, params, llm.policy_for(prompt, adapter=adapter), adapter, echo)
    stats = llm.stats()
    tiers, left = {}, row["cached_tokens"]
    for name in ("host", "disk", "shared"):
        read = getattr(stats, f"{name}_tokens") - getattr(before, f"{name}_tokens")
        tiers[name] = min(read, left)
        left -= tiers[name]
    there = {"disk": True, "host": stats.host is not None, "shared": stats.shared is not None}
    row |= {
        "encode_ms": encode_ms,
        "encoded_tokens": stats.encoded_tokens - before.encoded_tokens,
        "tiers": {"device": left} | {name: tokens for name, tokens in tiers.items() if there[name]},
    }
    if compare:
        if echo:
            echo("\n\n— without reuse —\n")
        row["baseline"] = _answer(llm, prompt, params, llm.policy("off", "packed"), adapter, echo)
    if echo and adapter is not None:
        echo("\n")
    return row


def _warm(llm: LLM, prompt: Prompt, adapter: str | None) -> float:
    """Encode the prompt's imports with progress; returns the time in milliseconds."""
    from inlay.cli.output import token_progress

    started = time.perf_counter()
    with token_progress("encoding modules") as progress:
        llm.warm(prompt, progress=progress, adapter=adapter)
    return round((time.perf_counter() - started) * 1000, 2)


def _answer(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    policy: ReusePolicy,
    adapter: str | None,
    echo: Callable[[str], None] | None,
) -> Row:
    said = ""
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params, reuse=policy, positions=policy.positions, adapter=adapter):
        text = output.outputs[0].text
        if echo is not None:
            echo(text[len(said) :])
        said = text
    if output is None or output.metrics.ttft_s is None:
        raise ParameterError("the model gave no token")
    answer = output.outputs[0]
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "computed_tokens": output.usage.computed_tokens,
        "exact_tokens": output.usage.exact_tokens,
        "module_tokens": output.usage.module_tokens,
        "scaffold_tokens": output.usage.scaffold_tokens,
        "anchored_tokens": output.usage.anchored_tokens,
        "isolated_tokens": output.usage.isolated_tokens,
        **({"reanchored_tokens": reanchored} if (reanchored := output.usage.reanchored_tokens) else {}),
        **({"primed_tokens": primed} if (primed := output.usage.primed_tokens) else {}),
        "promoted_tokens": output.usage.promoted_tokens,
        "shifted_tokens": output.usage.shifted_tokens,
        "recomputed_tokens": output.usage.recomputed_tokens,
        "linked_tokens": output.usage.linked_tokens,
        "selecting_tokens": output.usage.selecting_tokens,
        "ttft_ms": round(output.metrics.ttft_s * 1000, 2),
        "model": llm.model_name,
        **({} if adapter is None else {"adapter": adapter, "across_tokens": output.usage.across_tokens}),
        "reuse": str(policy),
        "positions": policy.positions,
        **({"order": [each.told for each in output.order]} if output.order else {}),
    }


def _unprofiled(answer: Row) -> str:
    """Note the first tokens that were recomputed for lack of profiles."""
    linked = answer["linked_tokens"] if "profiled" in answer["reuse"] else 0
    return f", of which {linked:,} are the first ones of modules that have no profile yet" if linked else ""


def _why(order: Row) -> str:
    return f"; it was not free: {order['why_fixed']}" if "why_fixed" in order else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _table(answers: Sequence[Row]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    table = Table(box=None, pad_edge=False)
    rows = [row for answer in answers for row in (answer, answer.get("baseline")) if row is not None]
    table.add_column("reuse, positions", no_wrap=True)
    for name in ("tokens cached", "tokens computed", "time to first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in rows:
        cells = (each["cached_tokens"], each["computed_tokens"])
        table.add_row(
            f"{each['adapter'] + ': ' if 'adapter' in each else ''}{each['reuse']}, {each['positions']}",
            *(f"{cell:,}" for cell in cells),
            f"{each['ttft_ms']:,.1f} ms",
        )
    stdout_console().print(table, markup=False)
    for each in answers:
        if each["recomputed_tokens"]:
            print(f"(recomputed: {each['recomputed_tokens']:,} tokens of modules{_unprofiled(each)})")
    for each in answers[0].get("order", ()):
        print(f"(order: {', '.join(each['members'])}{_why(each)})")
    encode_ms = sum(row["encode_ms"] for row in answers)
    if encode_ms >= 0.05 and any(row["encoded_tokens"] or any(row["tiers"].values()) for row in answers):
        encoded = any(row["encoded_tokens"] or not row["tiers"]["disk"] for row in answers)
        how = "encoded once" if encoded else "read from the store"
        print(f"(its modules were {how}, before the request, in {encode_ms:,.1f} ms)")
