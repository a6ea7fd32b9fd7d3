"""The calls for schemas that LLM and AsyncLLM share: add, encode, pin, evict and list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, Unpack

from inlay.client.base import Base, Progress
from inlay.client.engine import EncodeListener
from inlay.client.options import OwnerOptions, scope_of
from inlay.client.schemas import removed
from inlay.errors import AbortedError, InlayError, ParameterError
from inlay.events import EncodeEvent
from inlay.kv.identity import SegmentSpec
from inlay.pml import Schema
from inlay.policy import PolicyFields, ReusePolicy
from inlay.prompt.inputs import parse_ttl
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.request import EncodeRequest
from inlay.settings import parse_bytes
from inlay.types import Scope

T = TypeVar("T")


class SchemaCalls(Base):
    """Each call returns when its work is done. For arguments and errors see LLM."""

    async def _add_schema(
        self,
        schema: Schema,
        *,
        encode: bool,
        replace: bool,
        ttl: str | None,
        progress: Progress | None,
        tolerance: float | str | None,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> SchemaLayout:
        scope = scope_of(**owner)
        policy = self._policy_of(schema, PolicyFields(reuse, tolerance=tolerance).policy(), positions, scope.adapter)
        ttl_s = None if ttl is None else parse_ttl(ttl)
        add = partial(self.schemas.add, schema, policy, scope, replace=replace, ttl_s=ttl_s)
        layout, specs = await self._laid_out(add, scope)
        if encode:
            await self._encode(self.schemas.encoding(layout, specs, scope), progress)
        return layout

    async def _warm(
        self,
        prompt: Any,
        progress: Progress | None,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> None:
        scope = scope_of(**owner)
        policy = self._prompt_policy(prompt, reuse, positions, scope)
        find = partial(self.processor.segments_of, prompt, policy, scope)
        specs = await self._waiting.work(self.pools.prompts, find, scope.cache_salt or None)
        await self._encode(self.processor.encoding("the prompt", specs, scope), progress)

    async def _pin(
        self,
        name: str,
        modules: Sequence[str],
        max_bytes: int | str | None,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> int:
        local, scope = self.local, scope_of(**owner)
        budget = None if max_bytes is None else parse_bytes("max_bytes", max_bytes)
        segments = await self._laid_out(lambda: self.segments_of(name, modules, reuse, positions, scope), scope)
        try:
            taken = await self._waiting.result(self.schemas.pin(local, segments, name, budget))
        except asyncio.CancelledError:  # the outcome is unknown, so release both pins
            for pinned in filter(None, (segments, self.schemas.unpinned(name, scope))):
                self.schemas.unpin_segments(pinned)
            raise
        self.schemas.pinned(segments, name)
        try:
            await self._encode(segments, None)
        except BaseException:
            await self._unpin(name, **owner)
            raise
        return taken

    async def _unpin(self, name: str, **owner: Unpack[OwnerOptions]) -> bool:
        scope = scope_of(**owner)
        pinned = self.schemas.unpinned(name, scope)
        if pinned is not None:
            await self._waiting.result(self.local.unpin(pinned, scope.pin_owner, pinned.request_id))
        return pinned is not None

    async def _evict(
        self,
        name: str,
        modules: Sequence[str],
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> int:
        scope, specs = scope_of(**owner), list[SegmentSpec]()
        known = self.processor.schemas.get(name, scope.cache_salt)  # a salt never means the public schema here
        if known is not None:
            policy, every = self._schema_policy(name, reuse, positions, scope), self.processor.schemas.every_spec
            specs = await self._laid_out(lambda: every(known, policy, scope.adapter, modules), scope)
        tokens = 0
        if name:  # the label of an empty name is that of all segments of its owner
            tokens = await self._waiting.result(self.schemas.evict_named(name, scope, modules, specs))
        if known is None and not tokens:
            raise ParameterError(
                f"schema '{name}' is not known under this cache_salt, and none of its text is stored; check the name "
                "and the cache_salt, and leave cache_salt out for a public schema",
                code="schema.unknown",
            )
        return tokens

    async def _stored(
        self,
        name: str,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> dict[str, tuple[int, int]]:
        scope = scope_of(**owner)
        policy = self._schema_policy(name, reuse, positions, scope)
        modules = await self._laid_out(lambda: self.processor.schemas.module_specs(name, policy, scope), scope)
        specs = [spec for module in modules.values() for spec in module]
        keys = await self._waiting.result(self.client.stored(self.processor.encoding(name, specs, scope)))
        return {
            module: (sum(len(one.ids) for one in specs), sum(len(one.ids) for one in specs if one.key in keys))
            for module, specs in modules.items()
        }

    async def _laid_out(self, work: Callable[[], T], scope: Scope) -> T:
        """Return the result of work on a schema of this scope."""
        return await self._waiting.work(self.pools.schemas, work, scope.cache_salt or None)

    async def _encode(self, encoding: EncodeRequest, progress: Progress | None) -> None:
        """Encode segments. Cancels the encoding if the caller stops waiting, or if ``progress`` raises."""
        news = self._waiting.mailbox()
        latest, told = EncodeEvent(encoding.request_id, 0, encoding.tokens), -1
        listener: EncodeListener = lambda events: news.put(events[-1])  # noqa: E731
        try:
            if progress is not None and encoding.specs:
                told = 0
                progress(0, encoding.tokens)
            self.client.encode(encoding, listener)
            while not latest.finished:
                latest = await news.get()
                if progress is not None and latest.error is None and latest.done > told:
                    told = latest.done
                    progress(told, latest.total)
        finally:
            if not latest.finished:
                with suppress(InlayError):  # the engine may have been shut down
                    self.client.cancel(encoding.request_id)
            self.schemas.ended(encoding, complete=latest.finished and latest.error is None)
        error = None if latest.error is None else latest.error.exception()
        if isinstance(error, AbortedError):
            raise removed(encoding) from None
        if error is not None:
            raise error
