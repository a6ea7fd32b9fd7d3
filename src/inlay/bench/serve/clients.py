"""Clients of all kinds: most stream, some want whole answers, some leave in the middle, some read slowly."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inlay.bench.serve.cases import Case, Verdict
from inlay.bench.serve.wire import Wire

#: How clients behave, and how often, in percent.
HABITS = {"stream": 80, "whole": 8, "leave": 8, "slow": 4}
_SLOW_S = 0.05  # between two reads of a slow client
_STAYS = 20  # events at most that a client reads before it leaves


@dataclass
class Results:
    """What all clients have seen.

    counts: requests by habit, answers by verdict, and "errors". tokens: of answers that were read to the end.
    ttft, gaps: seconds to the first text, and between two pieces of it, of clients that read as fast as they can.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def wrong(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.problems.append(what)


async def client(
    url: str,
    cases: Sequence[Case],
    habits: Mapping[str, int],
    until: float,
    draw: random.Random,
    results: Results,
) -> None:
    """Ask one thing after another. until: seconds of ``perf_counter``."""
    wire = Wire(url)
    while time.perf_counter() < until:
        (habit,), case = draw.choices(list(habits), list(habits.values())), draw.choice(cases)
        results.counts[habit] += 1
        try:
            if habit == "whole":
                said: str | None = await _whole(wire, case, results)
            else:
                said = await _stream(wire, case, habit, draw.randint(1, _STAYS), results)
        except (OSError, EOFError, ValueError, KeyError) as error:
            results.wrong("errors", repr(error))
            wire.leave()
            continue
        if said is not None and (verdict := case.judge(said)) is Verdict.WRONG:
            results.wrong(verdict.value, case.difference(said))
        elif said is not None:
            results.counts[verdict.value] += 1
    wire.leave()


async def _whole(wire: Wire, case: Case, results: Results) -> str:
    status, answer = await wire.ask("POST", case.path, case.body)
    if status != 200:
        raise ValueError(answer.decode())
    body = json.loads(answer)
    results.tokens += body["usage"]["completion_tokens"]
    return case.said(body)


async def _stream(wire: Wire, case: Case, habit: str, stays: int, results: Results) -> str | None:
    """The text of a stream; None where the client has left it."""
    began = last = time.perf_counter()
    said, done, events = "", False, 0
    async for news in _events(wire, case, results):
        done = done or news is None
        if news:
            now = time.perf_counter()
            if habit == "stream":
                (results.gaps if said else results.ttft).append(now - (last if said else began))
            said, last, events = said + news, now, events + 1
        if habit == "leave" and events == stays:
            wire.leave()
            return None
        if habit == "slow":
            await asyncio.sleep(_SLOW_S)
    if not done:
        raise EOFError("a stream ended without [DONE]")
    return said


async def _events(wire: Wire, case: Case, results: Results) -> AsyncIterator[str | None]:
    """The new text of each event, joined for those that come together; None for the end. Raises ValueError."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status = await wire.send("POST", case.path, {**case.body, **options})
    rest = b""
    async for part in wire.parts():
        if status != 200:
            raise ValueError(part.decode())
        *events, rest = (rest + part).split(b"\n\n")
        yield "".join(_text(json.loads(one.removeprefix(b"data: ")), case, results) for one in events if one != _DONE)
        if events and events[-1] == _DONE:
            yield None


_DONE = b"data: [DONE]"


def _text(chunk: dict[str, Any], case: Case, results: Results) -> str:
    if "error" in chunk:
        raise ValueError(chunk["error"]["message"])
    if chunk["usage"] is not None:
        results.tokens += chunk["usage"]["completion_tokens"]
        return ""
    return case.news(chunk)
