"""Many requests: ChunkAttention's rates and memory (figure 5, table 4), and a commentary's hit rates and documents."""

from __future__ import annotations

from pathlib import Path

from inlay_lab.bench.machine import fast_dtype
from inlay_lab.bench.throughput.measure import measure_throughput
from inlay_lab.bench.throughput.plot import draw_hit_rates
from inlay_lab.bench.throughput.setting import ThroughputSetting
from inlay_lab.bench.throughput.workload import Sizes
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import Data, Outcome, Row, Settings, Table
from inlay_lab.reproduce.plots import draw_lines

_COLUMNS = {"inlay": "inlay", "off": "nothing shared", "stock": "stock transformers"}


def measure_rates(settings: Settings) -> Outcome:
    """Fully shared prompts, all at once and at arrival rates."""
    setting = ThroughputSetting(
        models=(settings["model"],),
        parts=("prefix",),
        columns=("off", "stock"),
        arrivals=("batch", "poisson"),
        rates=tuple(settings["rates"]),
        requests=settings["requests"],
        batch=settings["batch"],
        prefixes=tuple(settings["prefixes"]),
        completion=settings["completion"],
        dtype=fast_dtype(),
        budget_s=settings["budget_s"],
        quick=True,  # the report does not need the machine's rates
    )
    result = measure_throughput(setting)
    model = f"{settings['model'].removeprefix('random:')} in {fast_dtype()}"
    why = f"{model} on a CPU; prefill is most of a request here, and sharing saves it, while on an A100 decoding is"
    rows: list[Row] = []
    for row in result["rows"]:
        if row["rate"] is None and row["ratio"] is not None:
            prefix, printed = row["prefix"], published.THROUGHPUT_TIMES.get(row["prefix"])
            for name, ratio in row["ratio"].items():
                what = f"{prefix:,} shared tokens: tokens/s, times {_COLUMNS[name]}"
                rows.append(Row(what, "×", ratio, printed, f"{why}; the paper has vLLM there"))
            if row["kv_saved"] is not None:
                saved = f"{prefix:,} shared tokens: memory for keys and values saved"
                reason = f"prompts end in 32 tokens of their own, answers have {settings['completion']}, not 512"
                rows.append(Row(saved, "%", 100 * row["kv_saved"], published.KV_SAVED.get(prefix), reason))
    slowest = min(settings["rates"])
    for row in result["rows"]:
        cells = {name: cell for name, cell in row["columns"].items() if "skipped" not in cell}
        if row["rate"] == slowest and {"inlay", "off"} <= cells.keys():
            times = cells["off"]["latency_ms_per_token"] / cells["inlay"]["latency_ms_per_token"]
            what = f"{row['prefix']:,} shared tokens, {slowest:g} requests/s: ms/token, nothing shared by shared"
            rows.append(Row(what, "×", times, published.LATENCY_TIMES.get(row["prefix"]), why))
    return Outcome(
        rows,
        [Table("By shared tokens and rate of arrival", _RATES_HEADER, [*_rate_lines(result)])],
        [
            f"{settings['requests']} requests, at most {settings['batch']} at once, answers of "
            f"{settings['completion']} tokens; a column has fewer where all would take more than "
            f"{settings['budget_s']:g} s, and *n* says how many. Nothing shared is inlay with `reuse=off`: the same "
            "prompts, as the paper's rows without shared tokens. ms/token is the mean over requests of their time, "
            "waiting included, by the answer's tokens."
        ],
        {"panels": _rate_panels(result)},
    )


_RATES_HEADER = ["shared tokens", "requests/s", "who", "n", "tokens/s", "ms/token", "first token p50, ms"]
_RATES_HEADER += ["KV, MiB", "peak batch"]


def _rate_lines(result: Data) -> list[list[str]]:
    lines = []
    for row in result["rows"]:
        rate = "all at once" if row["rate"] is None else f"{row['rate']:g}"
        for name, cell in row["columns"].items():
            head = [f"{row['prefix']:,}", rate, _COLUMNS[name]]
            if "skipped" in cell:
                lines.append([*head, f"left out: {cell['skipped']}", *[""] * 5])
                continue
            held = "" if cell["kv_peak_bytes"] is None else f"{cell['kv_peak_bytes'] / 2**20:,.0f}"
            times = f"{cell['latency_ms_per_token']:,.1f}", f"{cell['ttft_ms']['p50']:,.0f}"
            batch = "" if cell["peak_batch"] is None else f"{cell['peak_batch']}"
            lines.append([*head, f"{cell['requests']}", f"{cell['tokens_s']:,.1f}", *times, held, batch])
    return lines


def _rate_panels(result: Data) -> list[Data]:
    panels = []
    rated = [row for row in result["rows"] if row["rate"] is not None]
    for prefix in dict.fromkeys(row["prefix"] for row in rated):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rated:
            for name, cell in row["columns"].items():
                if row["prefix"] == prefix and "skipped" not in cell:
                    lines.setdefault(_COLUMNS[name], []).append((row["rate"], cell["latency_ms_per_token"]))
        panels.append({"title": f"{prefix:,} shared tokens", "lines": lines, "x": "requests/s", "y": "ms/token"})
    return panels


def draw_rates(data: Data, path: Path) -> None:
    """Draw normalized latency over the arrival rate, as in figure 5."""
    draw_lines(data["panels"], path)


def measure_hit_rates(settings: Settings) -> Outcome:
    """Documents, passages and summaries at several hit rates."""
    setting = ThroughputSetting(
        models=(settings["model"],),
        parts=("workloads",),
        columns=("off",),
        requests=settings["requests"],
        hit_rates=tuple(percent / 100 for percent in settings["hits"]),
        users=Sizes(**settings["sizes"]),
        clients=settings["clients"],
        dtype=fast_dtype(),
        budget_s=settings["budget_s"],
        quick=True,  # the report does not need the machine's rates
    )
    result = measure_throughput(setting)
    rows, lines = [], []
    for row in result["rows"]:
        kind, aimed = row["workload"], round(100 * row["aimed_hit_rate"])
        cell = row["columns"]["inlay"]
        if "skipped" in cell:
            lines.append([kind, f"{aimed}%", f"left out: {cell['skipped']}", *[""] * 5])
            continue
        times = (row["ttft_ratio"] or {}).get("off")
        lines.append(
            [
                kind,
                f"{aimed}%",
                f"{cell['hit_rate']:.0%}",
                f"{cell['requests']}",
                f"{cell['ttft_ms']['p50']:,.0f}",
                f"{cell['ttft_ms']['p90']:,.0f}",
                f"{cell['requests_s']:.3g}",
                "" if times is None else f"{times:.1f}×",
            ]
        )
        if kind == "documents" and times is not None and aimed in published.HIT_RATE_TIMES:
            what = f"documents, {aimed}% hits: times as fast to the first token, median"
            rows.append(Row(what, "×", times, published.HIT_RATE_TIMES[aimed], _HIT_RATES_WHY))
        overlap, printed = published.WORKLOAD_TIMES[kind]
        if aimed == overlap and row["ratio"] is not None and "off" in row["ratio"]:
            what = f"{kind}, {aimed}% hits: requests/s, times those with nothing shared"
            rows.append(Row(what, "×", row["ratio"]["off"], printed, _WORKLOADS_WHY))
    sizes = setting.users
    return Outcome(
        rows,
        [Table("By workload and share of hits", _HITS_HEADER, lines)],
        [
            f"Documents of {sizes.document:,} tokens with questions of {sizes.question}; {sizes.passages} passages of "
            f"{sizes.passage} of a Zipf pool in any order; texts of {sizes.text} behind a system prompt of "
            f"{sizes.system:,}. {settings['clients']} callers take turns. *Stored* is the share of all prompts' tokens "
            "that was found. The paper has no such experiment: these are the commentary's tables."
        ],
        {"result": {"rows": result["rows"]}},
    )


_HITS_HEADER = ["workload", "hits aimed at", "stored", "n", "first token p50, ms", "p90", "requests/s", "first token ×"]
_HIT_RATES_WHY = (
    "the median request is a hit above 50 % and a miss below, so that it steps where the commentary's mean slopes; its "
    "times fall by less than the tokens it computes do, for which it gives no reason"
)
_WORKLOADS_WHY = (
    "a CPU spends most of a request in prefill, and other sizes; the commentary gives one overlap for each workload "
    "and does not say how long its texts and answers are"
)


def draw_hits(data: Data, path: Path) -> None:
    """Draw the result as ``inlay bench throughput --part workloads --plot`` does."""
    draw_hit_rates(data["result"], path)


def measure_documents(settings: Settings) -> Outcome:
    """The memory of resident documents, and the cost of a lookup."""
    setting = ThroughputSetting(
        models=(settings["model"],),
        parts=("memory",),
        columns=(),
        documents=tuple(settings["documents"]),
        users=Sizes(document=settings["tokens"]),
        dtype=fast_dtype(),
        budget_s=settings["budget_s"],
        quick=True,  # the report does not need the machine's rates
    )
    result = measure_throughput(setting)
    lines, rows = [], []
    for row in result["rows"]:
        printed = published.DOCUMENTS_GB.get(row["documents"])
        told = "" if printed is None else f"{printed:.1f} GB"
        if "skipped" in row:
            lines.append([f"{row['documents']:,}", f"left out: {row['skipped']}", *[""] * 4, told])
            continue
        each = row["kv_bytes_per_document"]
        lines.append(
            [
                f"{row['documents']:,}",
                f"{row['rss_bytes'] / 1e9:.2f}",
                f"{row['kv_bytes'] / 1e6:,.0f}",
                "" if each is None else f"{each / 1e6:,.2f}",
                f"{row['ttft_ms']['p50']:,.0f}",
                "" if row["lookup_us"] is None else f"{row['lookup_us']:,.1f}",
                told,
            ]
        )
        last = row
    if last["documents"]:
        tokens, held = settings["tokens"], last["kv_bytes_of_tokens"]
        why = (
            f"{settings['model']} in {fast_dtype()} keeps {held / tokens / 1024:.0f} KiB a token. Llama-2 7B "
            "keeps 512 KiB (table 2), 1,049 MB for 2,000 tokens: the commentary's 61 MB would be 116 tokens"
        )
        rows.append(
            Row("keys and values a document", "MB", last["kv_bytes_per_document"] / 1e6, published.DOCUMENT_MB, why)
        )
        rows.append(Row("of which its tokens need", "%", 100 * held / last["kv_bytes_per_document"]))
        rows.append(Row("memory of the process a document adds", "MB", last["rss_bytes_per_document"] / 1e6))
    header = [
        "documents",
        "process, GB",
        "keys and values, MB",
        "MB each",
        "question p50, ms",
        "lookup, µs",
        "commentary",
    ]
    name = settings["model"].removeprefix("random:")
    notes = [
        "A lookup finds the document that a question begins with, on the engine's thread. With none, the question is "
        "about a document that is not stored."
    ]
    return Outcome(rows, [Table(f"Documents of {settings['tokens']:,} tokens, {name}", header, lines)], notes)
