"""The encoding of one schema's modules ahead of time, which several may wait for and watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from inlay.api.dialect import OPENAI
from inlay.api.failures import INTERNAL_ERROR, BodyError, Failure, failure_of
from inlay.async_llm import AsyncLLM
from inlay.errors import AbortedError, InlayError
from inlay.server.schema_record import SchemaRecord

logger = logging.getLogger(__name__)


class PrewarmTask:
    """Encodes a schema from now on, to its end, whoever watches; or until the schema is deleted or replaced.

    One event loop's. record: what is encoded. tenant: who pays with its share of the passes. done, total: tokens; both
    0 until the schema is laid out. failure: what ended it before its time.
    """

    def __init__(self, llm: AsyncLLM, record: SchemaRecord, tenant: str) -> None:
        self.record = record
        self._tenant = tenant
        self.done = 0
        self.total = 0
        self.failure: Failure | None = None
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced whenever it is set, so that nobody misses one
        self._task = self._loop.create_task(self._run(llm))

    @property
    def over(self) -> bool:
        return self._task.done()

    async def begun(self) -> None:
        """Wait until the schema is laid out and known to the model, or all is over."""
        if not self.over and not self.total:
            await self._changed.wait()

    async def result(self) -> PrewarmTask:
        """Wait for the end, which nobody who stops waiting puts off. Raises nothing: see ``failure``."""
        await asyncio.wait((self._task,))
        return self

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """(done, total) whenever more is done, until the end; one who is slow misses some."""
        seen = 0
        while True:
            changed, done = self._changed, self.done
            if done != seen:
                seen = done
                yield done, self.total
            elif self.over:
                return
            else:
                await changed.wait()

    async def _run(self, llm: AsyncLLM) -> None:
        record = self.record
        try:
            if record.reuse is not None:
                await llm.add_schema(
                    record.layout.schema,
                    reuse=record.reuse,
                    positions=record.positions,
                    progress=self._report,
                    cache_salt=record.salt,
                    tenant=self._tenant,
                )
                await asyncio.sleep(0)  # the last of what _report was told comes before the end
        except AbortedError as error:
            self.failure = failure_of(BodyError(str(error), code="encoding_ended", status=409))
        except InlayError as error:
            self.failure = failure_of(error)
            logger.warning("a schema could not be encoded: %s", self.failure.name)
        except Exception:
            self.failure = INTERNAL_ERROR
            logger.exception("a schema could not be encoded")
        finally:
            self._notify()

    def _report(self, done: int, total: int) -> None:
        """Called by the model, on whatever thread."""
        self._loop.call_soon_threadsafe(self._note, done, total)

    def _note(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def encoding(task: PrewarmTask | None) -> dict[str, Any]:
    """How far the encoding ahead of a version is, in tokens, as the API shows it.

    state: "none" where it was never begun, "running", "done" or "failed", with the error.
    """
    if task is None:
        return {"state": "none", "done": 0, "total": 0}
    state = "running" if not task.over else "done" if task.failure is None else "failed"
    failed = {} if task.failure is None else OPENAI.error_body(task.failure)
    return {"state": state, "done": task.done, "total": task.total, **failed}
