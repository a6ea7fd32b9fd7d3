"""``inlay top``: a live view of a running server, with the rates between two samples of it."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inlay.cli.cache_source import RunningCache
from inlay.cli.output import stdout_console
from inlay.errors import ParameterError
from inlay.wording import clip, printable

TIERS = ("pool", "host", "disk", "shared")

#: A tier below the pool → the prefix of its metrics.
_STORES = {"host": "host", "disk": "store", "shared": "shared_store"}
_PREFIX = "inlay:"
_ROWS = 100  # running requests that a sample asks for

Values = Mapping[str, Mapping[str, float]]  # metric → value of its own label, or "" → value


@dataclass(frozen=True, slots=True)
class ServerSample:
    """A server at one time.

    Args:
        at: on the clock of ``time.monotonic``.
        values: its metrics, without the prefix ``inlay:``. A metric with one label beside model and engine has a value
            for each of its values. Other labels are summed.
        cache: the answer of ``/v1/cache``.
        requests: the running requests, oldest first.
    """

    at: float
    values: Values
    cache: Mapping[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, server: RunningCache) -> ServerSample:
        """Ask a server. Raises ParameterError."""
        values = read_metrics(server.text("/metrics"))
        rows = server.get(f"/v1/requests?limit={_ROWS}").get("data")
        cache = server.stats()
        if not isinstance(rows, list) or not isinstance(cache.get("pool"), dict):
            raise ParameterError(f"{server.url} is no inlay server of this version; see --url")
        running = [row for row in rows if row["state"] != "ended"]
        return cls(time.monotonic(), values, cache, running)

    def value(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if the server has no such metric."""
        return sum(self.values.get(name, {}).values())


def read_metrics(text: str) -> Values:
    """Return the metrics of inlay in Prometheus' text format. Buckets are left out. Raises ParameterError."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX) or sample.name.endswith("_bucket"):
                    continue
                own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                found[sample.name.removeprefix(_PREFIX)][own[0] if len(own) == 1 else ""] += sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ParameterError(
            f"/metrics is not in Prometheus' text format ({error}); see that --url is an inlay server"
        ) from None
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """The changes between two samples. A server that restarted in between counts from 0.

    Args:
        before: the earlier sample; None for the start of the server, with no rates.
        now: the later one.
    """

    before: ServerSample | None
    now: ServerSample

    @property
    def seconds(self) -> float:
        return 0.0 if self.before is None else self.now.at - self.before.at

    def change(self, name: str, label: str | None = None) -> float:
        """The growth of a counter, over all labels or for one of them."""
        if self.before is None:
            return 0.0

        def total(sample: ServerSample) -> float:
            return sample.value(name) if label is None else sample.values.get(name, {}).get(label, 0.0)

        now, before = total(self.now), total(self.before)
        return now - before if now >= before else now

    def per_second(self, name: str) -> float | None:
        """The growth of a counter per second; None without an earlier sample."""
        return self.change(name) / self.seconds if self.seconds > 0 else None

    def mean(self, histogram: str) -> float | None:
        """The mean of the values that a histogram got between the samples; None without such values."""
        count = self.change(f"{histogram}_count")
        return self.change(f"{histogram}_sum") / count if count else None

    def cached_share(self) -> float | None:
        """The share of prompt tokens from the cache, 0 to 1; None without prompts."""
        prompts = self.change("prompt_tokens_total")
        return self.change("prompt_tokens_cached_total") / prompts if prompts else None

    def misses(self) -> list[tuple[str, int, int]]:
        """Missed module tokens by reason: the reason, the tokens in between, and all tokens. The largest come first."""
        total = self.now.values.get("module_tokens_missed_total", {})
        rows = [
            (reason, round(self.change("module_tokens_missed_total", reason)), round(total[reason])) for reason in total
        ]
        return sorted((row for row in rows if row[2]), key=lambda row: (-row[1], -row[2], row[0]))


@dataclass(frozen=True, slots=True)
class TierUse:
    """The use of one tier.

    Args:
        segments, tokens, bytes: stored now.
        full: its fill from 0 to 1; None without a bound.
        hits: prompt tokens that the pool had, or segments read from a lower tier, since the start.
        misses: failed reads of a lower tier; None for the pool.
    """

    name: str
    segments: int
    tokens: int
    bytes: int
    full: float | None
    hits: int | None
    misses: int | None


def tier_uses(sample: ServerSample) -> list[TierUse]:
    """Return the tiers that a server has, nearest first."""
    found = []
    for name in TIERS:
        tier = sample.cache.get(name)
        if tier is None:
            continue
        if name == "pool":
            full = tier["used_chunks"] / tier["chunks"] if tier["chunks"] else None
            hits, misses = sample.value("prefix_cache_hits_total"), None
        else:
            full = tier["bytes"] / tier["quota"] if tier["quota"] else None
            hits = sample.value(f"{_STORES[name]}_hits_total")
            misses = round(sample.value(f"{_STORES[name]}_misses_total"))
        found.append(TierUse(name, tier["segments"], tier["tokens"], tier["bytes"], full, round(hits), misses))
    return found


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

    Without a terminal, it prints one line per interval.
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
    """Yield the state of the server at every interval. The first request raises its error; later errors are yielded."""
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
    """Return the state of the server as a line of ``name=value``.

    Rates need an earlier sample, and are "-" without it.
    """
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
    """Return the state of the server as a screen."""
    now = rates.now
    head = Text.assemble((f" {printable(clip(now.cache['model']))} ", "bold reverse"), "  ", (url, "dim"))
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
            Text(printable(clip(row["endpoint"].removeprefix("/v1/")))),  # a plain string would be markup
            row["state"],
            Text(printable(clip(row["tenant"]))),
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
