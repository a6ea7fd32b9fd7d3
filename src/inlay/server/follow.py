"""The answers to several prompts as one stream of news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from inlay.types import RequestOutput

#: What ``AsyncLLM.generate`` gives.
Outputs = AsyncGenerator[RequestOutput, None]
#: The number of a prompt, and what its answers have come to.
News = tuple[int, RequestOutput]


async def follow(streams: Sequence[Outputs]) -> AsyncGenerator[Sequence[News], None]:
    """What has changed since the last time, for each prompt at most once: a reader may be slower than the model.

    streams: of ``AsyncLLM.generate``, one a prompt. Raises what ends any of them; then, and when the reader leaves, the
    others are given up.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield ((0, output),)
        return
    latest: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def listen(number: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    latest[number] = output
                    news.set()
        finally:
            news.set()

    listeners = [asyncio.create_task(listen(number, stream)) for number, stream in enumerate(streams)]
    try:
        while latest or not all(listener.done() for listener in listeners):
            await news.wait()
            news.clear()
            for listener in listeners:
                if listener.done():
                    listener.result()
            if latest:
                taken, latest = latest, {}
                yield tuple(taken.items())
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
