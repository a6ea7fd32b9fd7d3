"""--quantization, where commands take it."""

from __future__ import annotations

import json

import pytest

from tests.commands import run

SCHEMA = '<schema name="s"><module name="a">Some words.</module></schema>'


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.xml").write_text(SCHEMA)
    (tmp_path / "p.xml").write_text('<prompt schema="s"><a/>And then?</prompt>')


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_run(quantization, capsys):
    words = ["--quantization", quantization, "--max-tokens", "4", "--json"]
    status, out, _ = run(capsys, "run", "s.xml", "--prompt", "p.xml", *words)
    assert status == 0
    assert json.loads(out)["cached_tokens"] > 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", ["run s.xml --prompt p.xml", "eval modular-qa --questions 2"])
def test_unknown_quantization_is_rejected(command, capsys):
    status, _, err = run(capsys, *command.split(), "--quantization", "int2")
    assert status != 0
    assert "quantization is 'int2'; use one of int8, int4, or None" in err
