"""Replacing a file is atomic: readers see the old or the new content."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from inlay.whole_file import replace_file


@pytest.mark.parametrize("durable", [True, False])
def test_new_file_is_whole_without_leftovers(tmp_path, durable):
    path = tmp_path / "keys.json"
    for data in (b"first", b"second, longer"):
        replace_file(path, data, durable=durable, keep_owner=True)
        assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failed_replacement_keeps_the_old_file(tmp_path, monkeypatch, name):
    path = tmp_path / "keys.json"
    replace_file(path, b"first")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["keys.json"]


def test_owner_of_the_file_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    path.write_bytes(b"first")
    given = []
    monkeypatch.setattr(os, "fchown", lambda handle, user, group: given.append((user, group)))
    replace_file(path, b"second")
    assert not given
    replace_file(path, b"third", keep_owner=True)
    assert given == [(path.stat().st_uid, path.stat().st_gid)]
    replace_file(tmp_path / "new.json", b"first", keep_owner=True)
    assert len(given) == 1
