"""The benchmark's published files: rows of JSON, templates and limits."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from inlay.errors import ParameterError
from inlay.strict_json import JSONError, read_json
from inlay.wording import clip, listed, shown
from inlay_lab.eval.longbench.datasets import DATASETS, Dataset
from inlay_lab.eval.longbench.metrics import NUMBERED

_OWN = Path(__file__).with_name("templates.json")
_TEMPLATES, _LIMITS = "dataset2prompt.json", "dataset2maxlen.json"
_FIELDS = ("context", "input")
_LONGEST_ANSWER = 50_000  # characters of a right answer: comparing takes steps by the product of both word counts
_MOST_TOKENS = 100_000  # of an answer
_GET = "get it with: hf download THUDM/LongBench data.zip --repo-type dataset --local-dir longbench, and unzip it there"


@dataclass(frozen=True)
class Sample:
    """One row.

    Attributes:
        name: Its ``_id``, or its line number.
        answers: The answers that count as right.
        classes: All possible answers of a classification task.
    """

    name: str
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """The text before and behind the context. None stands for the input."""

    before: tuple[str | None, ...]
    behind: tuple[str | None, ...]

    @classmethod
    def parse(cls, written: str) -> Template:
        """Parse a template in the syntax of ``str.format``. Raises ValueError unless it has exactly one context."""
        parts: tuple[list[str | None], list[str | None]] = ([], [])
        contexts = 0
        for text, field, form, conversion in string.Formatter().parse(written):
            side = parts[min(contexts, 1)]
            if text:
                side.append(text)
            if field is not None and (field not in _FIELDS or form or conversion):
                raise ValueError(f"it has the field {{{clip(field)}}}")
            if field == "input":
                side.append(None)
            contexts += field == "context"
        if contexts != 1:
            raise ValueError(f"it has {contexts} places for the context")
        return cls(tuple(parts[0]), tuple(parts[1]))

    def around(self, sample: Sample) -> tuple[str, str]:
        """The text before and behind a sample's context."""
        before, behind = (
            "".join(sample.input if part is None else part for part in side) for side in (self.before, self.behind)
        )
        return before, behind


@dataclass(frozen=True)
class Suite:
    """The measured datasets of a folder.

    Attributes:
        files, templates, limits: By dataset, in the benchmark's order. Limits are tokens of an answer.
        own: Datasets with a template of our own.
        unlimited: Datasets without a limit in the folder.
        absent: Datasets that the folder lacks.
    """

    folder: Path
    files: Mapping[str, Path]
    templates: Mapping[str, Template]
    limits: Mapping[str, int]
    own: tuple[str, ...]
    unlimited: tuple[str, ...]
    absent: tuple[str, ...]

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        return tuple(DATASETS[name] for name in self.files)

    def samples(self, dataset: Dataset, most: int | None = None) -> Iterator[Sample]:
        """Yield the first ``most`` rows of a dataset. Raises ParameterError with the line of a bad row."""
        path = self.files[dataset.name]
        try:
            with path.open("rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                for number, line in islice(lines, most):
                    yield _sample(dataset, f"{path}:{number}", line, str(number))
        except OSError as error:
            raise ParameterError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def open_suite(folder: Path, names: Sequence[str] | None = None) -> Suite:
    """Open a folder with ``NAME.jsonl`` in it or its ``data``, and ``config`` in it or beside it. Raises
    ParameterError.

    Args:
        names: Datasets; None for all in the folder.
    """
    for name in names or ():
        if name not in DATASETS:
            raise ParameterError(f"datasets is {clip(name)!r}; use some of {', '.join(DATASETS)}")
    if not folder.is_dir():
        raise ParameterError(f"--data {folder}: there is no such folder; {_GET}")
    paths = {name: path for name in DATASETS if (path := _there(folder, name)) is not None}
    absent = tuple(name for name in names or DATASETS if name not in paths)
    if names is not None and absent:
        raise ParameterError(f"--data {folder} has no {absent[0]}.jsonl, nor has its data folder; {_GET}")
    if not paths:
        raise ParameterError(f"--data {folder} has none of the benchmark's files, such as qasper.jsonl; {_GET}")
    files = {name: path for name, path in paths.items() if names is None or name in names}
    written, limits = _configuration(folder, _TEMPLATES), _configuration(folder, _LIMITS)
    return Suite(
        folder=folder,
        files=files,
        templates={name: _template(folder, name, written) for name in files},
        limits={name: _limit(folder, name, limits) for name in files},
        own=tuple(name for name in files if name not in written),
        unlimited=tuple(name for name in files if name not in limits),
        absent=absent,
    )


def _there(folder: Path, name: str) -> Path | None:
    return next((path for place in (folder, folder / "data") if (path := place / f"{name}.jsonl").is_file()), None)


def _configuration(folder: Path, name: str) -> dict[str, Any]:
    """A configuration file of the benchmark; empty if missing."""
    for place in (folder, folder.resolve().parent):
        path = place / "config" / name
        if path.is_file():
            return _object(path)
    return {}


@cache
def _own_templates() -> dict[str, Any]:
    return _object(_OWN)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path.read_bytes())
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    except JSONError as error:
        raise ParameterError(f"{path}: {_told(error)}; get it anew, or delete it") from None
    if not isinstance(value, dict):
        raise ParameterError(f"{path} holds {shown(value, kind=True)}; it must be an object, by the names of datasets")
    return value


def _template(folder: Path, name: str, written: Mapping[str, Any]) -> Template:
    text = written.get(name, _own_templates()[name])
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is {shown(text, kind=True)}")
        return Template.parse(text)
    except ValueError as error:
        told = "a text with {context} once, and {input} where the question goes"
        raise ParameterError(
            f"{_TEMPLATES} of {folder} has no template for {name} ({error}); it must be {told}"
        ) from None


def _limit(folder: Path, name: str, limits: Mapping[str, Any]) -> int:
    limit = limits.get(name, DATASETS[name].max_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST_TOKENS:
        raise ParameterError(
            f"{_LIMITS} of {folder} has {shown(limit)} for {name}; it must be a number of tokens, 1 to {_MOST_TOKENS:,}"
        )
    return limit


def _sample(dataset: Dataset, place: str, line: bytes, number: str) -> Sample:
    try:
        row = read_json(line)
    except JSONError as error:
        raise ParameterError(f"{place}: {_told(error)}; get the file anew") from None
    if not isinstance(row, dict):
        raise ParameterError(f"{place} holds {shown(row, kind=True)}; it must be an object, as published")
    answers = _texts(place, row, "answers")
    if not answers:
        raise ParameterError(f"{place}: answers is empty; a row needs one that counts as right")
    if any(len(answer) > _LONGEST_ANSWER for answer in answers):
        raise ParameterError(f"{place}: an answer has more than {_LONGEST_ANSWER:,} characters; take the row out")
    pattern = NUMBERED.get(dataset.metric)
    if pattern is not None and not all(re.search(pattern, answer) for answer in answers):
        raise ParameterError(f"{place}: answers are {listed(answers)}; they must name a number, like {pattern}")
    classes = _texts(place, row, "all_classes") if dataset.metric == "classification" else ()
    name = row.get("_id")
    return Sample(
        name=name if isinstance(name, str) and name else number,
        context=_text(place, row, "context"),
        input=_text(place, row, "input"),
        answers=answers,
        classes=classes,
    )


def _text(place: str, row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ParameterError(f"{place}: {field} is {shown(value, kind=True)}; it must be a text")
    return value


def _texts(place: str, row: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = row.get(field)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ParameterError(f"{place}: {field} is {shown(value, kind=True)}; it must be a list of texts")
    return tuple(value)


def _told(error: JSONError) -> str:
    return error.fault.value + (f" ({clip(error.detail)})" if error.detail else "")
