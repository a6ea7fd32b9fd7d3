"""All errors that inlay raises on purpose.

InlayError
├── PMLError          a schema or a prompt is wrong; lists every problem with its place
├── ModelError        a model cannot be loaded, or does not support the request
├── ParameterError    an argument is out of range or unknown (also a ValueError)
├── ContextError      a prompt does not fit into the model's context
├── CapacityError     the KV pool is too small for the request
│   ├── PinError      the pins exceed the pool or a tenant's budget
│   └── DeviceMemoryError  the device has no memory for a pass, beside the pool
├── QueueFullError    the queue is full
├── DeadlineError     a request had no answer by its deadline
├── AbortedError      a request was aborted while a caller waited for it
├── EngineDeadError   the engine has stopped after an internal error
├── ForkedError       an engine is used in a process that was forked from its own
├── BatchError        a file of requests cannot be run (inlay.batch)
└── LogError          a log of prompts cannot be read, or a line of it is no request (inlay.advice.extract)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def reduce_error(error: Exception) -> tuple[Any, ...]:
    """``__reduce__`` for pickle and copy of errors with constructor arguments other than the message."""
    return _remade, (type(error), error.args, error.__dict__)


def _remade(kind: type[Exception], args: tuple[Any, ...], state: Mapping[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InlayError(Exception):
    """The base of all errors that inlay raises on purpose.

    ``outputs`` is set if one of several prompts of a call failed. It holds a RequestOutput for each prompt, in order,
    with
    None for prompts without one.
    """

    outputs: Sequence[Any] = ()

    __reduce__ = reduce_error


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a source (file name or label), with line and column from 1 if known."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its place and the remedy."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class PMLError(InlayError):
    """A schema or prompt is wrong. ``problems`` holds every problem found, in order of appearance."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ModelError(InlayError):
    """A model cannot be loaded, or does not support the request."""


class QueueFullError(InlayError):
    """The queue is full; try again later."""


class AbortedError(InlayError):
    """A request was aborted while a caller waited for it."""


class EngineDeadError(InlayError):
    """The engine has stopped after an internal error, which is in its log."""


class ForkedError(InlayError):
    """An engine is used in a process that was forked from the one that made it."""

    @classmethod
    def check(cls, pid: int) -> None:
        """Raise unless ``pid`` is this process. Threads do not survive a fork, so a child would wait forever."""
        if os.getpid() != pid:
            raise cls(
                f"this engine was made by process {pid}, and process {os.getpid()} was forked from it; make a new LLM "
                "behind the fork, or start processes with multiprocessing's 'spawn'"
            )


class DeadlineError(InlayError):
    """A request had no answer by its deadline."""


class ParameterError(InlayError, ValueError):
    """An argument is out of range or unknown."""


class ContextError(InlayError):
    """A prompt does not fit into the model's context."""


class CapacityError(InlayError):
    """The KV pool is too small for the request."""


class PinError(CapacityError):
    """The pins exceed the pool's limit or a tenant's budget."""


class DeviceMemoryError(CapacityError):
    """A device has no memory left for a pass, beside the pool."""
