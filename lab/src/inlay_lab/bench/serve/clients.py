"""Clients with different habits: most stream, some want whole answers, some leave early, some read slowly.

Their connections do little work, because clients share the cores with the server. Each prompt has a reference answer,
generated alone, to compare with the answer under load.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit


class Wire:
    """A client of HTTP/1.1 that sends one request after another.

    Args:
        url: Of the server, without a path.
        key: API key, or None.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        found = urlsplit(url)
        self._host, self._port = found.hostname, found.port
        self._key = "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None) -> int:
        """Send a request; returns the response's status. Read the body with ``parts`` next.

        Args:
            body: JSON as bytes, a value to write as JSON, or None.

        Raises:
            OSError: The connection failed.
        """
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        reader, writer = await self.begin(method, path, len(data))
        writer.write(data)
        heads = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = re.search(r"content-length: (\d+)", heads)
        self._length = None if found is None else int(found[1])
        return int(heads.split()[1])

    async def begin(self, method: str, path: str, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send the head of a request with a body of ``length`` bytes; the caller writes the body. Raises OSError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        kind = "Content-Type: application/json\r\n" if length else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{self._key}{kind}Content-Length: {length}\r\n\r\n"
        self._streams[1].write(head.encode())
        return self._streams

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the response's body as it arrives. Raises EOFError if it ends early."""
        assert self._streams is not None, "a request was sent"
        reader, _ = self._streams
        if self._length is not None:
            yield await reader.readexactly(self._length)
            return
        while size := int(await reader.readline() or b"0", 16):
            yield (await reader.readexactly(size + 2))[:-2]
        if await reader.readline() != b"\r\n":
            raise EOFError("the connection was closed in the middle of a response")

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request; returns the status and body of the response."""
        status = await self.send(method, path, body)
        return status, b"".join([part async for part in self.parts()])

    def leave(self) -> None:
        """Hang up; the next request opens a new connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_DOCUMENTS = 4
_NEAR_TIE = 1e-3  # of the two best logits; rounding may swap them (DESIGN.md, invariant 1)


class Verdict(StrEnum):
    """The result of comparing an answer with the reference answer."""

    EQUAL = "equal"
    NEAR_TIE = "near_ties"
    WRONG = "wrong"


@dataclass
class Case:
    """One prompt and its reference answer.

    Attributes:
        text: The answer to the prompt alone.
        tokens: The text of each token and its lead over the second best token.
    """

    path: str
    body: dict[str, Any]
    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)

    def said(self, answer: dict[str, Any]) -> str:
        """The text of a whole response."""
        (choice,) = answer["choices"]
        return str(choice["text"] if self.path == _COMPLETIONS else choice["message"]["content"])

    def news(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk that has a choice."""
        (choice,) = chunk["choices"]
        return choice["text"] if self.path == _COMPLETIONS else choice["delta"].get("content") or ""

    def judge(self, said: str) -> Verdict:
        """Compare an answer with the reference answer."""
        if said == self.text:
            return Verdict.EQUAL
        pairs = enumerate(zip(said, self.text, strict=False))
        at = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(said), len(self.text)))
        reached = 0
        for token, lead in self.tokens:
            reached += len(token)
            if reached > at:
                return Verdict.NEAR_TIE if lead < _NEAR_TIE else Verdict.WRONG
        return Verdict.WRONG

    def difference(self, said: str) -> str:
        """The text of a wrong answer around its first difference."""
        at = next((i for i, (ours, theirs) in enumerate(zip(said, self.text, strict=False)) if ours != theirs), 0)
        shown = slice(max(0, at - 20), at + 20)
        return f"{said[shown]!r} in place of {self.text[shown]!r}"


def make_cases(number: int, max_tokens: int, draw: random.Random) -> list[Case]:
    """Greedy prompts: two thirds are conversations about one of four documents, the others share nothing."""
    common = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    documents = [" ".join(draw.choices(_WORDS, k=200)) for _ in range(_DOCUMENTS)]
    found = []
    for place in range(number):
        if place % 3:
            text = f"{documents[place % _DOCUMENTS]}\n{' '.join(draw.choices(_WORDS, k=8))} {place}?"
            found.append(Case(_CHAT, {**common, "messages": [{"role": "user", "content": text}]}))
        else:
            text = f"{place} {' '.join(draw.choices(_WORDS, k=40))}"
            found.append(Case(_COMPLETIONS, {**common, "prompt": text}))
    return found


async def ask_alone(url: str, case: Case, key: str | None = None) -> None:
    """Generate the reference answer, alone and without reuse. Raises ValueError if the server refuses the prompt."""
    asked = {"logprobs": True, "top_logprobs": 2} if case.path == _CHAT else {"logprobs": 2}
    wire = Wire(url, key)
    status, answer = await wire.ask("POST", case.path, {**case.body, **asked, "reuse": "off"})
    wire.leave()
    if status != 200:
        raise ValueError(f"a prompt was refused: {answer.decode()}")
    body = json.loads(answer)
    case.text, logprobs = case.said(body), body["choices"][0]["logprobs"]
    if case.path == _CHAT:
        steps = [(one["token"], [top["logprob"] for top in one["top_logprobs"]]) for one in logprobs["content"]]
    else:
        steps = list(zip(logprobs["tokens"], [step.values() for step in logprobs["top_logprobs"]], strict=True))
    case.tokens = [(token, _lead(sorted(best, reverse=True))) for token, best in steps]


def _lead(best: list[float]) -> float:
    """The lead of the best token over the next one with another text: the API lists tokens of equal text once."""
    return best[0] - best[1] if len(best) > 1 else math.inf


#: Habits of clients, and their frequency in percent.
HABITS = {"stream": 80, "whole": 8, "leave": 8, "slow": 4}
_SLOW_S = 0.05  # between two reads of a slow client
_STAYS = 20  # most events that a client reads before it leaves


@dataclass
class Results:
    """Results of all clients.

    Attributes:
        counts: Requests by habit, answers by verdict, and "errors".
        tokens: Tokens of answers that were read to the end.
        ttft: Seconds to the first text, for clients of the habit "stream".
        gaps: Seconds between two pieces of text, for the same clients.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.counts[habit] for habit in HABITS)

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
    key: str | None = None,
) -> None:
    """Ask one prompt after another until ``until``, in seconds of ``perf_counter``."""
    wire = Wire(url, key)
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
    """The text of a stream, or None if the client left early."""
    began = last = time.perf_counter()
    said, done, events = "", False, 0
    async for news in news_of(wire, case, results):
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


async def news_of(wire: Wire, case: Case, results: Results) -> AsyncIterator[str | None]:
    """Yield the new text of the events in each read, and None at the end. Raises ValueError."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status = await wire.send("POST", case.path, {**case.body, **options})
    rest = b""
    async for part in wire.parts():
        if status != 200:
            raise ValueError(part.decode())
        *events, rest = (rest + part).split(b"\n\n")
        events = [event for event in events if not event.startswith(b":")]  # a comment, sent during silence
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
