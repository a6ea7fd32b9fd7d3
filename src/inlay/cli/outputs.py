"""Files that commands write what they found to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from inlay.errors import ParameterError


def check_outputs(paths: Iterable[Path | None], force: bool) -> None:
    """Before the work begins: raises ParameterError where a file exists, unless ``force``, or has no folder."""
    for path in paths:
        if path is not None and path.exists() and not force:
            raise ParameterError(f"{path} exists; choose another name, or overwrite it with --force")
        if path is not None and not path.parent.is_dir():
            raise ParameterError(f"{path}: there is no folder {path.parent}; make it first")


@contextmanager
def output_file(path: Path) -> Iterator[TextIO]:
    """The file, opened to be written anew as UTF-8. Raises ParameterError where the system refuses."""
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file
    except OSError as error:
        raise ParameterError(f"{path}: cannot be written ({error.strerror}); give another path") from None
