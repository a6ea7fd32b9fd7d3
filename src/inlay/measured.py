"""Measurements of policies, in a file for each model fingerprint, and the policy that they choose for ``auto``.

``inlay check`` measures, and so does a server in idle time (engine/background/policy_meter.py).

A damaged file or one of a newer version is reported and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

from inlay.config import EngineConfig
from inlay.engine.background.policy_meter import PolicyMeter, suffices
from inlay.models.fingerprint import cache_root
from inlay.pml import Schema
from inlay.policy import ReusePolicy
from inlay.prompt.model_info import ModelInfo
from inlay.tolerance import Measured, Tolerance
from inlay.whole_file import replace_file

VERSION = 2  # of the file
_UNPRIMED = 1  # the version whose rows of modular were measured without a primer
_MOST_BYTES = 16 << 20
_GENERAL = ""  # the key of generated prompts, in place of a schema's digest
_NUMBERS = tuple(each.name for each in fields(Measured) if each.name not in ("policy", "positions"))
_PERHAPS = ("same", "same_low", "ttft_ms")  # may be None
_ALIKE = "dtype and quantization"
_MOST_TOLD = 100  # sentences, because requests bring tolerances

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurements:
    """The measurements of one model.

    Args:
        fingerprint: of the model.
        path: of the file. None without a home directory.
        rows: schema digest → results, "" for generated prompts.
        problem: the reason for ignoring the file, or None.
        newer: True if the file is of a newer version.
    """

    fingerprint: bytes
    path: Path | None
    rows: dict[str, tuple[Measured, ...]] = field(default_factory=dict)
    problem: str | None = None
    newer: bool = False

    @classmethod
    def of(cls, fingerprint: bytes) -> Measurements:
        """Read the file of a model."""
        root = cache_root()
        path = None if root is None else root / "checks" / f"{fingerprint.hex()[:32]}.json"
        if path is None:
            return cls(fingerprint, path)
        try:
            with path.open("rb") as file:
                rows = _read(json.loads(file.read(_MOST_BYTES)), fingerprint)
        except (FileNotFoundError, NotADirectoryError):
            return cls(fingerprint, path)
        except OSError as error:
            why = error.strerror or error
            return cls(fingerprint, path, problem=f"{path} cannot be read ({why}): what was measured is not known")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            newer = isinstance(error, _NewerError)
            what = f"is of version {error}, which this inlay does not know," if newer else "is damaged"
            problem = f"{path} {what} and is ignored: what was measured is not known"
            return cls(fingerprint, path, problem=problem, newer=newer)
        return cls(fingerprint, path, rows)

    def about(self, schema: Schema | None) -> tuple[Measured, ...]:
        """Return the results for a schema, or else those for generated prompts."""
        general = self.rows.get(_GENERAL, ())
        if schema is None or not any(self.rows):  # no schema was measured
            return general
        return self.rows.get(schema.digest, general)

    def with_rows(self, schema: Schema | None, rows: Sequence[Measured]) -> Measurements:
        """Return these measurements with further results, as ``keep`` saves them."""
        key = _GENERAL if schema is None else schema.digest
        known = {(row.policy, row.positions): row for row in self.rows.get(key, ())}
        for row in rows:
            before = known.get((row.policy, row.positions))
            fewer = before is not None and before.prompts > row.prompts
            if not fewer and (before is None or before.same is None or row.same is not None):
                known[row.policy, row.positions] = row
        return replace(self, rows={**self.rows, key: tuple(known.values())})

    def keep(self, schema: Schema | None, rows: Sequence[Measured]) -> str | None:
        """Save the results for a schema, or for generated prompts. Returns the reason for a failure, or None.

        A row replaces an earlier row of the same policy. The earlier row stays if it has more prompts, or if only it
        has shares of equal answers.
        """
        now = Measurements.of(self.fingerprint)  # another process may have written
        if now.path is None:
            return "there is no home directory; set INLAY_CACHE_ROOT to a folder"
        if now.newer:
            return f"{now.path} was written by a newer inlay; use that, or delete the file"
        try:
            _write(now.path, self.fingerprint, now.with_rows(schema, rows).rows)
        except OSError as error:
            return f"{now.path} cannot be written ({error.strerror}); set INLAY_CACHE_ROOT to a folder where you may"
        return None


def lacks_measurements(model: ModelInfo, config: EngineConfig) -> bool:
    """Return True if an engine should compare policies by itself: ``measure`` allows it, and results are missing."""
    may = config.measure == "auto" and config.profile == "auto" and _differing(config) is None
    if not may or model.highest is not None:
        return False
    return not suffices(Measurements.of(model.measured_as(None)).about(None))


class AutoReuse:
    """Resolves ``auto`` on one model. The file is read on first use.

    Args:
        name: of the model, for messages.
        meter: compares policies in idle time. None for none.
    """

    def __init__(self, name: str, model: ModelInfo, config: EngineConfig, meter: PolicyMeter | None = None) -> None:
        self._meter = meter
        self._learned = 0  # the version of its results
        self._lock = Lock()
        self._name = name
        self._model = model
        self._config = config
        self._default = Tolerance.parse(config.tolerance)
        self._known: dict[bytes, Measurements] = {}  # by fingerprint: adapters have their own
        self._told: set[str] = set()

    def rows(self, schema: Schema | None = None, adapter: str | None = None) -> tuple[Measured, ...]:
        """Return the results for a schema, or else for generated prompts, that hold with this engine's settings."""
        self._learn()
        rows = () if self._differs() else self._measured(adapter).about(schema)
        return rows if self._config.profile == "auto" else tuple(row for row in rows if not _profiled(row))

    def tolerating(self, policy: ReusePolicy) -> ReusePolicy:
        """Return the policy, with the engine's tolerance if it is ``auto`` without one."""
        return policy.tolerating(self._default)

    def resolve(
        self, policy: ReusePolicy, schema: Schema | None = None, adapter: str | None = None, *, new: bool = False
    ) -> ReusePolicy:
        """Return the policy under which a request for ``policy`` runs. Only ``auto`` changes.

        Args:
            schema: of their prompts, or None.
            adapter: the adapter that answers, or None.
            new: True if the schema was just added, which logs its policy again.
        """
        if policy.tolerance is None:
            return policy
        policy = self.tolerating(policy)
        rows = self.rows(schema, adapter)
        taken = policy.resolved(rows, self._model.why_not_shift)
        of = "" if schema is None else f" for schema '{schema.name}'"
        self._tell(f"reuse '{policy}' is '{taken}'{of}", policy.tolerance, rows, taken, adapter, new=new)
        return taken

    def _tell(
        self,
        what: str,
        within: Tolerance | None,
        rows: Sequence[Measured],
        taken: ReusePolicy,
        adapter: str | None,
        *,
        new: bool,
    ) -> None:
        """Log the chosen policy and the reason, each sentence once, and again for a new schema."""
        assert within is not None
        say: Callable[..., None] = logger.warning
        row = taken.settled(self._model.why_not_shift).row(rows)
        if differs := self._differs():
            why = f"what is measured on a model does not hold with {differs}"
        elif row is not None and within.allows(row):
            say, why = logger.info, f"it was measured to be within {within.in_words}"
        elif rows:
            say, why = logger.info, f"nothing that computes less was measured to be within {within.in_words}"
        else:
            problem = self._measured(adapter).problem
            whose = self._name if adapter is None else f"{self._name} with adapter '{adapter}'"
            missing = f"nothing was measured on {whose}" if problem is None else problem
            alike = "dtype, quantization and kv-cache-dtype" if self._config.kv_cache_dtype != "auto" else _ALIKE
            why = f"{missing}; run 'inlay check {self._name}' once, with the same {alike}"
            if adapter is not None:
                why = f"{missing}, and 'inlay check' measures models without adapters alone"
        said = f"{what}: {why}"
        if new or (said not in self._told and len(self._told) < _MOST_TOLD):
            self._told.add(said)
            say("%s", said)
        if len(self._told) > _MOST_TOLD:  # new schemas add to it without bound
            self._told.clear()

    def _measured(self, adapter: str | None) -> Measurements:
        fingerprint = self._model.measured_as(adapter)
        if fingerprint not in self._known:
            self._known[fingerprint] = Measurements.of(fingerprint)
        return self._known[fingerprint]

    def _learn(self) -> None:
        """Save the meter's results if they are new."""
        if self._meter is None or self._meter.version == self._learned:
            return
        with self._lock:
            version, rows = self._meter.version, self._meter.rows()
            if version == self._learned:
                return
            self._learned = version
            known = self._measured(None)
            problem = known.keep(None, rows)
            self._known[known.fingerprint] = known.with_rows(None, rows)
        count = max(row.prompts for row in rows)
        logger.info("policies were compared with full prefill on %d requests in idle time", count)
        if problem is not None:
            logger.warning("the comparison is lost when this process ends: %s", problem)

    def _differs(self) -> str | None:
        return _differing(self._config)


def _differing(config: EngineConfig) -> str | None:
    """Return the setting that makes modules another approximation than was measured, or None."""
    for name in ("placeholders", "store_codec"):
        value = getattr(config, name)
        if value != getattr(EngineConfig, name):
            return f"{name} '{value}'"
    return None


def _profiled(row: Measured) -> bool:
    """Return True if a row was measured with deviation profiles."""
    policy = ReusePolicy.named(row.policy)
    return policy is not None and policy.profiled


class _NewerError(ValueError):
    """The file is of a newer version."""


def _read(document: Any, fingerprint: bytes) -> dict[str, tuple[Measured, ...]]:
    """Return the rows of a file. A damaged one raises ValueError, KeyError, TypeError or AttributeError."""
    version = document["version"]
    if isinstance(version, int) and version > VERSION:
        raise _NewerError(version)
    rows = document["rows"]
    if version not in (_UNPRIMED, VERSION) or document != _document(fingerprint, rows, version):
        raise ValueError("the checksum differs")
    found = {str(key): tuple(map(_row, of_schema)) for key, of_schema in rows.items()}
    if version == _UNPRIMED:
        return {key: tuple(row for row in of_schema if not _best(row)) for key, of_schema in found.items()}
    return found


def _best(row: Measured) -> bool:
    """Return True if a row is of a ``modular`` policy."""
    policy = ReusePolicy.named(row.policy)
    return policy is not None and policy.best


def _row(written: dict[str, Any]) -> Measured:
    row = Measured(**written)
    for name in _NUMBERS:
        value = getattr(row, name)
        if not (isinstance(value, int | float) and math.isfinite(value)) and not (value is None and name in _PERHAPS):
            raise ValueError(name)
    policy = ReusePolicy.named(row.policy)
    return row if policy is None else replace(row, policy=str(policy))  # its present key


def _document(fingerprint: bytes, rows: dict[str, Any], version: int = VERSION) -> dict[str, Any]:
    document = {"version": version, "fingerprint": fingerprint.hex(), "rows": rows}
    return {**document, "sha256": hashlib.sha256(json.dumps(document).encode()).hexdigest()}


def _write(path: Path, fingerprint: bytes, rows: dict[str, tuple[Measured, ...]]) -> None:
    """Replace the file as a whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = {key: [asdict(row) for row in of_schema] for key, of_schema in rows.items()}
    replace_file(path, json.dumps(_document(fingerprint, written)).encode(), durable=False)
