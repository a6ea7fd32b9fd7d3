"""The transport between an ingress and its replicas, and the plain data that it carries beside requests and events."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from inlay.errors import InlayError
from inlay.kv.changes import StoreChanges
from inlay.kv.identity import KeyMaker
from inlay.models.lora import AdapterInfo
from inlay.prompt.model_info import ModelInfo
from inlay.types import EngineStats, TierStats

_LOOK_S = 1.0  # interval of the check in next_item


class ReplicaLostError(InlayError):
    """The replica that a call went to has gone, or cannot be reached."""


class Transport(Protocol):
    """Calls to EngineHosts by the replica's name. Used on one event loop."""

    def answer(self, request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        """Call ``EngineHost.answer`` of the replica that ``Routing.choose`` names, and report it to ``Routing.routed``.

        Closing the generator cancels the request on the replica. Raises ReplicaLostError.
        """
        ...

    def encode(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Call ``EngineHost.encode`` of one replica. Raises ReplicaLostError."""
        ...

    async def call(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of one replica's EngineHost. Raises ReplicaLostError, also on a timeout."""
        ...


async def next_item(items: AsyncGenerator[bytes, None], check: Callable[[], None]) -> bytes | None:
    """Return the next item of a call, or None at its end.

    Args:
        check: Called every second without an item. It raises to stop the wait.

    Raises:
        ReplicaLostError: If the call was cancelled from outside.
        Exception: Errors of the call and of ``check``.
    """
    coming = asyncio.ensure_future(anext(items, None))
    try:
        while not coming.done():
            await asyncio.wait((coming,), timeout=_LOOK_S)
            if not coming.done():
                check()
    finally:
        if not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
    if coming.cancelled():
        raise ReplicaLostError("its call was cancelled", code="cluster.call_cancelled")
    return coming.result()


VERSION = 6


@dataclass(frozen=True, slots=True)
class Description:
    """A replica's description of its model. With it, an ingress prepares requests without the weights.

    Args:
        name: Name of the model.
        note: See LoadedModel.
        defaults: See ``AsyncLLM.sampling_defaults``.
        adapters: The adapters that requests may name. Their digests are in ``info``.
    """

    name: str
    note: str | None
    info: ModelInfo
    defaults: dict[str, Any]
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "name": self.name,
            "note": self.note,
            "defaults": self.defaults,
            **{name: getattr(self.info, name) for name in _INFO},
            "keys": asdict(self.info.keys),
            "adapters": {name: (digest, asdict(self.adapters[name])) for name, digest in self.info.adapters.items()},
        }

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Description:
        """Read a description. Raises InlayError for another version."""
        if said.get("version") != VERSION:
            raise InlayError(
                f"a replica speaks version {said.get('version')!r:.40} and this ingress version {VERSION}; run the "
                "same inlay on all nodes",
                code="cluster.other_version",
            )
        digests = {name: digest for name, (digest, _) in said["adapters"].items()}
        info = ModelInfo(keys=KeyMaker(**said["keys"]), adapters=digests, **{name: said[name] for name in _INFO})
        adapters = {name: AdapterInfo(**one) for name, (_, one) in said["adapters"].items()}
        return cls(said["name"], said["note"], info, dict(said["defaults"]), adapters)


_INFO = (
    *("vocab_size", "max_positions", "bytes_per_token", "why_not_shift", "why_unshared", "why_exact", "limit"),
    *("text_model", "recurrent", "first_tokens", "pool_tokens"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a replica: its statistics, and the changes in its store.

    Results of shadow sampling are not sent.
    """

    stats: EngineStats
    changes: StoreChanges

    def to_dict(self) -> dict[str, Any]:
        changes = self.changes
        return {
            "stats": asdict(replace(self.stats, shadow=None)),
            "epoch": changes.epoch,
            "first": changes.first,
            "last": changes.last,
            "whole": changes.whole,
            "added": _bytes(changes.added),
            "removed": _bytes(changes.removed),
            "below": None if changes.below is None else _bytes(changes.below),
        }

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Status:
        stats = said["stats"]
        changes = StoreChanges(
            said["epoch"],
            said["first"],
            said["last"],
            _array(said["added"]),
            _array(said["removed"]),
            None if said["below"] is None else _array(said["below"]),
            said["whole"],
        )
        tiers = {name: _tier(stats[name]) for name in ("host", "disk", "shared")}
        return cls(EngineStats(**{**stats, **tiers}), changes)


def summed(each: Sequence[EngineStats]) -> EngineStats:
    """Sum the statistics of several engines. ``write_lag_s`` is the largest, ``token_s`` a mean. Tiers are left out."""
    sums: dict[str, Any] = {
        one.name: sum(getattr(stats, one.name) for stats in each)
        for one in fields(EngineStats)
        if one.type in ("int", "float")
    }
    sums["write_lag_s"] = max((one.write_lag_s for one in each), default=0.0)
    measured = [one.token_s for one in each if one.token_s is not None]
    sums["token_s"] = sum(measured) / len(measured) if measured else None
    return EngineStats(**sums, busy=any(one.busy for one in each))


def _tier(said: dict[str, Any] | None) -> TierStats | None:
    return None if said is None else TierStats(**{**said, "misses": tuple(tuple(one) for one in said["misses"])})


def _bytes(keys: array[int]) -> bytes:
    return keys.tobytes()


def _array(data: bytes) -> array[int]:
    keys = array("Q")
    keys.frombytes(data)
    return keys
