"""All errors that inlay raises on purpose.

InlayError
├── PMLError          a schema or a prompt is wrong; lists every problem with its place
├── ModelError        a model cannot be loaded, or does not support the request
├── ParameterError    an argument is out of range or unknown (also a ValueError)
│   ├── PolicyError     a field of the reuse policy is wrong; ``field`` names it
│   └── StructureError  no grammar can enforce structured_outputs
├── ContextError      a prompt does not fit into the model's context
├── CapacityError     the KV pool is too small for the request
│   ├── PinError      the pins exceed the pool or a tenant's budget
│   └── DeviceMemoryError  the device has no memory for a pass, beside the pool
├── QueueFullError    the queue is full
├── DeadlineError     a request had no answer by its deadline
├── AbortedError      a request was aborted while a caller waited for it
├── EngineDeadError   the engine has stopped after an internal error
├── BatchError        a file of requests cannot be run (inlay.batch)
└── LogError          a log of prompts cannot be read, or a line of it is no request (inlay.authoring.extract)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class PortableError(Exception):
    """An exception that can be pickled and copied, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[PortableError], args: tuple[Any, ...], state: dict[str, Any]) -> PortableError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InlayError(PortableError):
    """The base of all errors that inlay raises on purpose.

    Args:
        code: a stable name of the mistake, like "request.too_long". Programs and tests compare codes; the wording of
            messages may change. Without it, the class's own code.

    ``outputs`` is set if one of several prompts of a call failed. It holds a RequestOutput for each prompt, in order,
    with None for prompts without one.
    """

    code: str | None = "error"
    outputs: Sequence[Any] = ()

    def __init__(self, *args: Any, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


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
    """One problem with its place, the remedy, and a stable code like "pml.unknown_module"."""

    place: Place
    message: str
    code: str = "pml.invalid"

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class PMLError(InlayError):
    """A schema or prompt is wrong. ``problems`` holds every problem found, in order of appearance."""

    code = "pml.invalid"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
        if self.problems and self.problems[0].code != self.code:
            self.code = self.problems[0].code


class ModelError(InlayError):
    """A model cannot be loaded, or does not support the request."""

    code = "model.unusable"


class QueueFullError(InlayError):
    """The queue is full; try again later."""

    code = "engine.queue_full"


class AbortedError(InlayError):
    """A request was aborted while a caller waited for it."""

    code = "request.aborted"


class EngineDeadError(InlayError):
    """The engine has stopped after an internal error, which is in its log."""

    code = "engine.dead"


class DeadlineError(InlayError):
    """A request had no answer by its deadline."""

    code = "request.deadline"


class ParameterError(InlayError, ValueError):
    """An argument is out of range or unknown."""

    code: str | None = "parameter.invalid"


class PolicyError(ParameterError):
    """A field of a reuse policy is wrong.

    Args:
        field: its name, like "recompute".
    """

    code = "policy.unknown"

    def __init__(self, message: str, *, field: str, code: str) -> None:
        super().__init__(message, code=code)
        self.field = field


class StructureError(ParameterError):
    """No grammar can enforce ``structured_outputs``.

    Args:
        message: a sentence that names the field.
        reason: the part of the sentence after the field.
        place: the path of the wrong subschema in a JSON Schema; empty if it is unknown.
    """

    def __init__(
        self, message: str, reason: str = "", place: tuple[str | int, ...] = (), *, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.reason = reason
        self.place = place


class ContextError(InlayError):
    """A prompt does not fit into the model's context."""

    code = "request.too_long"


class CapacityError(InlayError):
    """The KV pool is too small for the request."""

    code = "engine.kv_memory"


class PinError(CapacityError):
    """The pins exceed the pool's limit or a tenant's budget."""

    code = "cache.pin_limit"


class DeviceMemoryError(CapacityError):
    """A device has no memory left for a pass, beside the pool."""

    code = "engine.device_memory"
