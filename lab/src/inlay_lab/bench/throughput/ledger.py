"""Cells that have been measured, kept in a file, so that a benchmark that was ended goes on where it was.

A line of JSON each: first the machine, then every cell under all that makes it what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from inlay import __version__
from inlay.errors import ParameterError

Cell = dict[str, Any]
#: What has to be the same for two cells to stand in one table.
_ALIKE = ("cpu", "threads", "torch", "transformers", "inlay")
#: What cells of older files do not say of their models, since all were loaded so.
_UNSAID = {"weights": "packed", "quantization": None, "kv_cache_dtype": "auto"}


class Ledger:
    """Cells by what was measured. Raises ParameterError for a file that is not its own, or of another machine.

    path: the file; None keeps nothing. machine: as ``describe_machine`` tells it.
    """

    def __init__(self, path: Path | None, machine: Mapping[str, Any]) -> None:
        self._cells: dict[str, Cell] = {}
        self._file: TextIO | None = None
        self._machine = {name: ({"inlay": __version__} | dict(machine))[name] for name in _ALIKE}
        if path is not None:
            try:
                self._open(path)
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise ParameterError(f"--out {path} cannot be used: {reason or error}") from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, about: Mapping[str, Any]) -> Cell | None:
        """The cell that was measured under just that, if one was."""
        return self._cells.get(_key(about))

    def put(self, about: Mapping[str, Any], cell: Cell) -> None:
        """Keep a cell."""
        self._cells[_key(about)] = cell
        self._write({"about": about, "cell": cell})

    def _open(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a program that was ended may have left half a line
        for number, line in enumerate((whole or text).splitlines(), start=1):
            self._read(line, f"{path}:{number}")
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(len(whole.encode()))
        if not whole:
            self._write({"machine": self._machine})

    def _read(self, line: str, place: str) -> None:
        try:
            entry = json.loads(line)
            machine = entry.get("machine", self._machine)
            if "machine" not in entry:
                self._cells[_key(entry["about"])] = dict(entry["cell"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ParameterError(
                f"{place}: this is no line of inlay bench throughput; give --out another file"
            ) from None
        if machine != self._machine:
            raise ParameterError(
                f"{place}: these cells were measured on {_words(machine)}, and this is {_words(self._machine)}; "
                "give --out another file"
            )

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(_UNSAID | dict(about), sort_keys=True)


def _words(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())
