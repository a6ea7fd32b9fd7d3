"""--adapter, where commands take it."""

from __future__ import annotations

import json

import pytest

from inlay.models.load import load_model
from tests.adapters import write_adapter
from tests.commands import run

SCHEMA = '<schema name="s"><module name="a">Some words.</module></schema>'


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", weights="stock")


@pytest.fixture
def files(tmp_path, monkeypatch, demo):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.xml").write_text(SCHEMA)
    (tmp_path / "p.xml").write_text('<prompt schema="s"><a/>And then?</prompt>')
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, demo, seed=seed)


@pytest.mark.usefixtures("files")
def test_run_answers_with_each_adapter(capsys):
    words = ["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "4", "--adapter", "x=one", "--adapter", "y=two"]
    status, out, err = run(capsys, *words, "--json")
    assert status == 0
    assert "inlay: adapter x: rank 4 in " in err
    row = json.loads(out)
    (other,) = row["adapters"]
    assert (row["adapter"], other["adapter"]) == ("x", "y")
    assert min(row["encoded_tokens"], other["encoded_tokens"], row["cached_tokens"], other["cached_tokens"]) > 0
    assert row["token_ids"] != other["token_ids"]
    status, out, _ = run(capsys, *words, "--reuse", "modular+across", "--compare")
    assert status == 0
    assert out.index("— x —") < out.index("— without reuse —") < out.index("— y —")
    assert "y: modular," in out
    assert "across_adapters" in out


@pytest.mark.usefixtures("files")
def test_run_reports_tiers_for_each_adapter(capsys, tmp_path):
    words = ["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "1", "--adapter", "x=one", "--adapter", "y=two"]
    for again in (False, True):
        status, out, err = run(capsys, *words, "--json", "--store", str(tmp_path / "store"))
        assert status == 0, err
        row = json.loads(out)
        for each in (row, *row["adapters"]):
            cached = each["cached_tokens"]
            assert each["tiers"] == ({"device": 0, "disk": cached} if again else {"device": cached, "disk": 0})
            assert (each["encoded_tokens"] == 0) is again


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", ["run s.xml --prompt p.xml", "serve demo --port 0", "memory --model demo"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["one"], "--adapter is 'one'; write NAME=PATH, as in --adapter sql=adapters/sql"),
        (["=one"], "--adapter is '=one'; write NAME=PATH"),
        (["x=one", "x=two"], "--adapter x=two: two adapters are called 'x'; give each a name of its own"),
    ],
)
def test_invalid_adapters_are_rejected(command, given, sentence, capsys):
    status, _, err = run(capsys, *command.split(), *(word for one in given for word in ("--adapter", one)))
    assert status != 0
    assert sentence in err


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", ["run s.xml --prompt p.xml", "serve demo --port 0"])
def test_adapter_with_the_models_name_is_rejected(command, capsys):
    status, _, err = run(capsys, *command.split(), "--adapter", "demo=one")
    assert status != 0
    assert "--adapter demo=one: an adapter and its model are called 'demo'; give each a name of its own" in err


@pytest.mark.usefixtures("files")
def test_memory_counts_adapters(capsys, demo):
    config = demo.model.config
    status, out, _ = run(capsys, "memory", "--model", "demo", "--adapter", "x=one", "--json")
    assert status == 0
    heads = config.num_attention_heads + config.num_key_value_heads
    numbers = config.num_hidden_layers * 4 * (2 * config.hidden_size + heads * config.head_dim)
    assert json.loads(out)["adapters"] == [{"adapter": "x", "numbers": numbers, "bytes": 2 * numbers}]
    status, out, _ = run(capsys, "memory", "--model", "demo", "--adapter", "x=one")
    assert "adapter x: " in out
    status, _, err = run(capsys, "memory", "--model", "demo", "--adapter", "x=three")
    assert status != 0
    assert "adapter 'x' (three): no such directory; give the folder that PEFT's save_pretrained wrote" in err
