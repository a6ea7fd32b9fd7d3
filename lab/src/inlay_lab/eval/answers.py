"""A file of a run's answers. A run that was interrupted or extended asks only the missing cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from inlay.errors import ParameterError
from inlay_lab.eval.modular_cases import Round

Row = dict[str, Any]


def case_keys(each: Round) -> list[str]:
    """Digests that identify the cases of a round in any run: of the schema, the prompt and the right answer."""
    texts = [document.text for document in each.documents]
    instructions = [(form.value, text) for form, text in each.instructions.items()]
    schema = sha256(json.dumps([each.system, instructions, texts]).encode())
    keys = []
    for case in each.cases:
        digest = schema.copy()
        digest.update(json.dumps([case.imported, case.form.value, case.question, case.answer]).encode())
        keys.append(digest.hexdigest()[:24])
    return keys


class AnswerLog:
    """Answers in a file of JSON lines, by mode and case. The first line describes the run.

    Args:
        path: Created if it does not exist. None stores nothing.
        of: Everything else that answers depend on: the model and its form.

    Raises:
        ParameterError: The file is from another run, damaged, or cannot be written.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any]) -> None:
        self._found: dict[tuple[str, str], Row] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read(dict(of)) if path.exists() else 0
            self._file = path.open("a", encoding="utf-8", newline="\n")
            self._file.truncate(whole)  # an interrupted run may leave half a line
            if whole == 0:
                self._write([dict(of)])
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, mode: Mapping[str, Any], keys: Sequence[str]) -> list[Row] | None:
        """The answers of a mode to some cases, or None if any is missing."""
        rows = [self._found.get((_named(mode), key)) for key in keys]
        return None if None in rows else [row for row in rows if row is not None]

    def add(self, mode: Mapping[str, Any], keys: Sequence[str], rows: Sequence[Row]) -> None:
        """Store the answers of a mode to some cases. Raises ParameterError if the file cannot be written."""
        try:
            self._write([{"mode": dict(mode), "case": key, **row} for key, row in zip(keys, rows, strict=True)])
        except OSError as error:
            raise self._refused(error) from None

    def _write(self, lines: Sequence[Row]) -> None:
        if self._file is not None:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()

    def _read(self, of: Row) -> int:
        """Read the answers; returns the bytes of whole lines."""
        whole = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    key = None if number == 1 else (_named(row.pop("mode")), row.pop("case"))
                except (ValueError, KeyError, AttributeError, TypeError):
                    raise ParameterError(f"{self._path}:{number} is damaged; delete the file to ask anew") from None
                if key is not None:
                    self._found[key] = row
                elif row != of:
                    told = f"is of {json.dumps(row)}, not of {json.dumps(of)}"
                    raise ParameterError(f"{self._path} {told}; give another directory, or delete the file")
                whole += len(line)
        return whole

    def _refused(self, error: OSError) -> ParameterError:
        return ParameterError(f"{self._path}: cannot be written ({error.strerror}); give another directory")


def _named(mode: Mapping[str, Any]) -> str:
    return json.dumps(sorted(mode.items()))
