"""The index: every line at its place, in any order, and no contents of the lines."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import ParameterError
from inlay.batch import requests as module
from inlay.batch.requests import Index
from tests.raising import raises
from tests.system.batch.helpers import line, write


def quiet(stage, done: int, total: int) -> None: ...


def test_lines_are_indexed_and_read_again(tmp_path: Path):
    rows = [line("a", prompt="é"), "", "nonsense", line("b", prompt="x"), "  \t", json.dumps(line("c", prompt="y"))]
    path = write(tmp_path / "in", rows)
    path.write_bytes(path.read_bytes()[:-1])  # the last line without its end
    with Index(path, quiet) as index:
        assert index.requests == 4
        assert index.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        entries = list(index.missing())
        assert [(entry.line, entry.custom_id) for entry in entries] == [(1, "a"), (3, None), (4, "b"), (6, "c")]
        assert [entry.problem is None for entry in entries] == [True, False, True, True]
        assert [index.read(entry).body["prompt"] for entry in entries if not entry.problem] == ["é", "x", "y"]


@given(st.lists(st.tuples(st.binary(max_size=12), st.booleans()), min_size=1, max_size=30))
def test_order_is_by_key_and_then_by_line(keys):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "in", [line(str(number)) for number in range(len(keys))])
        with Index(path, quiet) as index:
            done = [number for number, (_, is_done) in enumerate(keys) if is_done]
            assert all(index.mark_done(number + 1, str(number)) for number in done)
            assert index.done == len(done)
            for entry in index.missing():
                index.place(entry, keys[entry.line - 1][0])
            left = [(key, number + 1) for number, (key, is_done) in enumerate(keys) if not is_done]
            assert [entry.line for entry in index.in_order()] == [number for _, number in sorted(left)]
            assert index.placed == len(left)


def test_done_lines_are_marked_once(tmp_path: Path):
    with Index(write(tmp_path / "in", [line("a"), "nonsense"]), quiet) as index:
        assert not index.mark_done(1, "b")
        assert not index.mark_done(3, None)
        assert index.mark_done(2, None)
        assert index.mark_done(1, "a")
        assert not index.mark_done(1, "a")
        assert list(index.missing()) == []


def test_overlong_line_is_a_problem_of_its_own(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr("inlay.batch.requests.MAX_LINE_BYTES", 200)
    path = write(tmp_path / "in", [line("a"), line("b", prompt="x" * 1000), line("c")])
    with Index(path, quiet) as index:
        entries = list(index.missing())
        assert [entry.custom_id for entry in entries] == ["a", None, "c"]
        assert "longer than 200 bytes" in str(entries[1].problem)
        assert index.read(entries[2]).custom_id == "c"
        assert index.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_file_changed_during_the_run_is_rejected(tmp_path: Path):
    path = write(tmp_path / "in", [line("a"), line("b")])
    with Index(path, quiet) as index:
        entries = list(index.missing())
        write(path, [line("a"), line("x")])
        assert index.read(entries[0]).custom_id == "a"
        with raises("batch.input_changed", ParameterError, names=":2:"):
            index.read(entries[1])


def test_unreadable_files_are_rejected(tmp_path: Path):
    packed = tmp_path / "in.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    os.mkfifo(tmp_path / "pipe")
    for path, sentence in (
        (tmp_path / "none", "none: no such file; check the path"),
        (tmp_path, "is no regular file, and must be read twice; write the requests to a file"),
        (tmp_path / "pipe", "is no regular file, and must be read twice"),
        (packed, r"is compressed; decompress it first"),
        (write(tmp_path / "empty", ["", " "]), "empty: holds no requests; write one a line"),
        (write(tmp_path / "twice", [line("a"), "x", line("b"), line("a")]), ":4: the custom_id 'a' is that of line 1"),
    ):
        with pytest.raises(ParameterError, match=sentence):
            Index(path, quiet)
