"""``inlay bench eviction``: hit ratios of eviction policies in a full pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, Quick, words
from inlay.cli.output import token_progress
from inlay.errors import ParameterError
from inlay.kv.policies import POLICIES, PassCost
from inlay_lab.cli.bench_tables import make_table, show
from inlay_lab.options import floats

if TYPE_CHECKING:
    from rich.table import Table


def eviction(
    trace: Annotated[str, typer.Option(help="Of zipf, scan, shifting, conversations.")] = (
        "zipf,scan,shifting,conversations"
    ),
    policy: Annotated[str, typer.Option(help=f"Of {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    capacity: Annotated[str, typer.Option(help="Of the pool, in percent of the trace's distinct tokens.")] = "1,5,20",
    accesses: Annotated[int, typer.Option(help="Prompts of each trace.")] = 100_000,
    token_ms: Annotated[float, typer.Option(help="Milliseconds that prefill takes for a token.")] = 2.5,
    pair_ns: Annotated[float, typer.Option(help="Nanoseconds for each token that it attends to, beside that.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 0,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Eviction policies on traces of prompts: the share of tokens found in the pool, and the prefill that saves."""
    from inlay_lab.bench.eviction import EvictionSetting, measure_eviction

    if min(token_ms, pair_ns) < 0:
        raise ParameterError("--token-ms and --pair-ns are times; they must be 0 or more")
    setting = EvictionSetting(
        accesses=min(accesses, 2000) if quick else accesses,
        capacities=floats("--capacity", capacity, "1,5,20"),
        policies=words(policy),
        traces=words(trace),
        cost=PassCost(token_ms / 1e3, pair_ns / 1e9),
        seed=seed,
    )
    with token_progress("evicting") as progress:
        result = measure_eviction(setting, progress) | {"quick": quick}
    title = f"{setting.accesses:,} prompts: tokens found, and seconds of prefill that they saved"
    show(result, [(title, _table(result, setting.policies))], as_json)


def _table(result: dict[str, Any], policies: tuple[str, ...]) -> Table:
    table = make_table(("trace", "capacity", *policies))
    for row in result["rows"]:
        cells = (row["policies"][name] for name in policies)
        found = (f"{cell['hit_ratio']:.1%} {cell['saved_s']:,.0f} s" for cell in cells)
        table.add_row(row["trace"], f"{row['capacity']:g}%", *found)
    return table
