"""The schemas of a running model: registration, encoding, pins and removal."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from inlay.client.engine import Engine
from inlay.client.local import InProcessClient
from inlay.errors import AbortedError, InlayError, ParameterError
from inlay.kv.identity import SegmentSpec, owner_label
from inlay.pml import Schema
from inlay.policy import ReusePolicy
from inlay.prompt.contexts import PUBLIC, labels_of_schema
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.model_info import check_lengths
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.request import EncodeRequest
from inlay.types import EVERYONE, Scope


class SchemaManager:
    """Tracks encodings and pins of schemas, and ends those of removed schemas. Thread-safe.

    Args:
        local: the engine of this process, whose cache profiles and pins. None for engines of other processes, which
            profile by themselves.
    """

    def __init__(self, processor: PromptProcessor, client: Engine, local: InProcessClient | None) -> None:
        self._processor = processor
        self._client = client
        self._local = local
        self._lock = threading.Lock()  # guards known schemas and their encodings
        self.encodings: dict[EncodeRequest, tuple[SchemaLayout, str]] = {}  # the schema and its owner
        # By name of the schema, its owner, and the owner of the pin.
        self._pins: dict[tuple[str, str, str], _Pinned] = {}

    def add(
        self,
        schema: Schema,
        policy: ReusePolicy,
        scope: Scope = EVERYONE,
        *,
        replace: bool = False,
        ttl_s: float | None = None,
    ) -> tuple[SchemaLayout, list[SegmentSpec]]:
        """Register a schema; returns its layout and the segments that can be encoded ahead.

        Args:
            replace: if True, another schema of this name may be replaced.
            ttl_s: see KnownSchema.

        Raises:
            ParameterError, PMLError: for a wrong argument or schema.
        """
        if not isinstance(schema, Schema):
            raise ParameterError(
                f"add_schema takes an inlay.Schema, not {type(schema).__name__}", code="parameter.wrong_type"
            )
        processor, salt = self._processor, scope.cache_salt
        processor.model.adapter(scope.adapter)  # reject an unknown adapter before registration
        layout = processor.schemas.lay_out(schema, salt)
        check_lengths(layout, processor.model.max_positions)
        with self._lock:
            known = processor.schemas.get(schema.name, salt)
            if not replace and known is not None and not _same(known.layout.schema, schema):
                raise ParameterError(
                    f"there is another schema '{schema.name}'; give replace=True to put this one in its place, or name "
                    "it differently",
                    code="schema.duplicate_name",
                )
            processor.schemas.add(layout, salt, ttl_s)
            self._end_encodings()
        return layout, processor.schemas.all_specs(layout, policy, scope)

    def remove(self, name: str, salt: str = "") -> bool:
        """Remove a schema; returns False if there was none. Running requests continue, and its encoding ends."""
        with self._lock:
            known = self._processor.schemas.remove(name, salt) is not None
            self._end_encodings()
        return known

    def encoding(self, layout: SchemaLayout, specs: Sequence[SegmentSpec], scope: Scope = EVERYONE) -> EncodeRequest:
        """Return the encoding request of a schema. Raises AbortedError if the schema was removed or replaced."""
        model, salt = self._processor.model, scope.cache_salt
        moves = model.why_not_shift is None
        # No prompt reads segments beyond the context.
        useful = [spec for spec in specs if moves or spec.end <= model.max_positions]
        name = f"schema '{layout.schema.name}'"
        known = self._processor.schemas.get(layout.schema.name, salt)
        encoding = self._processor.encoding(name, useful, scope, ttl_s=None if known is None else known.ttl_s)
        with self._lock:
            if not self._knows(layout, salt):
                raise removed(encoding)
            self.encodings[encoding] = layout, salt
        return encoding

    def pin(self, local: InProcessClient, segments: EncodeRequest, name: str, budget: int | None) -> Future[int]:
        """Pin segments of a schema for their scope, replacing its earlier pin; see InProcessClient.pin.

        The caller must call ``pinned`` or ``unpin_segments`` when it has ended.
        """
        owner, known = segments.scope.pin_owner, self._processor.schemas.find(name, segments.scope.cache_salt)
        with self._lock:
            before = None if known is None else self._pins.get((name, known.owner, owner))
        instead = None if before is None else before.segments.request_id
        return local.pin(segments, owner, segments.request_id, budget, instead=instead)

    def pinned(self, segments: EncodeRequest, name: str) -> None:
        """Record the pin of a schema, so that it is removed with the schema."""
        owner, known = segments.scope.pin_owner, self._processor.schemas.find(name, segments.scope.cache_salt)
        with self._lock:
            if known is None or not self._knows(known.layout, known.owner):
                self.unpin_segments(segments)
                raise removed(segments)
            before = self._pins.get((name, known.owner, owner))
            keys = {spec.lossless.key for spec in segments.specs}
            self._pins[name, known.owner, owner] = _Pinned(segments, known.layout, keys)
            if before is not None:  # the new pin has replaced it unless it came later
                self.unpin_segments(before.segments)

    def unpinned(self, name: str, scope: Scope) -> EncodeRequest | None:
        """Forget and return the pinned segments of a schema; None for none."""
        with self._lock:
            for whose in dict.fromkeys((scope.cache_salt, PUBLIC)):
                if (pinned := self._pins.pop((name, whose, scope.pin_owner), None)) is not None:
                    return pinned.segments
        return None

    def evict(self, segments: EncodeRequest) -> Future[int]:
        """Evict segments; see Engine.forget. Pins lose the evicted segments and keep the rest."""
        future = self._client.forget(segments)
        gone = {spec.lossless.key for spec in segments.specs}
        with self._lock:
            for pin, pinned in list(self._pins.items()):
                specs = pinned.segments.specs
                lost = gone | {spec.lossless.key for spec in specs if not segments.labels.isdisjoint(spec.labels)}
                pinned.whole = pinned.whole and pinned.keys.isdisjoint(lost)
                pinned.keys -= lost
                if not pinned.keys:
                    del self._pins[pin]
        return future

    def evict_named(
        self, name: str, scope: Scope = EVERYONE, modules: Sequence[str] = (), specs: Sequence[SegmentSpec] = ()
    ) -> Future[int]:
        """Evict segments, and the text that a schema of this salt has stored, or some of its modules.

        The schema may have been removed.
        """
        labels = labels_of_schema(scope.cache_salt, name, modules)
        return self.evict(replace(self._processor.encoding(f"schema '{name}'", specs, scope), labels=labels))

    def evict_owner(self, salt: str) -> Future[int]:
        """Evict the text of all schemas of a salt, removed ones included, and all its marked parts. "" is public."""
        labels = frozenset([owner_label(salt.encode())])
        return self.evict(replace(self._processor.encoding("segments", ()), labels=labels))

    def has_pinned(self, name: str, scope: Scope = EVERYONE) -> bool:
        """True if a scope has pinned its own schema or modules of it, and none of these was evicted since."""
        pinned = self._pins.get((name, scope.cache_salt, scope.pin_owner))
        return pinned is not None and pinned.whole

    def unpin_segments(self, segments: EncodeRequest) -> Future[int] | None:
        """Remove a schema's pin, if it exists.

        Returns None if the engine has been shut down or is in another process.
        """
        with suppress(InlayError):  # the engine may have been shut down
            if self._local is not None:
                return self._local.unpin(segments, segments.scope.pin_owner, segments.request_id)
        return None

    def ended(self, encoding: EncodeRequest, *, complete: bool) -> None:
        """Forget an ended encoding. A complete one of several segments is profiled."""
        mine = self.encodings.pop(encoding, None) is not None
        if mine and complete and len(encoding.specs) > 1 and self._local is not None:
            with suppress(InlayError):  # the engine may have been shut down
                self._local.profile(encoding.specs)

    def _end_encodings(self) -> None:
        """Abort the encodings, and remove the pins, of schemas that are no longer registered."""
        for (name, salt, owner), pinned in list(self._pins.items()):
            if not self._knows(pinned.layout, salt):
                del self._pins[name, salt, owner]
                self.unpin_segments(pinned.segments)
        for encoding, (layout, salt) in list(self.encodings.items()):
            if not self._knows(layout, salt):
                with suppress(InlayError):  # the engine may have been shut down
                    self._client.cancel(encoding.request_id, report=True)

    def _knows(self, layout: SchemaLayout, salt: str) -> bool:
        """True if the name still belongs to this schema, even if another thread has laid the schema out again."""
        known = self._processor.schemas.layout(layout.schema.name, salt)
        return known is not None and known.schema is layout.schema


@dataclass(eq=False, slots=True)
class _Pinned:
    """An owner's pin of a schema in this layout.

    Args:
        keys: of the segments that were not evicted since.
        whole: False once any of the segments was evicted.
    """

    segments: EncodeRequest
    layout: SchemaLayout
    keys: set[bytes]
    whole: bool = True


def _same(one: Schema, other: Schema) -> bool:
    """True if two schemas are equal apart from their source."""
    return one is other or one.to_json() == other.to_json()


def removed(encoding: EncodeRequest) -> AbortedError:
    """Return the error of an encoding whose schema is no longer registered."""
    return AbortedError(
        f"{encoding.name} was removed or replaced while it was encoded; its encoded segments stay stored",
        code="schema.removed",
    )
