"""The whole benchmark at sizes of seconds: its JSON, its tables, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from inlay.cli.main import main
from inlay.errors import CapacityError, ContextError, ParameterError
from inlay_lab.bench.throughput import measure
from inlay_lab.bench.throughput.measure import measure_throughput as run
from inlay_lab.bench.throughput.setting import ThroughputSetting
from tests.conftest import tiny

pytestmark = [pytest.mark.usefixtures("quick_model"), pytest.mark.long]


def measured(words: str, capsys, monkeypatch) -> tuple[dict, list[str], str]:
    """A command's JSON result, the lines of its tables, and its progress."""
    results = []
    monkeypatch.setattr(measure, "measure_throughput", lambda *arguments: results.append(run(*arguments)) or results[0])
    status = main(words.split())
    out, err = capsys.readouterr()
    assert status == 0, err
    assert '"rows"' not in out, "JSON is for --json"
    return results[0], out.splitlines(), err


def test_results_and_tables(capsys, monkeypatch):
    words = "bench throughput --model random:tiny --quick --arrivals batch,poisson --prefixes 70 --against off,stock"
    result, table, _ = measured(words, capsys, monkeypatch)
    assert [(row["part"], row["arrivals"], row["prefix"]) for row in result["rows"]] == [
        ("prefix", "batch", 70), ("prefix", "poisson", 70), ("modules", "batch", None), ("modules", "poisson", None)
    ]  # fmt: skip
    for row in result["rows"]:
        assert list(row["columns"]) == ["inlay", "off", "stock"]
        ours, off = row["columns"]["inlay"], row["columns"]["off"]
        assert ours["tokens_s"] == pytest.approx(4 * row["completion"] / ours["wall_s"], rel=0.05)
        held = [cell["kv_peak_bytes"] / cell["peak_batch"] for cell in (ours, off)]
        assert row["kv_saved"] == pytest.approx(1 - held[0] / held[1], abs=0.001)
        assert 1 <= ours["steps"]["decode"]["rows"] <= ours["peak_batch"] <= 2
        assert (row["ratio"] is None) == (row["arrivals"] == "poisson")
        step = ours["steps"]["decode"]
        assert step["floor_ms"] == pytest.approx(
            max(step["weights_ms"], step["products_ms"]) + step["kv_ms"], rel=0.1, abs=0.002
        )
    first = result["rows"][0]
    assert first["ratio"]["stock"] == pytest.approx(
        first["columns"]["stock"]["wall_s"] / first["columns"]["inlay"]["wall_s"], rel=0.05, abs=0.01
    )
    assert any("70 shared tokens; 4 requests, all at once" in line for line in table)
    assert any("6 of 12 modules in any order; 4 requests, 50 a second" in line for line in table)
    assert any("max(weights, products) + KV" in line for line in table)


def test_workloads_and_memory(capsys, tmp_path, monkeypatch):
    words = "bench throughput --model random:tiny --quick --part workloads,memory --hit-rates 0,75 --documents 0,2"
    result, table, err = measured(f"{words} --plot {tmp_path / 'hits.svg'}", capsys, monkeypatch)
    *hits, none, two = result["rows"]
    assert [(row["workload"], row["aimed_hit_rate"]) for row in hits] == [
        (kind, rate) for kind in ("documents", "passages", "summaries") for rate in (0, 0.75)
    ]
    for cold, warm in zip(hits[::2], hits[1::2], strict=True):
        assert warm["columns"]["inlay"]["hit_rate"] > cold["columns"]["inlay"]["hit_rate"] + 0.3
        assert warm["columns"]["off"] == cold["columns"]["off"]
        assert warm["columns"]["off"]["aimed_hit_rate"] == 0
        ours, off = (warm["columns"][name]["ttft_ms"]["p50"] for name in ("inlay", "off"))
        assert warm["ttft_ratio"]["off"] == pytest.approx(off / ours, abs=0.01)
    assert hits[1]["columns"]["inlay"]["hit_rate"] == pytest.approx(0.75 * 64 / 72, abs=0.03)
    assert (none["documents"], two["documents"], two["kv_bytes_per_document"] > 0) == (0, 2, True)
    assert result["kept_cells"] == 0
    assert any("summaries; 4 requests of 2 clients" in line for line in table)
    assert any("resident documents of 64 tokens" in line for line in table)
    assert (tmp_path / "hits.svg").stat().st_size > 1000
    assert err.splitlines()[0].startswith("[1/11] random:tiny, workloads, documents at 0%, ")
    assert err.splitlines()[-1].startswith("[11/11] random:tiny, memory, 2 documents, inlay: first token after ")


def test_kept_cells_are_not_measured_again(tmp_path, capsys, monkeypatch):
    words = "bench throughput --model random:tiny --quick --part prefix,memory --against off --json"
    words += " --prefixes 0,9 --documents 0 --out"
    file = tmp_path / "cells.jsonl"
    assert main([*words.split(), str(file)]) == 0
    whole = json.loads(capsys.readouterr().out)
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 4 + 1
    file.write_text("".join(lines[:3]))  # as if interrupted after two cells
    assert main([*words.split(), str(file)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (whole["kept_cells"], result["kept_cells"]) == (0, 2)
    assert result["rows"][0] == whole["rows"][0]
    assert result["rows"][1]["columns"]["inlay"]["wall_s"] != whole["rows"][1]["columns"]["inlay"]["wall_s"]
    assert [line.split("]")[0] for line in err.splitlines()] == [
        "[1/5, kept", "[2/5, kept", "[3/5", "[4/5", "[5/5"
    ]  # fmt: skip
    assert len(file.read_text().splitlines()) == 1 + 4 + 1
    monkeypatch.setattr("inlay_lab.bench.throughput.columns.Ours.run", lambda *arguments: 1 / 0)
    assert main([*words.split(), str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["kept_cells"] == 5


def test_loading_options_are_part_of_every_cell(tmp_path, capsys, monkeypatch):
    loaded = []
    monkeypatch.setattr(measure, "load_model", lambda name, **how: loaded.append(how) or tiny("llama"))
    words = "bench throughput --model random:tiny --quick --part prefix,memory --against none --prefixes 0 --json"
    words += f" --documents 0 --out {tmp_path / 'cells.jsonl'}"
    assert main([*words.split(), "--quantization", "int8"]) == 0
    assert (loaded[0]["weights"], loaded[0]["quantization"]) == ("packed", "int8")
    row, documents = json.loads(capsys.readouterr().out)["rows"]
    assert row["quantization"] == documents["quantization"] == "int8"
    kept = {"--quantization=int8": 2, "--weights=packed": 0, "--weights=stock": 0}
    for option, cells in kept.items():
        assert main([*words.split(), option]) == 0
        assert json.loads(capsys.readouterr().out)["kept_cells"] == cells, option
    assert loaded[-1]["weights"] == "stock"


def test_budget_limits_requests_and_documents(capsys):
    words = (
        "bench throughput --model random:tiny --quick --part prefix,memory --prefixes 40 --against none --requests 64"
    )
    assert main([*words.split(), "--documents", "0,100000", "--budget-s", "0.04", "--json"]) == 0
    out, err = capsys.readouterr()
    row, none, many = json.loads(out)["rows"]
    assert row["requests"] == 64
    cell = row["columns"]["inlay"]
    assert cell.get("requests", 1) < 64
    assert "skipped" not in none
    assert "documents take about" in many["skipped"]
    assert "give --budget-s as much" in err


def test_unavailable_column_has_a_reason(monkeypatch, capsys):
    def refuse(self, *arguments, **keywords):
        raise RuntimeError("no such device\nand more")

    monkeypatch.setattr(type(tiny("llama").model), "continuous_batching_context_manager", refuse)
    words = "bench throughput --model random:tiny --quick --against transformers --part prefix --prefixes 0"
    result, table, _ = measured(words, capsys, monkeypatch)
    (row,) = result["rows"]
    reason = "transformers' continuous batching: RuntimeError: no such device"
    assert row["columns"]["transformers"] == {"skipped": reason}
    assert row["ratio"] == {}
    assert row["kv_saved"] is None
    assert "no such device" in " ".join(table)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"requests": 0}, ParameterError, "requests is 0; it must be at least 1"),
        ({"prefixes": (-1,)}, ParameterError, "prefixes is -1; it must be at least 0"),
        ({"rates": (1.0, 0.0)}, ParameterError, "rate is 0.0; it must be a number of requests a second above 0"),
        ({"rates": (float("nan"),)}, ParameterError, "rate is nan; it must be a number of requests a second above 0"),
        ({"columns": ("vllm",)}, ParameterError, "column is 'vllm'; use one of inlay, off, stock, transformers"),
        ({"parts": ("x",)}, ParameterError, "part is 'x'; use one of prefix, modules, workloads, memory"),
        ({"workloads": ("x",)}, ParameterError, "workload is 'x'; use one of documents, passages, summaries"),
        ({"hit_rates": (0.5, 1.01)}, ParameterError, "hit rate is 101 %; it must be from 0 to 100"),
        ({"hit_rates": (float("nan"),)}, ParameterError, "hit rate is nan %; it must be from 0 to 100"),
        ({"documents": (-3,)}, ParameterError, "documents is -3; it must be at least 0"),
        ({"clients": 0}, ParameterError, "clients is 0; it must be at least 1"),
        ({"budget_s": float("inf")}, ParameterError, "budget_s is inf; it must be a number of seconds above 0"),
        ({"budget_s": 0.0}, ParameterError, "budget_s is 0; it must be a number of seconds above 0"),
        ({"weights": "x"}, ParameterError, "weights is 'x'; use one of packed, stock"),
        ({"quantization": "int3"}, ParameterError, "quantization is 'int3'; use one of int8, int4, or None"),
        ({"arrivals": ("x",)}, ParameterError, "arrivals is 'x'; use one of batch, poisson"),
        ({"prefixes": (9000,)}, ContextError, r"requests of \d+ tokens do not fit the model's context of 2048"),
        ({"batch": 10**9}, CapacityError, "take .* GB of KV where nothing is shared, and .* GB are free; give a"),
    ],
)
def test_wrong_settings(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        run(ThroughputSetting(**{"models": ("m",), "quick": True, "prefixes": (0,), **wrong}))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rates 1", "--rates are those of Poisson arrivals; add --arrivals poisson, or drop --rates"),
        ("--arrivals poisson --rates x", "--rates is 'x'; write a number, or several with commas: 0.5,1,2"),
        ("--prefixes x", "--prefixes is 'x'; write a number, or several with commas: 1024,2048"),
        ("--part workloads --hit-rates x", "--hit-rates is 'x'; write a number, or several with commas: 0,50,90"),
        ("--hit-rates 5", "--hit-rates is for --part workloads; name it there, or drop --hit-rates"),
        ("--part memory --against off", "--against is for --part prefix or modules or workloads; name it there, or"),
        ("--plot a.png", "--plot is for --part workloads; name it there, or drop --plot"),
        ("--part workloads --against stock", "--against stock: workloads are compared with off alone; drop it"),
        ("--part modules --against llama.cpp", "--against llama.cpp is for --part prefix; name it there, or drop it"),
        ("--part workloads --rates 1", "--rates is for --part prefix or modules; name it there, or drop --rates"),
    ],
)
def test_wrong_words_are_one_sentence(words, sentence, capsys):
    assert main(["bench", "throughput", "--model", "random:tiny", *words.split()]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_importing_the_command_line_imports_no_torch():
    code = "import sys, inlay_lab.cli.bench_throughput; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
