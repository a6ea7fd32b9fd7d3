"""Merged streams of several prompts: the latest output of each, none lost, and every source closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from inlay.errors import QueueFullError
from inlay.server.completions import merge_streams


class Source:
    """A stream of numbers with pauses in between, which notes that it was closed."""

    def __init__(self, last: int, pause_s: float = 0.0, error: Exception | None = None) -> None:
        self.last = last
        self.pause_s = pause_s
        self.error = error
        self.closed = False

    async def stream(self) -> AsyncGenerator[Any, None]:
        try:
            for number in range(self.last + 1):
                await asyncio.sleep(self.pause_s)
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("pauses", [(0.0,), (0.0, 0.002, 0.001), (0.001, 0.0)])
@pytest.mark.parametrize("reader_s", [0.0, 0.004])
def test_last_output_of_every_prompt_arrives(pauses, reader_s):
    async def read() -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        sources = [Source(10 + number, pause) for number, pause in enumerate(pauses)]
        async for changed in merge_streams([source.stream() for source in sources]):
            assert len({number for number, _ in changed}) == len(changed), "once a prompt"
            found += changed  # type: ignore[arg-type]
            await asyncio.sleep(reader_s)
        assert all(source.closed for source in sources)
        return found

    found = asyncio.run(read())
    for number in range(len(pauses)):
        said = [output for prompt, output in found if prompt == number]
        assert said == sorted(set(said))
        assert said[-1] == 10 + number


@pytest.mark.parametrize("others", [0, 2])
def test_error_of_one_stream_ends_all(others):
    async def read() -> None:
        sources = [Source(3, error=QueueFullError("full")), *(Source(10**6, 0.001) for _ in range(others))]
        with pytest.raises(QueueFullError):
            async for _ in merge_streams([source.stream() for source in sources]):
                pass
        assert all(source.closed for source in sources)

    asyncio.run(read())


@pytest.mark.parametrize("several", [1, 3])
def test_closing_the_merged_stream_closes_its_sources(several):
    async def read() -> None:
        sources = [Source(10**6) for _ in range(several)]
        news = merge_streams([source.stream() for source in sources])
        async for _ in news:
            break
        await news.aclose()
        assert all(source.closed for source in sources)

    asyncio.run(read())
