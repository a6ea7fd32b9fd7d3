"""The memory of resident documents, and the time to find one among many."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time

import psutil

from inlay.client.async_llm import AsyncLLM
from inlay.kv.identity import Context, TokenRun
from inlay.sampling.params import SamplingParams
from inlay.types import Usage
from inlay_lab.bench.throughput.ledger import Cell
from inlay_lab.bench.throughput.runs import percentiles
from inlay_lab.bench.throughput.workload import Sizes, random_ids

_QUESTIONS, _COLD = 7, 2  # about resident documents; about one that is never stored
_LOOKUPS, _ROUNDS = 100, 7


class ResidentDocuments:
    """Resident documents in an engine that has no other requests. Questions about them are not kept.

    Attributes:
        documents: The token ids of each.
    """

    def __init__(self, llm: AsyncLLM, sizes: Sizes) -> None:
        self._llm = llm
        self._sizes = sizes
        self._draw = random.Random(0)
        self.documents: list[list[int]] = []
        self._bare_rss = 0  # memory of the process without any of the pool
        self._cold_s = 0.0  # time of a question about a document that is not stored

    def seconds_for(self, documents: int) -> float:
        """The estimated seconds until that many documents are resident."""
        self._warm_up()
        return max(0, documents - len(self.documents)) * self._cold_s

    def measure(self, documents: int) -> Cell:
        """Compute documents until ``documents`` are resident, and ask about some of them."""
        self._warm_up()
        return asyncio.run(self._measure(documents))

    def _warm_up(self) -> None:
        """On the first call, ask about a document without storing it, and record the memory in use."""
        if not self._cold_s:
            self._cold_s, _ = asyncio.run(self._first_token(self._question(), "off"))
            # The process keeps the pages written here; the documents will reuse them.
            self._bare_rss = _rss() - self._bytes_of(self._llm.store.pool.peak_chunks)

    async def _measure(self, documents: int) -> Cell:
        fill_s = await self._fill(documents)
        rss, pool = _rss(), self._llm.store.pool
        used = self._bytes_of(pool.chunks - pool.free_chunks)
        seconds, hit_rate = await self._ask()
        absent = self._text(self._sizes.document + self._sizes.question)
        return {
            "fill_s": round(fill_s, 3),
            "rss_bytes": rss,
            "rss_bytes_per_document": _each(rss - self._bare_rss, documents),
            "kv_bytes": used,
            "kv_bytes_per_document": _each(used, documents),
            "kv_bytes_of_tokens": self._sizes.document * pool.bytes_per_token,
            "ttft_ms": percentiles(seconds),
            "hit_rate": hit_rate,
            "lookup_us": await self._lookup_us(self._question()) if self.documents else None,
            "lookup_miss_us": await self._lookup_us(absent),
        }

    async def _fill(self, documents: int) -> float:
        started = time.perf_counter()
        while len(self.documents) < documents:
            self.documents.append(self._text(self._sizes.document))
            await self._first_token(self.documents[-1], "exact")
        return time.perf_counter() - started

    async def _ask(self) -> tuple[list[float], float]:
        """Times to the first token of questions about resident documents, or about an absent one if there are none."""
        reuse, count = ("exact", _QUESTIONS) if self.documents else ("off", _COLD)
        asked = [await self._first_token(self._question(), reuse) for _ in range(count)]
        await self._forget_questions()
        cached, total = (sum(getattr(u, name) for _, u in asked) for name in ("cached_tokens", "prompt_tokens"))
        return [seconds for seconds, _ in asked], round(cached / total, 4)

    async def _first_token(self, ids: list[int], reuse: str) -> tuple[float, Usage]:
        started = time.perf_counter()
        async for output in self._llm.generate(ids, SamplingParams(max_tokens=1, temperature=0), reuse=reuse):
            usage = output.usage
        return time.perf_counter() - started, usage

    async def _lookup_us(self, ids: list[int]) -> float:
        """Median microseconds to look up a prompt's stored prefix, on the engine's thread."""
        store, run = self._llm.store, TokenRun(tuple(ids), 0, Context())

        def look_up() -> float:
            rounds = []
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                for _ in range(_LOOKUPS):
                    store.longest(run, most=len(ids) - 1)
                rounds.append(time.perf_counter() - started)
            return round(statistics.median(rounds) / _LOOKUPS * 1e6, 3)

        return await asyncio.wrap_future(self._llm.local.call(look_up))

    def _question(self) -> list[int]:
        """A question about a resident document, or about a new one if there are none."""
        document = self._draw.choice(self.documents) if self.documents else self._text(self._sizes.document)
        return [*document, *self._text(self._sizes.question)]

    def _text(self, tokens: int) -> list[int]:
        return random_ids(self._draw, self._llm.vocab_size, tokens)

    async def _forget_questions(self) -> None:
        store = self._llm.store

        def forget() -> None:
            store.discard([segment for segment in store if segment.run.start >= self._sizes.document])

        await asyncio.wrap_future(self._llm.local.call(forget))

    def _bytes_of(self, chunks: int) -> int:
        pool = self._llm.store.pool
        return chunks * pool.chunk_size * pool.bytes_per_token


def _rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _each(total: int, documents: int) -> int | None:
    return round(total / documents) if documents else None
