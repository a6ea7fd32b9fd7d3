"""Schemas that outlive an ingress, and that several share."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from inlay.cluster.schema_folder import SchemaFolder
from inlay.errors import ParameterError
from inlay.server.schema_record import KeptSchema, SchemaVersion
from tests.raising import raises

FIRST = KeptSchema(
    "docs", None, "pml", "<schema name='docs'>ä</schema>", "modular", None, (SchemaVersion(1, 1.5, "aa"),)
)
SECOND = replace(FIRST, versions=(*FIRST.versions, SchemaVersion(2, 2.5, "bb")))


def test_kept_schemas_are_read_by_the_next_folder(tmp_path: Path):
    one = SchemaFolder(tmp_path / "schemas")
    assert one.keep(FIRST)
    assert one.keep(replace(FIRST, salt="ann"))
    other = SchemaFolder(tmp_path / "schemas")
    assert other.changed()
    assert sorted(other.all(), key=lambda kept: kept.salt or "") == [FIRST, replace(FIRST, salt="ann")]
    assert not other.changed()
    assert os.stat(tmp_path / "schemas").st_mode & 0o77 == 0


def test_change_is_noticed_by_other_processes_only(tmp_path: Path):
    one, other = SchemaFolder(tmp_path), SchemaFolder(tmp_path)
    one.all(), other.all()
    assert one.keep(FIRST)
    assert (one.changed(), other.changed()) == (False, True)
    assert other.all() == [FIRST]
    assert other.keep(SECOND)
    assert (one.changed(), other.changed()) == (True, False)
    assert one.all() == [SECOND]
    assert one.drop(SECOND)
    assert other.all() == []


def test_second_change_of_one_version_is_rejected(tmp_path: Path):
    one, other = SchemaFolder(tmp_path), SchemaFolder(tmp_path)
    assert one.keep(FIRST)
    assert not other.keep(replace(FIRST, versions=(SchemaVersion(1, 9.0, "cc"),)))  # made at the same time
    assert one.keep(SECOND)
    assert not other.keep(replace(FIRST, versions=(*FIRST.versions, SchemaVersion(2, 9.0, "cc"))))
    assert not other.drop(FIRST)
    assert one.drop(SECOND)
    assert not other.keep(replace(SECOND, versions=(*SECOND.versions, SchemaVersion(3, 9.0, "dd"))))
    assert one.all() == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"version": 9}'])
def test_damaged_file_is_skipped_with_a_warning(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture):
    folder = SchemaFolder(tmp_path)
    folder.keep(FIRST)
    folder.keep(replace(FIRST, name="other"))
    paths = sorted(tmp_path.glob("*.json"))
    whole = json.loads(paths[0].read_text())["name"]
    paths[0].write_bytes(damage)
    assert [kept.name for kept in folder.all()] == [{"docs": "other", "other": "docs"}[whole]]
    assert "is left out" in caplog.text


def test_changed_text_counts_as_damage(tmp_path: Path):
    folder = SchemaFolder(tmp_path)
    folder.keep(FIRST)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text().replace("modular", "exact"))
    assert folder.all() == []


def test_unusable_folder_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises("cluster.unusable_folder", ParameterError, names="file"):
        SchemaFolder(tmp_path / "file")
