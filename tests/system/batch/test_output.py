"""The output: resumed wherever it ended, and never mixed with another batch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import ParameterError
from inlay.api.failures import Failure
from inlay.batch import BatchCounts
from inlay.batch.output import Output
from inlay.batch.requests import Entry, Index
from tests.raising import raises
from tests.system.batch.helpers import line, read, write

SETTINGS = {"seed": 0, "reuse policy": "anchored"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in", [line("a"), line("b"), "nonsense", line("é")])


def quiet(stage, done: int, total: int) -> None: ...


def fill(
    source: Path, target: Path, model: bytes = b"m", settings=SETTINGS, most: int = 9
) -> tuple[list[int], BatchCounts]:
    """Write what is missing; returns the lines that were, and the counts."""
    counts = BatchCounts()
    with Index(source, quiet) as index, Output(target, index, settings, counts) as output:
        output.begin(model)
        missing = list(index.missing())[:most]
        for entry in missing:
            if entry.problem:
                output.refuse_line(entry, Failure(400, "wrong"))
            elif entry.custom_id == "b":
                output.refuse(entry, Failure(404, "wrong"))
            else:
                output.answer(entry, {"text": "é\n"})
                counts.answered += 1
    return [entry.line for entry in missing], counts


def test_rows_have_openais_form(source: Path, tmp_path: Path):
    done, counts = fill(source, tmp_path / "out")
    assert done == [1, 2, 3, 4]
    assert (counts.answered, counts.failed, counts.done_before) == (2, 2, 0)
    first, second, third, fourth = read(tmp_path / "out")
    assert first == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": {"text": "é\n"}},
        "error": None,
    }
    error = {"message": "wrong", "type": "invalid_request_error", "param": None, "code": None}
    assert second["response"] == {"status_code": 404, "request_id": "batch_req_2", "body": {"error": error}}
    assert (third["custom_id"], third["response"], third["error"]) == (None, None, error)
    assert fourth["custom_id"] == "é"
    assert fill(source, tmp_path / "out")[0] == []


@given(cut=st.integers(0, 700))
def test_truncated_output_is_completed_without_repeats(cut: int, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    source = write(folder / "in", [line("a"), line("b"), "nonsense", line("é")])
    fill(source, folder / "out")
    whole = (folder / "out").read_bytes()
    (folder / "out").write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    done, counts = fill(source, folder / "out")
    assert done == [1, 2, 3, 4][kept:]
    assert (folder / "out").read_bytes() == whole
    assert (counts.done_before, counts.answered, counts.failed) == (kept, 2, 2)


def test_removed_row_is_answered_again(source: Path, tmp_path: Path):
    fill(source, tmp_path / "out")
    rows = (tmp_path / "out").read_text().splitlines(keepends=True)
    (tmp_path / "out").write_text("".join(rows[:1] + rows[2:]))
    assert fill(source, tmp_path / "out")[0] == [2]


def test_output_of_another_batch_is_rejected(source: Path, tmp_path: Path):
    target = tmp_path / "out"
    fill(source, target, most=1)
    before = target.read_bytes()
    other = write(tmp_path / "other", [line("a"), line("b"), "nonsense", line("é"), line("more")])
    for arguments, what in (
        ((other, target), "another input"),
        ((source, target, b"n"), "another model or dtype"),
        ((source, target, b"m", {**SETTINGS, "seed": 1}), "another seed"),
        ((source, target, b"m", {**SETTINGS, "reuse policy": "off"}), "another reuse policy"),
    ):
        with raises("batch.other_output", ParameterError, names=what):
            fill(*arguments)
    assert target.read_bytes() == before
    assert fill(source, target)[0] == [2, 3, 4]


def test_batch_without_answers_does_not_bind_its_output(source: Path, tmp_path: Path):
    fill(source, tmp_path / "out", b"another", {**SETTINGS, "seed": 12345}, most=0)
    assert (tmp_path / "out.state").stat().st_size
    assert fill(source, tmp_path / "out", most=1)[0] == [1]
    assert fill(source, tmp_path / "out")[0] == [2, 3, 4]


@pytest.mark.parametrize(
    "row",
    [
        "nonsense",
        "{}",
        '{"id": "batch_req_9", "custom_id": "a", "response": null}',
        '{"id": "batch_req_1", "custom_id": "b", "response": null}',
        '{"id": "batch_req_99999999999999999999", "custom_id": "b", "response": null}',
        '{"id": 1, "custom_id": "b", "response": null}',
    ],
)
def test_foreign_rows_are_rejected(source: Path, tmp_path: Path, row: str):
    fill(source, tmp_path / "out", most=1)
    whole = (tmp_path / "out").read_text() + row + "\n"
    (tmp_path / "out").write_text(whole)
    with raises("batch.other_output", ParameterError, names="out:2:"):
        fill(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == whole


def test_existing_files_are_not_overwritten(source: Path, tmp_path: Path):
    (tmp_path / "out").write_text("precious\n")
    with raises("batch.other_output", ParameterError, names="out.state"):
        fill(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious\n"
    assert not (tmp_path / "out.state").exists()
    (tmp_path / "out").write_text("")
    assert fill(source, tmp_path / "out")[0] == [1, 2, 3, 4]
    (tmp_path / "out.state").write_text("precious")
    with raises("batch.damaged_state", ParameterError) as caught:
        fill(source, tmp_path / "out")
    assert "out.state" in str(caught.value)
    assert (tmp_path / "out.state").read_text() == "precious"


def test_unwritable_paths_are_rejected(source: Path, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for target, sentence in (
        (source, "in: is the input itself; give the output another name"),
        (tmp_path / "none" / "out", "there is no folder"),
        (tmp_path / "folder", "is no regular file; give the output another name"),
    ):
        with pytest.raises(ParameterError, match=sentence):
            fill(source, target)
    assert json.loads(source.read_text().splitlines()[0])["custom_id"] == "a"


def test_unused_output_files_are_removed(source: Path, tmp_path: Path):
    with Index(source, quiet) as index, Output(tmp_path / "out", index, SETTINGS, BatchCounts()):
        assert (tmp_path / "out.state").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_second_process_on_one_output_is_rejected(source: Path, tmp_path: Path):
    with Index(source, quiet) as index, Output(tmp_path / "out", index, SETTINGS, BatchCounts()) as first:
        with raises("batch.output_in_use", ParameterError):
            Output(tmp_path / "out", index, SETTINGS, BatchCounts())
        first.begin(b"m")
        first.answer(Entry(1, 0, 0, "a", None), {})
    assert fill(source, tmp_path / "out")[0] == [2, 3, 4]


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch):
    with Index(source, quiet) as index, Output(tmp_path / "out", index, SETTINGS, BatchCounts()) as output:
        output.begin(b"m")
        output.answer(Entry(1, 0, 0, "a", None), {})
        with open("/dev/full", "wb", buffering=0) as full:
            write_to = os.write
            monkeypatch.setattr(os, "write", lambda file, data: write_to(full.fileno(), data))
            with raises("batch.unwritable_output", ParameterError, names="No space left on device"):
                output.answer(Entry(2, 0, 0, "b", None), {})
            monkeypatch.undo()
    assert fill(source, tmp_path / "out")[0] == [2, 3, 4]


def test_only_failed_requests_are_retried(source: Path, tmp_path: Path):
    target = tmp_path / "out"
    fill(source, target)
    first, _, _, last = read(target)
    with (
        Index(source, quiet) as index,
        Output(target, index, SETTINGS, counts := BatchCounts(), retry_failed=True) as output,
    ):
        output.begin(b"m")
        assert [entry.line for entry in index.missing()] == [2, 3]
        assert (counts.answered, counts.failed, counts.done_before) == (2, 0, 2)
    assert read(target) == [first, last]
    assert fill(source, target)[0] == [2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "out.state"}


def test_retry_of_another_batch_is_rejected(source: Path, tmp_path: Path):
    target = tmp_path / "out"
    fill(source, target)
    before = target.read_bytes()
    with Index(source, quiet) as index, raises("batch.other_output", ParameterError):
        Output(target, index, SETTINGS | {"seed": 1}, BatchCounts(), retry_failed=True)
    assert target.read_bytes() == before
