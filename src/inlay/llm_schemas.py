"""What an LLM does with schemas: make them known, encode, pin and evict them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inlay.base import Base, Progress
from inlay.config import parse_bytes
from inlay.errors import AbortedError
from inlay.events import EncodeEvent
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.prompt.inputs import check_salt, parse_ttl
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.request import EncodeRequest
from inlay.schemas import removed


class SchemaCalls(Base):
    """The calls of LLM that are about schemas; each ends when what it asks for is done."""

    def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        replace: bool = False,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        ttl: str | None = None,
    ) -> SchemaLayout:
        """Make a schema known under its name, and encode its modules, packed, so that prompts find them.

        encode: False leaves each segment to the first prompt that needs it.
        replace: whether it may take the place of another schema of its name; ParameterError if not.
        reuse, positions: the policy to encode for; None for the engine's defaults.
        progress: called with how many of the schema's tokens are encoded, and how many there are.
        cache_salt: makes it private: only requests with this salt know it, and theirs goes before a public one of the
            same name. None for everybody's.
        adapter: whose prompts its modules are encoded for; None for those of the model alone.
        ttl: for how long what is encoded is to be found from when it was encoded or a prompt last read it, like "5m",
            "1h" or "inf"; None for as long as there is room. The schema itself stays.
        Raises PMLError, ParameterError, CapacityError, and AbortedError where it is removed or replaced meanwhile.
        """
        salt = check_salt(cache_salt)
        ttl_s = None if ttl is None else parse_ttl(ttl)
        policy = self._policy_of(schema, reuse, positions, adapter)
        layout, specs = self.schemas.add(schema, policy, salt, replace=replace, adapter=adapter, ttl_s=ttl_s)
        if encode:
            self._encode(self.schemas.encoding(layout, specs, salt=salt, adapter=adapter), progress)
        return layout

    def warm(
        self,
        prompt: Prompt | PromptBuilder,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Encode the segments that a prompt will read, and no others."""
        salt = check_salt(cache_salt)
        policy = self.policy_for(prompt, reuse, positions, cache_salt=cache_salt, adapter=adapter)
        specs = self.processor.segments_of(prompt, policy, salt, adapter)
        self._encode(self.processor.encoding("the prompt", specs, salt, adapter=adapter), progress)

    def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        max_bytes: int | str | None = None,
    ) -> int:
        """Keep what is encoded of a schema in the pool, whatever else comes; encodes what is missing.

        The pins end with the process, and when the schema is removed or replaced. A later pin of the same schema takes
        the place of an earlier one.

        name: of the schema. modules: the paths of those to keep; none for all, with the text outside of them.
        reuse, positions, cache_salt, adapter: as in ``add_schema``.
        max_bytes: the most that all pins under this salt may take, as a number or like "64MiB"; None for no bound but
            ``pin_memory``, a share of the pool for all pins together.
        Returns the bytes that the pins under this salt take: whole chunks for every segment.
        Raises ParameterError for what is not known, and PinError where that is too little: then what was pinned before
        still is. Where encoding fails, nothing of the schema is.
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
        """Let what ``pin`` keeps of a schema under this salt go when room is needed; returns whether there was any."""
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
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Forget what is encoded of a schema, here and in the store, and what was said behind it; the schema stays.

        That is what was encoded for this policy and for those that prompts have had so far. Pinned modules go as well.
        What a request still reads goes when it ends. Arguments as in ``pin``.
        Returns how many tokens there were. Raises ParameterError.
        """
        salt = check_salt(cache_salt)
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        specs = self.processor.schemas.every_spec(name, policy, salt, adapter, modules)
        return self.schemas.evict(self.processor.encoding(f"schema '{name}'", specs, salt, adapter=adapter)).result()

    def sensitivity(
        self,
        name: str,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, float]:
        """How much each module of a schema depends on what other text stands before it; "" for text outside modules.

        A share of how large the values of its tokens are, the mean over them: 0 for none. Modules of which nothing is
        encoded are left out. reuse, positions, cache_salt, adapter: as in ``add_schema``. Raises ParameterError.
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
