"""``inlay bench``: every command at its quick size, its output, and its errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from inlay.kv.policies import POLICIES
from inlay_lab.cli import bench
from inlay_lab.cli.bench_tables import show
from tests import commands
from tests.commands import run_file

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = Path(__file__).parents[3] / "docs/internals/results.md"
NAMES = ("attention", "decode", "encode", "throughput", "ttft")
ATTENTION = "attention --quick --dtype float32 --heads 4/2 --prompt 64 --batches 1,2 --completions 0"
COMMANDS = {
    "attention": f"{ATTENTION} --part table3,segments",
    "decode": "decode --model random:tiny --quick --context 8 --baselines transformers",
    "encode": "encode --model random:tiny --quick --modules 2 --batches 1,2",
    "throughput": "throughput --model random:tiny --quick --part prefix --prefixes 8 --against off",
    "ttft": "ttft --model random:tiny --quick --cached 64 --new 8",
}


pytestmark = pytest.mark.usefixtures("quick_model")  # tests/system/cli/test_cli.py runs a command with a real one


def run(capsys, command: str) -> tuple[int, str, str]:
    return commands.run(capsys, "bench", *command.split())


@pytest.mark.parametrize("name", NAMES)
def test_table_and_machine_ceilings_are_printed(name, capsys, monkeypatch):
    results = []
    module = sys.modules[bench.__dict__[name].__module__]
    monkeypatch.setattr(module, "show", lambda result, *more: results.append(result) or show(result, *more))
    status, out, err = run(capsys, COMMANDS[name])
    assert status == 0, err
    table, (result,) = out.splitlines(), results
    assert result["quick"] is True
    assert json.dumps(result) not in out, "JSON is for --json"
    assert {"gemm_gflops", "copy_gb_s"} == set(result["ceilings"])
    assert f"{result['ceilings']['copy_gb_s']:.1f} GB/s" in table[-1]
    assert "a quick run" in table[-1]
    headings = {"attention": "/paged", "decode": "ms/token", "encode": "tokens/s", "ttft": "over_bound"}
    headings["throughput"] = "first p50"
    assert any(headings[name] in line for line in table)


def test_json_only(capsys):
    status, out, _ = run(capsys, f"{ATTENTION} --part figure3,figure4 --columns ours,paged --json --backend torch")
    assert status == 0
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["backend"] == "torch"
    assert [row["batch"] for row in result["figure4"]] == [1, 2]
    assert [row["context"] for row in result["figure3"]] == [128]
    assert all(list(row["columns"]) == ["ours", "paged"] for row in result["figure3"])
    assert "table3" not in result


def test_plots(capsys, tmp_path):
    for command, file in ((f"{ATTENTION} --part figure4 --columns ours", "a.png"), (COMMANDS["ttft"], "t.svg")):
        assert run(capsys, f"{command} --plot {tmp_path / file}")[0] == 0
        assert (tmp_path / file).stat().st_size > 1000


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("attention --part table4", "part is 'table4'; use one of table3, figure3, figure4, segments"),
        ("attention --heads 32", "--heads is '32'; write query heads/KV heads, such as 32/8"),
        ("attention --heads 6/4", "heads are 6/4; query heads must be a multiple of KV heads"),
        ("attention --prompt long", "--prompt is 'long'; write a number"),
        ("attention --batches ,", "--batches is ','; write a number"),
        ("attention --completions 1.5", "--completions is '1.5'; write a number"),
        ("attention --dtype int8", "dtype is 'int8'; use one of float32, bfloat16"),
        ("attention --columns xformers", "column is 'xformers'; use one of ours"),
        ("attention --backend gpu", "attention backend 'gpu' does not exist"),
        ("attention --batch 0", "batch is 0; it must be at least 1"),
        ("attention --runs 0", "runs is 0; it must be at least 1"),
        ("attention --part segments,segments --plot a.png", "--plot draws table3, figure3 and figure4"),
        ("attention --plot a.gif", "--plot is 'a.gif'; use a name that ends in"),
        ("decode", "Missing option '--model'"),
        ("decode --model random:tiny --baselines vllm", "baseline is 'vllm'; use one of transformers, llama.cpp"),
        ("decode --model random:tiny --tokens 0", "tokens is 0; it must be at least 1"),
        ("encode --model random:tiny --batches x", "--batches is 'x'; write a number"),
        ("encode --model random:tiny --modules 0", "modules is 0; it must be at least 1"),
        ("ttft --model demo --baselines none --longest-baseline 5", "--longest-baseline asks for a baseline"),
        ("ttft --model demo --plot ./nowhere/a.png", "there is no folder 'nowhere'; make it first"),
        ("flops", "No such command 'flops'"),
    ],
)
def test_errors_are_one_sentence(command, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, command)
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("inlay: ")
    assert not out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", re.findall(r"^inlay bench (.*)$", PAGE.read_text(), re.MULTILINE))
def test_the_page_shows_options_that_exist(line, capsys):
    assert run(capsys, f"{line} --help")[0] == 0  # an unknown option is an error before the help is printed


def test_unknown_option_is_reported_despite_help(capsys):
    assert run(capsys, "ttft --model demo --sweeep --help")[0] == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_also_a_file(name, capsys):
    with pytest.raises(SystemExit) as ended:
        run_file(BENCHMARKS / f"{name}.py", "--help")
    assert ended.value.code == 0
    assert f"bench {name}" in capsys.readouterr().out
    assert f"python lab/benchmarks/{name}.py" in (BENCHMARKS / f"{name}.py").read_text()


def test_eviction_policies_side_by_side(capsys):
    status, out, err = run(capsys, "eviction --quick --accesses 400 --capacity 5,20 --json")
    assert status == 0, err
    result = json.loads(out)
    assert result["quick"] is True
    assert [(row["trace"], row["capacity"]) for row in result["rows"]] == [
        (trace, capacity) for trace in ("zipf", "scan", "shifting", "conversations") for capacity in (5, 20)
    ]
    for row in result["rows"]:
        assert set(row["policies"]) == set(POLICIES)
        assert all(0 <= cell["hit_ratio"] <= 1 and cell["saved_s"] >= 0 for cell in row["policies"].values())
    for small, large in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        assert small["policies"]["lru"]["hit_ratio"] < large["policies"]["lru"]["hit_ratio"]
    status, out, err = run(capsys, "eviction --accesses 200 --capacity 100 --policy lru,cost --trace conversations")
    assert status == 0, err
    assert re.search(r"trace +capacity +lru +cost", out)
    assert re.search(r"conversations +100% +([\d.]+%) ([\d,]+ s) +\1 \2", out), "where all has room, all is kept"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--policy best", "there is no policy 'best'; use some of lru,"),
        ("--trace mine", "there is no trace 'mine'; use some of zipf,"),
        ("--capacity 0", "each must be above 0 and at most 100"),
        ("--capacity few", "--capacity is 'few'; write a number, or several with commas: 1,5,20"),
        ("--accesses 0", "it must be at least 1"),
        ("--token-ms -1", "they must be 0 or more"),
    ],
)
def test_eviction_errors_are_one_sentence(capsys, arguments, sentence):
    status, _, err = run(capsys, f"eviction {arguments}")
    assert status != 0
    assert sentence in err.replace("\n", " ")
