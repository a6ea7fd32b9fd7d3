"""The encoding of one schema's modules ahead of time, which several may wait for and watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from inlay.api.failures import BodyError, Failure, failure_of
from inlay.async_llm import AsyncLLM
from inlay.errors import AbortedError, InlayError
from inlay.server.logs import SURPRISE

if TYPE_CHECKING:
    from inlay.server.schema_registry import Entry

logger = logging.getLogger(__name__)


class Warming:
    """Encodes a schema from now on, to its end, whoever watches; or until the schema is deleted or replaced.

    One event loop's. entry: what is encoded. tenant: who pays with its share of the passes. done, total: tokens; both 0
    until the schema is laid out. failure: what ended it before its time.
    """

    def __init__(self, llm: AsyncLLM, entry: Entry, tenant: str) -> None:
        self.entry = entry
        self._tenant = tenant
        self.done = 0
        self.total = 0
        self.failure: Failure | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()  # replaced whenever it is set, so that nobody misses one
        self._task = self._loop.create_task(self._run(llm))

    @property
    def over(self) -> bool:
        return self._task.done()

    async def begun(self) -> None:
        """Wait until the schema is laid out and known to the model, or all is over."""
        if not self.over and not self.total:
            await self._news.wait()

    async def result(self) -> Warming:
        """Wait for the end, which nobody who stops waiting puts off. Raises nothing: see ``failure``."""
        await asyncio.wait((self._task,))
        return self

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """(done, total) whenever more is done, until the end; one who is slow misses some."""
        seen = 0
        while True:
            news, done = self._news, self.done
            if done != seen:
                seen = done
                yield done, self.total
            elif self.over:
                return
            else:
                await news.wait()

    async def _run(self, llm: AsyncLLM) -> None:
        entry = self.entry
        try:
            if entry.reuse is not None:
                await llm.add_schema(
                    entry.layout.schema,
                    reuse=entry.reuse,
                    positions=entry.positions,
                    progress=self._tell,
                    cache_salt=entry.salt,
                    tenant=self._tenant,
                )
                await asyncio.sleep(0)  # the last of what _tell was told comes before the end
        except AbortedError as error:
            self.failure = failure_of(BodyError(str(error), code="encoding_ended", status=409))
        except InlayError as error:
            self.failure = failure_of(error)
            logger.warning("a schema could not be encoded: %s", self.failure.code or self.failure.type)
        except Exception:
            self.failure = SURPRISE
            logger.exception("a schema could not be encoded")
        finally:
            self._ring()

    def _tell(self, done: int, total: int) -> None:
        """Called by the model, on whatever thread."""
        self._loop.call_soon_threadsafe(self._note, done, total)

    def _note(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._ring()

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
