"""A file of measured cells, so that an interrupted benchmark can go on where it stopped.

The file is JSON lines: first the machine, then every cell with the settings that determine it.
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
#: Fields that must be equal for two cells to stand in one table.
_ALIKE = ("cpu", "threads", "torch", "transformers", "inlay")
#: Values of fields that older files lack: all models were loaded so then.
_UNSAID = {"weights": "packed", "quantization": None, "kv_cache_dtype": "auto"}


class Ledger:
    """Measured cells by their settings.

    Args:
        path: The file; None stores nothing.
        machine: The result of ``describe_machine``.

    Raises:
        ParameterError: The file is not a ledger, or is from another machine.
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
        """The cell measured with exactly these settings, or None."""
        return self._cells.get(_key(about))

    def put(self, about: Mapping[str, Any], cell: Cell) -> None:
        """Store a cell."""
        self._cells[_key(about)] = cell
        self._write({"about": about, "cell": cell})

    def _open(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # an interrupted program may have left half a line
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
