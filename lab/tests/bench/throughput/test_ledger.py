"""Cells in a file are stored, found again, and never mixed with those of another run."""

from __future__ import annotations

import json

import pytest

from inlay import __version__
from inlay.errors import ParameterError
from inlay_lab.bench.throughput.ledger import Ledger

MACHINE = {"cpu": "A chip", "threads": 2, "torch": "2", "transformers": "5", "load_1m": 3.5}
ABOUT = {"part": "prefix", "prefix": 512, "rate": None, "column": "inlay"}


def test_cells_are_read_back(tmp_path):
    file = tmp_path / "cells.jsonl"
    with Ledger(file, MACHINE) as ledger:
        assert ledger.get(ABOUT) is None
        ledger.put(ABOUT, {"wall_s": 1.5})
        assert file.read_text().count("\n") == 2, "a cell is in the file as soon as it is known"
        ledger.put(ABOUT | {"prefix": 0}, {"skipped": "no room"})
    with Ledger(file, MACHINE | {"load_1m": 0.1}) as ledger:
        assert ledger.get(dict(reversed(ABOUT.items()))) == {"wall_s": 1.5}
        assert ledger.get(ABOUT | {"prefix": 0}) == {"skipped": "no room"}
        assert ledger.get(ABOUT | {"batch": 1}) is None
        ledger.put(ABOUT, {"wall_s": 2.5})
    assert Ledger(file, MACHINE).get(ABOUT) == {"wall_s": 2.5}
    first = json.loads(file.read_text().splitlines()[0])
    assert first == {"machine": {**{name: MACHINE[name] for name in ("cpu", "threads", "torch", "transformers")},
                                 "inlay": __version__}}  # fmt: skip


def test_cells_without_loading_fields_mean_defaults(tmp_path):
    """Older files lack these fields; all models were loaded that way then."""
    file = tmp_path / "cells.jsonl"
    with Ledger(file, MACHINE) as ledger:
        ledger.put(ABOUT, {"wall_s": 1.5})
    with Ledger(file, MACHINE) as ledger:
        loaded = {"weights": "packed", "quantization": None}
        assert ledger.get(ABOUT | loaded) == {"wall_s": 1.5}
        assert ledger.get(ABOUT | loaded | {"quantization": "int8"}) is None
        assert ledger.get(ABOUT | loaded | {"weights": "stock"}) is None


def test_ledger_without_a_file_keeps_nothing_afterwards():
    with Ledger(None, MACHINE) as ledger:
        ledger.put(ABOUT, {"wall_s": 1.5})
        assert ledger.get(ABOUT) == {"wall_s": 1.5}
    assert Ledger(None, MACHINE).get(ABOUT) is None


def test_truncated_line_is_overwritten(tmp_path):
    file = tmp_path / "cells.jsonl"
    for prefix in (0, 1, 2):
        with Ledger(file, MACHINE) as ledger:
            assert [ledger.get(ABOUT | {"prefix": n}) is not None for n in range(3)] == [n < prefix for n in range(3)]
            ledger.put(ABOUT | {"prefix": prefix}, {"wall_s": 1.5})
        with file.open("a") as torn:
            torn.write('{"about": {"part": "pré')


@pytest.mark.parametrize("text", ["notes\n", "notes", "[1]\n", "{}\n", '{"about": {}, "cell": 3}\n', "\xff\xfe"])
def test_foreign_file_is_not_changed(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ParameterError, match=r"notes\.txt.*(no line of inlay bench|it is no text)"):
        Ledger(file, MACHINE)
    assert file.read_bytes() == text.encode("latin-1")


def test_cells_of_another_machine_are_rejected(tmp_path):
    file = tmp_path / "cells.jsonl"
    Ledger(file, MACHINE)
    with pytest.raises(
        ParameterError, match=r"cells\.jsonl:1: .* on cpu A chip, threads 2, .* this is cpu A chip, threads 8"
    ):
        Ledger(file, MACHINE | {"threads": 8})


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ParameterError, match=r"--out .*cells\.jsonl cannot be used: No such file or directory"):
        Ledger(tmp_path / "nowhere" / "cells.jsonl", MACHINE)
    with pytest.raises(ParameterError, match="cannot be used: Is a directory"):
        Ledger(tmp_path, MACHINE)
