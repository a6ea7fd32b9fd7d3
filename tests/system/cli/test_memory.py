"""``inlay memory``: its tables, its JSON, and one sentence for each error."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from inlay.authoring.memory import ARCHITECTURES
from tests.commands import run


@pytest.fixture(autouse=True)
def _command(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def mistral(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    config = AutoConfig.for_model("mistral", num_hidden_layers=4, sliding_window=100, head_dim=64)
    config.save_pretrained("mistral")
    return "./mistral"


def test_one_model(capsys):
    status, out, _ = run(capsys, "memory", "--model", "llama-2-7b")
    assert status == 0
    assert out.splitlines()[1].split() == [
        "llama-2-7b",
        "32",
        "layers",
        "×",
        "2",
        "×",
        "32",
        "heads",
        "×",
        "128",
        "0.5000",
    ]
    assert "bf16: 16 bits an element; scales add nothing." in out


def test_several_models_and_tokens(capsys):
    arguments = ["--model", "llama-2-7b", "--model", "random:tiny", "--model", "demo", "--tokens", "4096"]
    status, out, _ = run(capsys, "memory", *arguments)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[-2:] == ["4,096", "tokens"]
    assert lines[1].split()[-2:] == ["2.00", "GiB"]
    assert lines[2].split()[-3:] == ["0.0020", "8.0", "MiB"]  # 4 layers × 2 × 4 heads × 32 × 2 bytes
    assert lines[3].startswith("demo ")


def test_windows_limit_the_memory_of_one_sequence(mistral, capsys):
    status, out, _ = run(capsys, "memory", "--model", mistral, "--tokens", "2048")
    assert status == 0
    assert "one sequence" in out.splitlines()[0]
    assert out.splitlines()[1].split()[-4:] == ["16.0", "MiB", "0.8", "MiB"]
    assert "4 of 4 layers see the last 100 positions alone" in out


def test_json(mistral, capsys):
    arguments = ["--model", mistral, "--model", "falcon-40b", "--tokens", "2048", "--codec", "int8", "--json"]
    status, out, _ = run(capsys, "memory", *arguments)
    assert status == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert (result["codec"], result["tokens"]) == ("int8", 2048)
    first, second = result["models"]
    assert first["bytes_per_token"] == 4 * 2 * 8 * (64 + 4)
    assert (first["bytes"], first["sequence_bytes"]) == (2048 * 4352, 99 * 4352)
    assert (first["type"], first["kv_layers"], first["windows"]) == ("mistral", 4, [100])
    assert second["bytes"] == second["sequence_bytes"] == 2048 * 60 * 2 * 8 * (64 + 4)
    assert "transformers repeats them for all 128 heads" in second["notes"][0]


@pytest.mark.parametrize(
    ("words", "kept", "every_head"), [(["--model", "llama-2-7b", "--model", "mpt-30b"], 2, None), (["--table2"], 7, 8)]
)
def test_a_drawing(capsys, tmp_path, words, kept, every_head):
    """A bar for each model, and one beside it for every head; each kind of bar once more in the legend."""
    status, out, _ = run(capsys, "memory", *words, "--plot", str(tmp_path / "memory.svg"))
    assert status == 0
    assert "llama-2-7b" in out
    drawn = (tmp_path / "memory.svg").read_text()
    assert drawn.count("fill: #0072b2") == kept + 1
    assert drawn.count("fill: #bbbbbb") == (0 if every_head is None else every_head + 1)


def test_the_papers_table(capsys):
    status, out, _ = run(capsys, "memory", "--table2")
    assert status == 0
    rows = [line.split() for line in out.splitlines()[1 : 1 + len(ARCHITECTURES)]]
    assert rows[0][:4] == ["bert-base", "0.03", "0.0352", "—"]
    assert rows[5][:4] == ["falcon-40b", "1.87", "1.8750", "0.1172"]
    assert rows[7][:8] == ["falcon-180b", "4.53", "4.5312", "0.1562", "8", "KV", "heads", "serve"]


def test_the_papers_table_as_json(capsys):
    status, out, _ = run(capsys, "memory", "--table2", "--json")
    assert status == 0
    rows = {row["model"]: row for row in json.loads(out)["table2"]}
    assert set(rows) == set(ARCHITECTURES)
    assert (rows["llama-2-70b"]["paper"], rows["llama-2-70b"]["all_heads"], rows["llama-2-70b"]["kept"]) == (
        2.5,
        2.5,
        0.3125,
    )
    assert rows["bert-base"]["kept"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("memory", "memory needs a model; write --model demo, or --table2"),
        ("memory --model demo --tokens 0", "--tokens is 0; it must be at least 1"),
        ("memory --model demo --tokens many", "Invalid value for '--tokens'"),
        ("memory --model demo --codec int3", "--codec is 'int3'; use one of fp32, bf16"),
        (
            "memory --model demo --plot memory.jpg",
            "--plot is 'memory.jpg'; use a name that ends in .png or .svg or .pdf",
        ),
        ("memory --table2 --codec fp32", "--table2 is the paper's table, at 16 bit; leave"),
        ("memory --table2 --model demo", "--table2 is the paper's table, at 16 bit; leave"),
        ("memory --table2 --tokens 5", "--table2 is the paper's table, at 16 bit; leave"),
        ("memory --model bert-base", "bert-base has no KV cache"),
        ("memory --model random:x", "random:x is not a known shape"),
        ("memory --model ./nowhere", "./nowhere: no such directory"),
        (
            "memory --model no/such-model",
            "no/such-model is neither a local directory nor a model that the hub would give",
        ),
        ("memory --model demo --weight", "No such option: --weight"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, sentence):
    status, out, err = run(capsys, *arguments.split())
    assert status == 2
    assert not out
    assert len(err.splitlines()) == 1
    assert err.startswith("inlay: ")
    assert sentence in err


def test_weights_are_printed_on_request(capsys):
    _, out, _ = run(capsys, "memory", "--model", "random:tiny", "--model", "falcon-40b", "--weights", "--json")
    tiny, falcon = json.loads(out)["models"]
    assert list(tiny["weights"]) == ["bfloat16", "int8", "int4"]
    assert tiny["weights"]["bfloat16"] > tiny["weights"]["int4"] > 0
    assert falcon["weights"] is None
    _, out, _ = run(capsys, "memory", "--model", "random:tiny", "--model", "falcon-40b", "--weights")
    assert f"random:tiny: weights take {tiny['weights']['bfloat16'] / 2**20:.1f} MiB in bfloat16" in out
    assert "falcon-40b: its weights are not counted" in out
    assert "weights" not in json.loads(run(capsys, "memory", "--model", "random:tiny", "--json")[1])["models"][0]
