"""Stored results are found under the same settings, machine and version only."""

from __future__ import annotations

import json

import pytest

from inlay.errors import ParameterError
from inlay_lab.reproduce.experiment import Scale
from inlay_lab.reproduce.record import Kept, Record

from .samples import MACHINE, experiment, outcome

SETTINGS = {"sizes": [1, 2], "model": "m"}
KEPT = Kept(outcome(), MACHINE, 12.5, "2026-01-31")


@pytest.fixture
def record(tmp_path):
    made = Record(tmp_path / "results", Scale.QUICK, MACHINE)
    made.keep(experiment(), SETTINGS, KEPT)
    return made


def test_result_is_read_back(record, tmp_path):
    assert record.find(experiment(), SETTINGS) == KEPT
    other = Record(tmp_path / "results", Scale.QUICK, MACHINE | {"load_1m": 9.0, "memory_gib": 8.0})
    assert other.find(experiment(), {"sizes": (1, 2), "model": "m"}) == KEPT
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["one.quick.json"]


def test_other_settings_names_and_scales_are_not_found(record, tmp_path):
    assert record.find(experiment(), SETTINGS | {"model": "n"}) is None
    assert record.find(experiment("two"), SETTINGS) is None
    assert Record(tmp_path / "results", Scale.FULL, MACHINE).find(experiment(), SETTINGS) is None


@pytest.mark.parametrize("name", ["cpu", "cpu_capability", "threads", "torch", "transformers"])
def test_result_of_another_machine_is_not_found(record, tmp_path, name):
    other = Record(tmp_path / "results", Scale.QUICK, MACHINE | {name: "another"})
    assert other.find(experiment(), SETTINGS) is None


def test_result_of_another_version_is_not_found(record, tmp_path, monkeypatch):
    monkeypatch.setattr("inlay_lab.reproduce.record.__version__", "99")
    assert Record(tmp_path / "results", Scale.QUICK, MACHINE).find(experiment(), SETTINGS) is None


def test_result_of_another_format_is_not_found(record):
    path = record.path(experiment())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    assert record.find(experiment(), SETTINGS) is None


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "it is not JSON"),
        (lambda text: text.replace('"ours": 3.0', '"ours": 30.0'), "its digest is another"),
        (lambda text: "[]", "AttributeError|TypeError"),
        (lambda text: "{}", "KeyError"),
        (lambda text: text.replace('"what"', '"that"'), "its digest is another"),
    ],
)
def test_damaged_file_is_ignored_with_a_warning(record, caplog, damage, told):
    path = record.path(experiment())
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert record.find(experiment(), SETTINGS) is None
    (message,) = caplog.messages
    assert "one.quick.json is damaged" in message
    assert "the experiment runs again" in message
    assert any(each in message for each in told.split("|"))


def test_unusable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match=r"--out: .*file/results cannot be made .*; give another folder"):
        Record(tmp_path / "file" / "results", Scale.QUICK, MACHINE)


def test_unwritable_file_is_one_sentence(record):
    record.path(experiment("two")).mkdir()
    with pytest.raises(ParameterError, match=r"two.quick.json cannot be written"):
        record.keep(experiment("two"), SETTINGS, KEPT)
