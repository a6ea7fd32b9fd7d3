"""Prompt Cache's times to the first token on the CPU: LongBench's shapes, growth with the prompt, larger models."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from inlay.client.llm import LLM
from inlay.sampling.params import SamplingParams
from inlay.wording import counted
from inlay_lab.bench.machine import fast_dtype, new_sender
from inlay_lab.bench.ttft import Setting, TTFTSetting, draw_ttft, measure_ttft, workload
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import Data, Outcome, Row, Settings, Table
from inlay_lab.reproduce.plots import draw_pairs

#: By dataset: the average length of its documents in words, from the benchmark's page, and the tokens of its directive
#: and question, roughly. The latter are not cached. Questions of TriviaQA and PassageRetrieval contain a passage.
LONGBENCH_SHAPES = {
    "narrativeqa": (18_409, 96),
    "qasper": (3_619, 160),
    "multifieldqa_en": (4_559, 64),
    "hotpotqa": (9_151, 64),
    "2wikimqa": (4_887, 64),
    "musique": (11_214, 64),
    "gov_report": (8_734, 48),
    "qmsum": (10_614, 64),
    "multi_news": (2_113, 48),
    "triviaqa": (8_209, 512),
    "passage_count": (11_141, 128),
    "passage_retrieval_en": (9_289, 256),
}
#: The paper's samples average 5K tokens, so longer documents are cut there, and shorter at smaller scales.
_SAMPLE = 5_000


def measure_longbench_shapes(settings: Settings) -> Outcome:
    """Figures 4, 12 and 13: documents of each dataset's length as modules, and its directive behind them."""
    scale = settings["longest"] / _SAMPLE
    sizes = {
        name: (max(64, round(min(words, _SAMPLE) * scale)), max(8, round(new * scale)))
        for name, (words, new) in LONGBENCH_SHAPES.items()
    }
    distinct = tuple(Setting(*size) for size in dict.fromkeys(sizes.values()))
    result = _ttft(settings, distinct)
    timed = dict(zip(dict.fromkeys(sizes.values()), result["rows"], strict=True))
    rows = {DATASETS[name].title: timed[size] for name, size in sizes.items()}
    times = [row["speedup"] for row in rows.values()]
    slowest = min(rows, key=lambda name: float(rows[name]["speedup"]))
    shorter = f"documents of {settings['longest']:,} tokens at most where the paper's average 5K" if scale < 1 else ""
    why = _joined(f"{_model(settings)} on {_threads(result)}, where the paper has Llama 7B on a desktop CPU", shorter)
    in_place = "modules are read in place, where the paper copies them into one tensor for each request"
    lines = [
        [
            name,
            *(f"{row[key]:,}" for key in ("cached", "new")),
            f"{row['full_prefill_ms']:,.0f}",
            f"{row['ttft_ms']:,.1f}",
            f"{row['speedup']:.1f}×",
        ]
        for name, row in rows.items()
    ]
    return Outcome(
        [
            Row("most times as fast, against Intel", "×", max(times), published.CPU_TIMES_INTEL, f"{why}; {in_place}"),
            Row("most times as fast, against AMD", "×", max(times), published.CPU_TIMES_AMD, f"{why}; {in_place}"),
            Row("times as fast, the median dataset", "×", statistics.median(times), published.CPU_TIMES, why),
            Row(f"times as fast, the lowest: {slowest}", "×", min(times), published.CPU_TIMES, why),
        ],
        [Table("Milliseconds to the first token", _SHAPES_HEADER, lines)],
        [
            "Lengths are those of the benchmark's page, cut where samples of the paper's average length end; texts are "
            "made up, and new tokens are about as many as the dataset's directive and question. The paper prints "
            "ranges and drawings, no figures of datasets.",
            _BASELINE,
        ],
        {
            "labels": list(rows),
            "one": [row["full_prefill_ms"] / 1000 for row in rows.values()],
            "other": [row["ttft_ms"] / 1000 for row in rows.values()],
            "title": f"LongBench's shapes, {_model(settings)}, {_threads(result)}",
        },
    )


_SHAPES_HEADER = ["dataset", "cached tokens", "new tokens", "full prefill", "modules cached", "times as fast"]
_BASELINE = (
    "Full prefill is the stock transformers model on the same token ids, in the same dtype and with the same threads; "
    "it computes one row of logits and keeps nothing. Each is timed in turns with ours, and medians are given."
)


def draw_longbench_shapes(data: Data, path: Path) -> None:
    """Draw both times of each dataset."""
    names = ("full prefill, stock transformers", "inlay, documents cached")
    draw_pairs(data, path, names=names, axis="time to first token, s")


def measure_growth(settings: Settings) -> Outcome:
    """Figure 5: all tokens but a few are cached, over the length of the prompt."""
    rows = tuple(Setting(tokens, settings["new"]) for tokens in settings["cached"])
    result = _ttft(settings, rows, sweep=True, longest_baseline=settings["longest_baseline"])
    ours, full = (result["fits"][name] for name in ("ttft_ms", "full_prefill_ms"))
    longest = max(row["cached"] for row in result["rows"] if row["full_prefill_ms"] is not None)
    share = _square_share(full, longest)
    why = f"both terms are there; at {longest:,} tokens the one in n² is {share:.0%} of the fitted time" if full else ""
    lines = [
        [
            f"{row['cached']:,}",
            _ms(row["full_prefill_ms"]),
            _ms(row["ttft_ms"]),
            _ms(row["bound_ms"]),
            "" if row["speedup"] is None else f"{row['speedup']:.1f}×",
        ]
        for row in result["rows"]
    ]
    notes = [f"{each['cached']:,} tokens were left out: {each['reason']}." for each in result["skipped"]]
    return Outcome(
        [
            Row("full prefill grows", "", _growth(full), published.FULL_GROWS, why),
            Row(
                "with modules cached, time grows",
                "",
                _growth(ours),
                published.CACHED_GROWS,
                "reading in place adds so little at these lengths that the new tokens decide",
            ),
            *_coefficients(ours, full),
        ],
        [Table("Milliseconds to the first token", _GROWTH_HEADER, lines)],
        [
            _BASELINE,
            "*Nothing cached* is a request of the new tokens alone: what is left if reading cost nothing.",
            *notes,
        ],
        {"result": result},
    )


_GROWTH_HEADER = ["cached tokens", "full prefill", "modules cached", "nothing cached", "times as fast"]
_LEAST_R2 = 0.9


def _growth(fit: Data | None) -> str | None:
    """The degree of a fitted curve, if it explains the measurements and its leading coefficient is above 0."""
    if fit is None:
        return None
    word = {1: "linear", 2: "quadratic"}[fit["degree"]]
    return word if fit["coefficients"][-1] > 0 and fit["r2"] >= _LEAST_R2 else f"not {word}: R² {fit['r2']:.3f}"


def _square_share(fit: Data | None, tokens: int) -> float:
    if fit is None:
        return 0.0
    constant, linear, square = fit["coefficients"]
    return float(square * tokens**2 / (constant + linear * tokens + square * tokens**2))


def _coefficients(ours: Data | None, full: Data | None) -> list[Row]:
    rows = []
    if ours is not None:
        rows.append(Row("a cached token adds", "µs", 1000 * ours["coefficients"][1]))
    if full is not None:
        rows.append(Row("of full prefill, n adds", "µs", 1000 * full["coefficients"][1]))
        rows.append(Row("of full prefill, n² adds", "ns", 1e6 * full["coefficients"][2]))
    return rows


def draw_growth(data: Data, path: Path) -> None:
    """Draw points and fits as ``inlay bench ttft --sweep --plot`` does."""
    draw_ttft(data["result"], path)


def measure_later_tokens(settings: Settings) -> Outcome:
    """§5.4: the first token with and without cached modules, and the time of each later one."""
    llm = _llm(settings)
    row = Setting(settings["cached"], settings["new"])
    schema, prompt = workload(llm, "later", row)
    llm.add_schema(schema)
    took: dict[str, list[tuple[float, float]]] = {"off": [], "isolated": []}
    asked = SamplingParams(max_tokens=settings["tokens"], temperature=0, ignore_eos=True)
    for _ in range(1 + settings["runs"]):  # the first turn warms up
        for reuse, times in took.items():
            metrics = llm.generate([prompt], asked, reuse=reuse, cache_salt=new_sender())[0].metrics
            assert metrics.ttft_s is not None
            assert metrics.total_s is not None, "it has answered"
            times.append((metrics.ttft_s, (metrics.total_s - metrics.ttft_s) / (settings["tokens"] - 1)))
    llm.shutdown()
    first, later = ({reuse: _median_ms(t[at] for t in times[1:]) for reuse, times in took.items()} for at in (0, 1))
    why = f"{_model(settings)} at {settings['cached']:,} tokens on this CPU, where the paper has Llama 7B on a GPU"
    ratio = first["off"] / first["isolated"]
    same = later["isolated"] / later["off"]
    return Outcome(
        [
            Row("first token, full prefill", "ms", first["off"], published.FIRST_FULL, why),
            Row("first token, modules cached", "ms", first["isolated"], published.FIRST_CACHED, why),
            Row(
                "times as fast to the first token",
                "×",
                ratio,
                published.FIRST_TIMES,
                f"{why}: prefill costs more there",
            ),
            Row("each later token, modules cached", "ms", later["isolated"], published.LATER, why),
            Row(
                "later tokens, cached against full prefill",
                "×",
                same,
                published.LATER_SAME,
                "other work on the machine",
            ),
            Row(
                "tokens said while full prefill would still run",
                "",
                (first["off"] - first["isolated"]) / later["isolated"],
                published.TOKENS_GAINED,
                f"{why}: prefill costs more tokens' time there",
            ),
        ],
        notes=[
            "Both go through inlay's own engine (`reuse` is `off` or `isolated`), so later tokens are computed alike."
        ],
    )


def measure_model_size(settings: Settings) -> Outcome:
    """§5.4: the added time of a larger model with full prefill and with cached modules, for two shapes of Llama-2."""
    layers, times = settings["layers"], []
    for shape, of in (("llama-2-7b", 32), ("llama-2-13b", 40)):
        some = {**settings, "model": f"random:{shape}:{layers}"}
        result = _ttft(some, (Setting(settings["cached"], settings["new"]),))
        (row,) = result["rows"]
        times.append([row[name] * of / layers for name in ("full_prefill_ms", "ttft_ms")])
    (full_small, ours_small), (full_large, ours_large) = times
    full, ours = full_large - full_small, ours_large - ours_small
    why = (
        f"a CPU computes {settings['cached']:,} tokens more slowly than a GPU; {layers} of 32 and of 40 layers "
        "are measured, and multiplied"
    )
    lines = [
        [name, f"{each[0]:,.0f}", f"{each[1]:,.0f}"]
        for name, each in (("Llama-2 7B", times[0]), ("Llama-2 13B", times[1]))
    ]
    return Outcome(
        [
            Row("13B adds to full prefill", "ms", full, published.LARGER_ADDS_FULL, why),
            Row("13B adds with modules cached", "ms", ours, published.LARGER_ADDS_CACHED, why),
            Row(
                "one by the other",
                "×",
                full / ours,
                published.LARGER_ADDS_RATIO,
                "prefill costs a CPU more than reading, and nothing is copied here",
            ),
        ],
        [Table("Milliseconds to the first token, all layers", ["shape", "full prefill", "modules cached"], lines)],
        [_BASELINE, "Random weights: times do not depend on them. The output layer is multiplied with the others."],
    )


def _ttft(settings: Settings, rows: tuple[Setting, ...], **more: Any) -> Data:
    # quick: the report does not need the machine's rates
    return measure_ttft(
        TTFTSetting(model=settings["model"], dtype=fast_dtype(), rows=rows, runs=settings["runs"], quick=True, **more)
    )


def _llm(settings: Settings) -> LLM:
    return LLM(
        settings["model"],
        dtype=fast_dtype(),
        weights="packed",
        reuse="isolated",
        promotion_memory=0,
        seed=0,
        device="cpu",
    )


def _median_ms(seconds: Any) -> float:
    return float(statistics.median(seconds)) * 1000


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _model(settings: Settings) -> str:
    return f"{str(settings['model']).removeprefix('random:')} in {fast_dtype()}"


def _threads(result: Data) -> str:
    return f"{counted(result['machine']['threads'], 'thread')} of {result['machine']['cpu']}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
