"""The schemas of one model while it runs: made known, encoded ahead, and forgotten, which ends their encoding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from inlay.client import EngineClient
from inlay.errors import AbortedError, InlayError, ParameterError
from inlay.kv.identity import SegmentSpec
from inlay.pml import Schema
from inlay.policy import ReusePolicy
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.limits import check_lengths
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.registry import PUBLIC
from inlay.prompt.request import EncodeRequest


class SchemaManager:
    """Knows which schemas are being encoded, so that none goes on that is not known any more. Any thread may ask."""

    def __init__(self, processor: PromptProcessor, client: EngineClient) -> None:
        self._processor = processor
        self._client = client
        self._lock = threading.Lock()  # of which schemas are known, and which of them are being encoded
        self.encodings: dict[EncodeRequest, tuple[SchemaLayout, str]] = {}  # of which schema, and whose that is
        # By the name of a schema, whose that is, and who has pinned it.
        self._pins: dict[tuple[str, str, str], _Pinned] = {}

    def add(
        self,
        schema: Schema,
        policy: ReusePolicy,
        salt: str = "",
        *,
        replace: bool = False,
        adapter: str | None = None,
        ttl_s: float | None = None,
    ) -> tuple[SchemaLayout, list[SegmentSpec]]:
        """Make a schema known; returns its layout and the segments that can be encoded beforehand.

        replace: whether it may take the name of another one. adapter: what these are encoded with.
        ttl_s: see KnownSchema. Raises ParameterError and PMLError.
        """
        if not isinstance(schema, Schema):
            raise ParameterError(f"add_schema takes an inlay.Schema, not {type(schema).__name__}")
        processor = self._processor
        processor.model.adapter(adapter)  # what is unknown is said before anything is known
        layout = processor.schemas.lay_out(schema, salt)
        check_lengths(layout, processor.model.max_positions)
        with self._lock:
            known = processor.schemas.get(schema.name, salt)
            if not replace and known is not None and not _same(known.layout.schema, schema):
                raise ParameterError(
                    f"there is another schema '{schema.name}'; give replace=True to put this one in its place, or name "
                    "it differently"
                )
            processor.schemas.add(layout, salt, ttl_s)
            self._end_encodings()
        return layout, processor.schemas.all_specs(layout, policy, salt, adapter)

    def remove(self, name: str, salt: str = "") -> bool:
        """Forget a schema; returns whether there was one. Requests under way go on; its encoding ends."""
        with self._lock:
            known = self._processor.schemas.remove(name, salt) is not None
            self._end_encodings()
        return known

    def encoding(
        self,
        layout: SchemaLayout,
        specs: Sequence[SegmentSpec],
        *,
        salt: str = "",
        adapter: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> EncodeRequest:
        """The encoding of a schema, which ends when that is removed or replaced. Raises AbortedError if it was."""
        model = self._processor.model
        moves = model.why_not_shift is None
        # No prompt reads what lies beyond the context.
        useful = [spec for spec in specs if moves or spec.end <= model.max_positions]
        name = f"schema '{layout.schema.name}'"
        known = self._processor.schemas.get(layout.schema.name, salt)
        of_job: dict[str, Any] = {"adapter": adapter, "tenant": tenant, "weight": weight}
        of_job["ttl_s"] = None if known is None else known.ttl_s
        encoding = self._processor.encoding(name, useful, salt, **of_job)
        with self._lock:
            if not self._knows(layout, salt):
                raise removed(encoding)
            self.encodings[encoding] = layout, salt
        return encoding

    def pin(self, segments: EncodeRequest, name: str, salt: str, owner: str, budget: int | None) -> Future[int]:
        """Pin segments of a schema in place of those that the owner has pinned of it; see EngineClient.pin.

        ``pinned`` or ``unpin_segments`` is to follow when it has ended.
        """
        known = self._processor.schemas.find(name, salt)
        with self._lock:
            before = None if known is None else self._pins.get((name, known.owner, owner))
        instead = None if before is None else before.segments.request_id
        return self._client.pin(segments, owner, segments.request_id, budget, instead=instead)

    def pinned(self, segments: EncodeRequest, name: str, salt: str, owner: str) -> None:
        """Note that an owner has pinned segments of a schema: they are let go when it is removed or replaced."""
        known = self._processor.schemas.find(name, salt)
        with self._lock:
            if known is None or not self._knows(known.layout, known.owner):
                self.unpin_segments(segments, owner)
                raise removed(segments)
            before = self._pins.get((name, known.owner, owner))
            keys = {spec.lossless.key for spec in segments.specs}
            self._pins[name, known.owner, owner] = _Pinned(segments, known.layout, keys)
            if before is not None:  # by this pin, if it was there when this one was asked for
                self.unpin_segments(before.segments, owner)

    def unpinned(self, name: str, salt: str, owner: str) -> EncodeRequest | None:
        """What an owner has pinned of a schema, which it has no more; None for nothing."""
        with self._lock:
            for whose in dict.fromkeys((salt, PUBLIC)):
                if (pinned := self._pins.pop((name, whose, owner), None)) is not None:
                    return pinned.segments
        return None

    def evict(self, segments: EncodeRequest) -> Future[int]:
        """Forget segments; see EngineClient.evict. What is evicted of a pin is pinned no more; the rest stays."""
        future = self._client.evict(segments)
        gone = {spec.lossless.key for spec in segments.specs}
        with self._lock:
            for pin, pinned in list(self._pins.items()):
                pinned.whole = pinned.whole and pinned.keys.isdisjoint(gone)
                pinned.keys -= gone
                if not pinned.keys:
                    del self._pins[pin]
        return future

    def has_pinned(self, name: str, salt: str, owner: str) -> bool:
        """Whether an owner has pinned a schema, or some of its modules, and nothing of that was evicted since."""
        pinned = self._pins.get((name, salt, owner))
        return pinned is not None and pinned.whole

    def unpin_segments(self, segments: EncodeRequest, owner: str) -> None:
        """Let one pin of an owner's go, if there is such a one."""
        with suppress(InlayError):  # the engine may have been shut down meanwhile
            self._client.unpin(segments, owner, segments.request_id)

    def ended(self, encoding: EncodeRequest, *, complete: bool) -> None:
        """Forget an encoding that is over; its profile is made where it came to its end."""
        if self.encodings.pop(encoding, None) is not None and complete and len(encoding.specs) > 1:
            with suppress(InlayError):  # the engine may have been shut down meanwhile
                self._client.profile(encoding.specs)

    def _end_encodings(self) -> None:
        """Give up the encodings and the pins of schemas that are not known any more."""
        for (name, salt, owner), pinned in list(self._pins.items()):
            if not self._knows(pinned.layout, salt):
                del self._pins[name, salt, owner]
                self.unpin_segments(pinned.segments, owner)
        for encoding, (layout, salt) in list(self.encodings.items()):
            if not self._knows(layout, salt):
                with suppress(InlayError):  # the engine may have been shut down meanwhile
                    self._client.abort(encoding.request_id)

    def _knows(self, layout: SchemaLayout, salt: str) -> bool:
        """Whether a name still means this schema, laid out now or, by somebody who added it too, at the same time."""
        known = self._processor.schemas.layout(layout.schema.name, salt)
        return known is not None and known.schema is layout.schema


@dataclass(eq=False, slots=True)
class _Pinned:
    """What an owner has pinned of a schema, laid out so.

    keys: of those segments that have not been evicted since. whole: whether that is all.
    """

    segments: EncodeRequest
    layout: SchemaLayout
    keys: set[bytes]
    whole: bool = True


def _same(one: Schema, other: Schema) -> bool:
    """Whether two schemas say the same, wherever they were read."""
    return one is other or one.to_json() == other.to_json()


def removed(encoding: EncodeRequest) -> AbortedError:
    """What ends the encoding of a schema that is not known any more."""
    return AbortedError(f"{encoding.name} was removed or replaced while it was encoded; what is encoded stays")
