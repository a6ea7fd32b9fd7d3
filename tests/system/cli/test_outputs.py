"""Files that commands write: each is refused in one sentence, and only for reasons of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from inlay import ParameterError
from inlay.cli.output import check_outputs, output_file, stdout_console


def test_text_is_written_unchanged(tmp_path: Path):
    with output_file(tmp_path / "new.txt") as write:
        write("één\r\n")
        write("two\n")
    assert (tmp_path / "new.txt").read_bytes() == "één\r\ntwo\n".encode()


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 300, "File name too long"), (".", "Is a directory"), ("/dev/full", "No space left")]
)
def test_system_errors_are_one_sentence(tmp_path: Path, name: str, reason: str):
    path = tmp_path / name
    check_outputs((path, None), force=True)
    with (
        pytest.raises(ParameterError, match=rf"cannot be written \({reason}.*\); give another path"),
        output_file(path) as write,
    ):
        write("text")


def break_off(path: Path) -> None:
    with output_file(path) as write:
        write("before")
        raise ConnectionResetError


def test_errors_of_the_work_are_raised_unchanged(tmp_path: Path):
    with pytest.raises(ConnectionResetError):
        break_off(tmp_path / "new.txt")
    assert (tmp_path / "new.txt").read_text() == "before"


def test_piped_table_is_not_truncated(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(box=None)
    for column in range(40):
        table.add_column(f"column {column}")
    table.add_row(*["anchored+profiled:0.15"] * 40)
    stdout_console().print(table, markup=False)
    said = capsys.readouterr().out
    assert said.count("anchored+profiled:0.15") == 40
    assert len(said.splitlines()) == 2
