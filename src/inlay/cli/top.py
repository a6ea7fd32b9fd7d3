"""``inlay top``: a live view of a running server."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inlay.cli.cache_url import RunningCache
from inlay.cli.output import stdout_console
from inlay.cli.top_sample import Rates, ServerSample, tier_uses
from inlay.errors import ParameterError
from inlay.wording import clip

_ANSWER_S = 10.0  # for one answer of the server
_LEAST_S, _MOST_S = 0.2, 3600.0
_SHOWN = 12  # running requests


def top(
    url: Annotated[str, typer.Option(help="The address of a server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="INLAY_API_KEY", help="The key of an admin, for a server with keys.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at the server.")] = 2.0,
    frames: Annotated[int | None, typer.Option(help="End after this many looks; without it, at Ctrl-C.")] = None,
) -> None:
    """Watch a server: requests, tokens per second, the cache by tier, hits, and misses by reason.

    Without a terminal it prints one line for each look.
    """
    if not (math.isfinite(interval) and _LEAST_S <= interval <= _MOST_S):
        raise ParameterError(f"--interval is {interval:g}; give a number of seconds from {_LEAST_S:g} to {_MOST_S:g}")
    if frames is not None and frames < 1:
        raise ParameterError(f"--frames is {frames}; give a number of at least 1, or leave it out")
    server = RunningCache(url, api_key, wait_s=_ANSWER_S)
    looks = _looks(server, interval, frames)
    console = stdout_console()
    try:
        if not console.is_terminal:
            for found in looks:
                if isinstance(found, Rates):
                    print(line(found), flush=True)
                else:
                    print(f"inlay: {found}", file=sys.stderr, flush=True)
            return
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            last: RenderableType = ""
            for found in looks:
                if isinstance(found, Rates):
                    last = view(found, server.url)
                    live.update(last, refresh=True)
                else:
                    live.update(Group(Text(str(found), style="bold red"), last), refresh=True)
    except KeyboardInterrupt:
        return


def _looks(server: RunningCache, interval: float, frames: int | None) -> Iterator[Rates | ParameterError]:
    """Yield the state of the server at every interval. An error of the first look is raised, later ones are yielded."""
    before: ServerSample | None = None
    for number in count(1):
        began = time.monotonic()
        try:
            now = ServerSample.of(server)
        except ParameterError as error:
            if number == 1:
                raise
            yield error
        else:
            yield Rates(before, now)
            before = now
        if number == frames:
            return
        time.sleep(max(0.0, began + interval - time.monotonic()))


def line(rates: Rates) -> str:
    """Return one look as a line of ``name=value``. Rates need an earlier look, and are "-" without it."""
    now, pool = rates.now, rates.now.cache["pool"]
    fields = {
        "running": f"{now.value('num_requests_running'):.0f}",
        "waiting": f"{now.value('num_requests_waiting'):.0f}",
        "requests/s": _number(rates.per_second("requests_total"), 2),
        "prompt_tokens/s": _number(rates.per_second("prompt_tokens_total")),
        "cached": _percent(rates.cached_share()),
        "generated_tokens/s": _number(rates.per_second("generation_tokens_total")),
        "first_token": _seconds(rates.mean("time_to_first_token_seconds")),
        "pool": _percent(pool["used_chunks"] / pool["chunks"] if pool["chunks"] else None),
        "missed": ",".join(f"{reason.replace(' ', '_')}:{new}" for reason, new, _ in rates.misses() if new) or "0",
    }
    stamp = datetime.now().astimezone().isoformat(timespec="seconds")
    return f"{stamp} {' '.join(f'{name}={value}' for name, value in fields.items())}"


def view(rates: Rates, url: str) -> RenderableType:
    """Return one look as a screen."""
    now = rates.now
    head = Text.assemble((f" {clip(now.cache['model'])} ", "bold reverse"), "  ", (url, "dim"))
    figures = {
        "running": f"{now.value('num_requests_running'):.0f}",
        "waiting": f"{now.value('num_requests_waiting'):.0f}",
        "requests/s": _number(rates.per_second("requests_total"), 2),
        "prompt tokens/s": _number(rates.per_second("prompt_tokens_total")),
        "from the cache": _percent(rates.cached_share()),
        "generated tokens/s": _number(rates.per_second("generation_tokens_total")),
        "first token": _seconds(rates.mean("time_to_first_token_seconds")),
        "preemptions": f"{now.value('num_preemptions_total'):.0f}",
    }
    told = [Text.assemble((value, "bold"), "\n", (name, "dim")) for name, value in figures.items()]
    speed = Columns(told, padding=(0, 3))
    parts: list[RenderableType] = [head, "", speed, "", _tiers(now)]
    if rates.misses():
        parts += ["", _misses(rates)]
    parts += ["", _requests(now.requests)]
    return Group(*parts)


def _tiers(sample: ServerSample) -> Table:
    table = _table("Tier", "Segments", "Tokens", "MiB", "Full", "", "Hits", "Misses")
    for tier in tier_uses(sample):
        table.add_row(
            tier.name,
            f"{tier.segments:,}",
            f"{tier.tokens:,}",
            f"{tier.bytes / 2**20:,.1f}",
            _percent(tier.full),
            _bar(tier.full),
            f"{tier.hits:,} {'tokens' if tier.name == 'pool' else 'segments'}",
            "-" if tier.misses is None else f"{tier.misses:,}",
        )
    return table


def _misses(rates: Rates) -> Table:
    table = _table("Missed module tokens", "Now", "Total")
    for reason, new, total in rates.misses():
        table.add_row(reason, f"{new:,}" if new else "", f"{total:,}")
    return table


def _requests(rows: list[dict[str, Any]]) -> Table:
    table = _table("Request", "State", "Tenant", "Prompt", "Cached", "Computed", "Generated", "Seconds")
    for row in rows[:_SHOWN]:
        laid_out = row["prompt_tokens"] is not None
        cached = row["exact_tokens"] + row["module_tokens"] if laid_out else None
        numbers = (row["prompt_tokens"], cached, row["computed_tokens"], row["generated_tokens"])
        table.add_row(
            Text(clip(row["endpoint"].removeprefix("/v1/"))),  # a plain string would be markup
            row["state"],
            Text(clip(row["tenant"])),
            *("-" if number is None else f"{number:,}" for number in numbers),
            f"{row['seconds']:.1f}",
        )
    if not rows:
        table.add_row("none is running", *[""] * 7, style="dim")
    elif len(rows) > _SHOWN:
        table.add_row(f"and {len(rows) - _SHOWN} more", *[""] * 7, style="dim")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name in ("", "State", "Tenant") else "right")
    return table


def _bar(full: float | None, wide: int = 20) -> Text:
    """Return a bar of the fill of a tier, 0 to 1."""
    if full is None:
        return Text("")
    cells = min(wide, math.ceil(full * wide))
    return Text.assemble(("█" * cells, "cyan"), ("░" * (wide - cells), "dim"))


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f}ms" if value < 1 else f"{value:.2f}s"
