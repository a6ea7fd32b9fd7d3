"""docs/guides/clusters.md: its file is read, its commands run, its traces are replayed, its tables are complete."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from inlay.cli.main import main
from inlay.cluster.routing import RouterCollector, RouterCounts
from inlay.cluster.settings import ClusterSettings, RouterPart
from tests.pages import DOCS, blocks, rows

PAGE = DOCS / "guides/clusters.md"
STATE = dict.fromkeys(("replicas", "stalled", "keys", "dropped_keys", "imbalance"), 0.0)


def test_cluster_file_is_valid():
    (block,) = [block for block in blocks(PAGE) if block.language == "yaml"]
    settings = ClusterSettings.of(yaml.safe_load(block.text))
    assert (settings.replicas.min, settings.replicas.max, settings.router.bound) == (1, 4, 1.25)
    assert set(yaml.safe_load(block.text)) | {"name", "route_prefix"} == set(ClusterSettings.model_fields)


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(DOCS.parent)
    lines = [line for block in blocks(PAGE) if block.language == "sh" for line in block.text.splitlines()]
    run = []
    for line in lines:
        name, *arguments = shlex.split(line)
        if name == "inlay":
            run.append(arguments[0])
            less = {"deploy": ["--dry-run"], "simulate": ["--requests", "200"]}[arguments[0]]
            assert main([*arguments, *less]) == 0
    assert run == ["deploy", "simulate"]
    assert "import_path: inlay.cluster.application:build" in capsys.readouterr().out


def test_traces_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (block,) = [block for block in blocks(PAGE) if block.language == "json"]
    path = tmp_path / "trace.jsonl"
    path.write_text(block.text)
    assert main(["simulate", str(path), "--replicas", "2", "--router", "module", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["requests"] == 2


def test_every_setting_of_the_router_has_a_row():
    table = rows(PAGE, "setting of `router`", "default", "")
    named = {name.strip("`"): default.strip("`") for name, default, _ in table}
    fields = {name: str(field.default) for name, field in RouterPart.model_fields.items()}
    assert {name: _plain(value) for name, value in named.items()} == {n: _plain(value) for n, value in fields.items()}


def test_every_metric_of_the_router_has_a_row():
    table = rows(PAGE, "metric", "type", "what it says")
    named = {(name.strip("`"), kind) for name, kind, _ in table}
    sent = set()
    for metric in RouterCollector(RouterCounts(), lambda: STATE).collect():
        sent.add((metric.name + ("_total" if metric.type == "counter" else ""), metric.type))
    assert named == sent


def _plain(value: str) -> str:
    return value.removesuffix(".0")
