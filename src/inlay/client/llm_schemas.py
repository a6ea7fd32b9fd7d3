"""LLM's schema calls: add, encode, pin and evict schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inlay.client.base import Base, Progress
from inlay.client.schemas import removed
from inlay.config import parse_bytes
from inlay.errors import AbortedError
from inlay.events import EncodeEvent
from inlay.pml import Schema
from inlay.policy import PolicyFields, ReusePolicy, check_schema_fields
from inlay.prompt.inputs import check_salt, parse_ttl
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.request import EncodeRequest


class SchemaCalls(Base):
    """LLM's calls for schemas. Each returns when its work is done."""

    def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        replace: bool = False,
        reuse: str | ReusePolicy | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        ttl: str | None = None,
        **of_requests: object,
    ) -> SchemaLayout:
        """Register a schema under its name, and encode its modules in packed passes.

        Args:
            encode: False leaves each segment to the first prompt that needs it.
            replace: if True, another schema of this name may be replaced; else it is a ParameterError.
            reuse, tolerance, positions: the policy to encode for. None for the engine's defaults.
            progress: called with the encoded and the total tokens of the schema.
            cache_salt: makes the schema private to requests with this salt. It hides a public one of the same name.
                None
                for a public schema.
            adapter: the adapter to encode for. None for the model alone.
            of_requests: recompute, promote and across_adapters are fields of requests, and refused here.
            ttl: the lifetime of encoded segments since encoding or the last read, like "5m", "1h" or "inf". None for no
                limit. The schema itself stays.

        Raises:
            PMLError, ParameterError, CapacityError: if the schema cannot be used or encoded.
            AbortedError: if the schema is removed or replaced during encoding.
        """
        check_schema_fields(of_requests, "add_schema")
        salt = check_salt(cache_salt)
        ttl_s = None if ttl is None else parse_ttl(ttl)
        given = PolicyFields(reuse, tolerance=tolerance).policy()
        policy = self._policy_of(schema, given, positions, adapter)
        layout, specs = self.schemas.add(schema, policy, salt, replace=replace, adapter=adapter, ttl_s=ttl_s)
        if encode:
            self._encode(self.schemas.encoding(layout, specs, salt=salt, adapter=adapter), progress)
        return layout

    def warm(
        self,
        prompt: Any,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Encode the modules that a prompt will read: those of its schema, or marked parts of messages."""
        salt = check_salt(cache_salt)
        policy = self.policy_for(prompt, reuse, positions, cache_salt=cache_salt, adapter=adapter)
        specs = self.processor.segments_of(prompt, policy, salt, adapter)
        self._encode(self.processor.encoding("the prompt", specs, salt, adapter=adapter), progress)

    def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        max_bytes: int | str | None = None,
    ) -> int:
        """Pin a schema's segments in the pool, and encode missing ones.

        The pins end with the process, and when the schema is removed or replaced. A later pin of the same schema
        replaces an
        earlier one.

        Args:
            name: of the schema.
            modules: the paths of modules to pin. Empty for all, with the text outside modules.
            reuse, positions, cache_salt, adapter: as in ``add_schema``.
            max_bytes: the most bytes of all pins under this salt, as a number or like "64MiB". None for no bound but
                ``pin_memory``, a share of the pool for all pins.

        Returns:
            The bytes of all pins under this salt, counted in whole chunks for every segment.

        Raises:
            ParameterError: for an unknown schema or module.
            PinError: if the budget is too small; earlier pins stay. If encoding fails, nothing of the schema stays
                pinned.
        """
        budget = None if max_bytes is None else parse_bytes("max_bytes", max_bytes)
        salt = check_salt(cache_salt)
        segments = self.segments_of(name, modules, reuse, positions, salt, adapter)
        taken = self.schemas.pin(segments, name, salt, salt, budget).result()
        self.schemas.pinned(segments, name, salt, salt)
        try:
            self._encode(segments, None)
        except BaseException:
            self.unpin(name, cache_salt=cache_salt)
            raise
        return taken

    def unpin(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Remove the pin of a schema under this salt; returns False if there was none."""
        salt = check_salt(cache_salt)
        pinned = self.schemas.unpinned(name, salt, salt)
        if pinned is not None:
            self.client.unpin(pinned, salt, pinned.request_id).result()
        return pinned is not None

    def evict(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Evict a schema's segments from the pool and the store, with the text stored behind them. The schema stays.

        Covers this policy and all policies of earlier prompts, pinned modules included. Segments in use go when their
        requests end. Arguments as in ``pin``.

        Returns:
            The number of evicted tokens.

        Raises:
            ParameterError: for an unknown schema or module.
        """
        salt = check_salt(cache_salt)
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        specs = self.processor.schemas.every_spec(name, policy, salt, adapter, modules)
        return self.schemas.evict(self.processor.encoding(f"schema '{name}'", specs, salt, adapter=adapter)).result()

    def deviations(
        self,
        name: str,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, float]:
        """Return the deviation of each module of a schema behind other text; "" stands for text outside modules.

        The deviation is relative to the size of the tokens' values, as a mean over them: 0 for none. Modules without
        encoded
        segments are left out. reuse, positions, cache_salt, adapter: as in ``add_schema``. Raises ParameterError.
        """
        salt = check_salt(cache_salt)
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        modules = self.processor.schemas.module_specs(name, policy, salt, adapter)
        self.client.finish_profiles()
        known = self.client.profiles(spec for specs in modules.values() for spec in specs).result()
        found = {module: [known[spec.key] for spec in specs if spec.key in known] for module, specs in modules.items()}
        return {
            module: float(np.concatenate(parts).astype(np.float32).mean()) for module, parts in found.items() if parts
        }

    def _encode(self, encoding: EncodeRequest, progress: Progress | None) -> None:
        news = [EncodeEvent(encoding.request_id, 0, encoding.tokens)]
        seen = -1
        try:
            self.client.encode(encoding, news.extend)
            while not news[-1].finished:
                self.client.pump()
                if progress is not None and news[-1].done > seen:
                    seen = news[-1].done
                    progress(seen, encoding.tokens)
                del news[:-1]
        finally:
            if not news[-1].finished:
                self.client.cancel(encoding.request_id)
            self.schemas.ended(encoding, complete=news[-1].finished and news[-1].error is None)
        fault = news[-1].error
        error = None if fault is None else fault.exception()
        if isinstance(error, AbortedError):
            raise removed(encoding)
        if error is not None:
            raise error
