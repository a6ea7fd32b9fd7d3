"""Writes the files of a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inlay.errors import ParameterError


def write_texts(folder: Path, texts: Mapping[str, str], option: str = "--report") -> None:
    """Write files into an existing folder, by name. Raises ParameterError that names the option."""
    for name, text in texts.items():
        try:
            (folder / name).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"{option} {folder / name} cannot be written: {error.strerror}") from None
