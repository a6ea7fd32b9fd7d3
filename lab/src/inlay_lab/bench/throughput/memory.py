"""Documents that stay: what each takes of memory, and whether finding one takes longer when there are many."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time

import psutil

from inlay.async_llm import AsyncLLM
from inlay.kv.identity import Context, TokenRun
from inlay.sampling_params import SamplingParams
from inlay.types import Usage
from inlay_lab.bench.throughput.ledger import Cell
from inlay_lab.bench.throughput.runs import percentiles
from inlay_lab.bench.throughput.workload import Sizes, random_ids

_QUESTIONS, _COLD = 7, 2  # about documents that are resident; about one that never is
_LOOKUPS, _ROUNDS = 100, 7


class ResidentDocuments:
    """An engine that nobody else uses, and the documents that are resident in it; questions about them are not kept.

    documents: the token ids of each.
    """

    def __init__(self, llm: AsyncLLM, sizes: Sizes) -> None:
        self._llm = llm
        self._sizes = sizes
        self._draw = random.Random(0)
        self.documents: list[list[int]] = []
        self._bare_rss = 0  # what the process takes without any of the pool
        self._cold_s = 0.0  # a question about a document that is not there

    def seconds_for(self, documents: int) -> float:
        """About how long it takes until that many documents are resident."""
        self._warm_up()
        return max(0, documents - len(self.documents)) * self._cold_s

    def measure(self, documents: int) -> Cell:
        """Compute documents until so many are resident, and ask about some of them."""
        self._warm_up()
        return asyncio.run(self._measure(documents))

    def _warm_up(self) -> None:
        """Once: ask about a document that is not kept, and note what memory is taken."""
        if not self._cold_s:
            self._cold_s, _ = asyncio.run(self._first_token(self._question(), "off"))
            # The operating system keeps the pages that this has written, and the documents come to lie in them.
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
        """Times to the first token of questions about resident documents, or about one that is not where none are."""
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
        """Microseconds of finding what is stored of a prompt, on the engine's thread; a median."""
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
        """A question about one of the documents, or about one of its own where there are none."""
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
