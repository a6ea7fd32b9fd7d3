"""Stored results: a JSON file for each experiment and scale, with the conditions of the measurement.

A file is used if settings, machine and versions are equal and its digest is right. Otherwise the experiment runs again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inlay import __version__
from inlay.errors import ParameterError
from inlay.strict_json import JSONError, read_json
from inlay.whole_file import replace_file
from inlay_lab.reproduce.experiment import Data, Experiment, Outcome, Scale, Settings

logger = logging.getLogger(__name__)

FORMAT = 1
_MOST_BYTES = 64 * 2**20  # of a file
_MACHINE = ("cpu", "cpu_capability", "threads", "torch", "transformers")


@dataclass(frozen=True)
class Kept:
    """A stored result.

    Attributes:
        conditions: The machine and its load.
        took_s: Seconds of the measurement.
        on: The day, in UTC.
    """

    outcome: Outcome
    conditions: Data
    took_s: float
    on: str


class Record:
    """The results of one scale in a folder.

    Args:
        machine: The result of ``describe_machine``. Its main fields and inlay's version must match a stored result.
        make: Create the folder if needed.

    Raises:
        ParameterError: The folder cannot be created.
    """

    def __init__(self, folder: Path, scale: Scale, machine: Mapping[str, Any], *, make: bool = True) -> None:
        self._folder, self._scale = folder, scale
        self._machine = {"inlay": __version__} | {name: machine[name] for name in _MACHINE}
        try:
            if make:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError(f"--out: {folder} cannot be made ({error.strerror}); give another folder") from None

    def path(self, experiment: Experiment) -> Path:
        """The file of an experiment."""
        return self._folder / f"{experiment.name}.{self._scale}.json"

    def find(self, experiment: Experiment, settings: Settings) -> Kept | None:
        """The stored result of an experiment with these settings, or None.

        A damaged file counts as none, with a warning.
        """
        path = self.path(experiment)
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is larger than any result")
            found = read_json(path.read_bytes(), max_depth=64)
        except FileNotFoundError:
            return None
        except (OSError, JSONError, ValueError) as error:
            _warn(path, error)
            return None
        try:
            digest = found.pop("sha256")
            if found["format"] != FORMAT or found["of"] != self._of(experiment, settings):
                return None  # of another version, machine or setting
            if digest != _digest(found):
                raise ValueError("its digest is another")
            return Kept(Outcome.read(found["outcome"]), found["conditions"], float(found["took_s"]), str(found["on"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _warn(path, error)
            return None

    def keep(self, experiment: Experiment, settings: Settings, kept: Kept) -> None:
        """Write a result atomically. Raises ParameterError."""
        found = {"format": FORMAT, "of": self._of(experiment, settings), **asdict(kept)}
        found = json.loads(json.dumps(found))  # tuples become lists, as they will be read
        found["sha256"] = _digest(found)
        path = self.path(experiment)
        try:
            replace_file(path, f"{json.dumps(found, indent=1)}\n".encode())
        except OSError as error:
            raise ParameterError(
                f"--out: {path} cannot be written ({error.strerror}); make room, or give another folder"
            ) from None

    def _of(self, experiment: Experiment, settings: Settings) -> Data:
        """Everything that a result depends on."""
        of = {"experiment": experiment.name, "scale": self._scale, "settings": dict(settings), "machine": self._machine}
        plain: Data = json.loads(json.dumps(of))
        return plain


def _digest(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _warn(path: Path, error: Exception) -> None:
    logger.warning("%s is damaged (%s: %s); the experiment runs again", path, type(error).__name__, error)
