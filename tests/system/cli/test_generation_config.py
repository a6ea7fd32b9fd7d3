"""``--generation-config``: sampling defaults from the checkpoint, where neither command nor request sets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay.cli import main as command_line
from tests.conftest import tiny
from tests.model.sampling.test_defaults import SAID
from tests.system.batch.helpers import bodies, write
from tests.system.cli.test_serve import client, started

pytestmark = pytest.mark.long


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    tiny("llama").model.save_pretrained("checkpoint")
    tiny("llama").tokenizer.save_pretrained("checkpoint")
    Path("checkpoint/generation_config.json").write_text(json.dumps(SAID))
    return "checkpoint"


def command(capsys, *arguments: str, status: int = 0) -> tuple[str, str]:
    assert command_line.main(list(arguments)) == status
    out, err = capsys.readouterr()
    return out, err


def test_run(checkpoint: str, capsys):
    Path("s.xml").write_text('<schema name="s">In front.</schema>')
    Path("p.xml").write_text('<prompt schema="s">Well?</prompt>')

    def answer(*options: str) -> Any:
        words = ("run", "s.xml", "--prompt", "p.xml", "--model", checkpoint, "--max-tokens", "20", "--json")
        return json.loads(command(capsys, *words, *options)[0])["token_ids"]

    penalised, plain = answer(), answer("--generation-config", "off")
    assert penalised == answer("--temperature", "0") == answer("--generation-config", "auto")
    assert len(set(penalised)) == len(penalised)
    assert plain == answer("--generation-config", "off", "--temperature", "0")
    assert len(set(plain)) < len(plain), "random weights repeat themselves where nothing is in the way"
    assert answer("--temperature", "2") != penalised


def test_batch(checkpoint: str, capsys):
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    body = {"prompt": "Hello", "max_tokens": 9}
    write(Path("in"), [{**row, "body": body}])
    write(Path("said"), [{**row, "body": {**body, "temperature": 0, "repetition_penalty": 50}}])

    def answer(source: str, target: str, *options: str) -> str:
        command(capsys, "batch", source, target, "--model", checkpoint, "--kv-memory", "16MiB", *options)
        return bodies(Path(target))["a"]["choices"][0]["text"]

    auto = answer("in", "out")
    assert auto == answer("said", "expected", "--generation-config", "off")
    assert auto != answer("in", "plain", "--generation-config", "off")
    _, err = command(capsys, "batch", "in", "out", "--model", checkpoint, "--generation-config", "off", status=2)
    assert "out: holds answers of another generation config; give another output, or delete it and out.state" in err
    _, err = command(capsys, "batch", "in", "none", "--model", checkpoint, "--generation-config", "on", status=2)
    assert "generation-config is 'on'; use one of auto, off" in err


def test_serve(checkpoint: str):
    options = ("--port", "0", "--kv-memory", "16MiB", "--generation-config", "off")
    with started(checkpoint, *options) as (_, _, port):
        (model,) = client(port).models.list()
        assert model.model_dump()["default_sampling_params"] == {}
