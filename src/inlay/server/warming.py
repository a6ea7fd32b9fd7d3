"""The encoding of one schema's modules ahead of time, which several may wait for and watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from inlay.async_llm import AsyncLLM
from inlay.errors import InlayError
from inlay.openai.failures import Failure, failure_of
from inlay.server.logs import SURPRISE

if TYPE_CHECKING:
    from inlay.server.shelf import Entry

logger = logging.getLogger(__name__)


class Warming:
    """Encodes a schema from now on, to its end, whoever watches. One event loop's.

    entry: what is encoded. done, total: tokens; both 0 until the first of them are encoded.
    failure: what ended it before its time.
    """

    def __init__(self, llm: AsyncLLM, entry: Entry) -> None:
        self.entry = entry
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
        """Wait until the schema is laid out and some of it is encoded, or all is over."""
        if not self.over and not self.total:
            await self._news.wait()

    async def result(self) -> Warming:
        """Wait for the end, which nobody who stops waiting puts off. Raises nothing: see ``failure``."""
        await asyncio.wait((self._task,))
        return self

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """(done, total) whenever they change, until the end; one who is slow misses some."""
        seen = (0, 0)
        while True:
            news, now = self._news, (self.done, self.total)
            if now != seen:
                seen = now
                yield now
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
                )
                await asyncio.sleep(0)  # the last of what _tell was told comes before the end
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
