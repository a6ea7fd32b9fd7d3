"""Traffic that changes all the time: tenants use schemas, marked parts and conversations, and make mistakes.

Texts repeat only in kinds of traffic that need it. So data that a server keeps about old requests shows as growth.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import quote

from inlay_lab.bench.serve.clients import Wire

_CHAT, _COMPLETIONS, _SCHEMAS = "/v1/chat/completions", "/v1/completions", "/v1/schemas"
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "ferry", "town", "captain")
_POLICIES = ("modular", "modular", "exact", "off", "modular+linked:16", "modular+profiled:0.15")
_DOCUMENTS = 8  # source of a tenant's marked parts
_TIMEOUT_S = 120.0  # of one request
_PROBLEMS = 20  # that are kept

_numbers = count()


@dataclass
class Seen:
    """Results of the traffic: episodes by kind, statuses of responses, and problems."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.statuses.total()

    def wrong(self, what: str) -> None:
        if len(self.problems) < _PROBLEMS:
            self.problems.append(what[:300])


@dataclass
class Tenant:
    """A client of a tenant that runs one episode after another.

    Attributes:
        url: Of the server, without a path.
        key: API key; an admin's if ``admin``.
        pace: Awaited before every request.
    """

    url: str
    key: str | None
    draw: random.Random
    seen: Seen
    pace: Callable[[], Awaitable[None]]
    admin: bool = False
    documents: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wire = Wire(self.url, self.key)
        self._kinds = {
            "schema": (self.schema, 30),
            "parts": (self.parts, 20),
            "conversation": (self.conversation, 20),
            "completion": (self.completion, 15),
            "grammar": (self.grammar, 5),
            "mistake": (self.mistake, 5),
            "tokens": (self.tokens, 5),
        }

    async def episode(self) -> None:
        """Send some requests of one kind."""
        (kind,) = self.draw.choices(list(self._kinds), [share for _, share in self._kinds.values()])
        self.seen.kinds[kind] += 1
        try:
            await self._kinds[kind][0]()
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self.seen.wrong(f"{kind}: {error!r}")
            self._wire.leave()

    def leave(self) -> None:
        self._wire.leave()

    async def schema(self) -> None:
        """Create, use and delete a schema; sometimes change, pin or forget it."""
        draw, name = self.draw, f"s{next(_numbers)}"
        modules = {f"m{number}": self._text(10, 150) for number in range(draw.randint(2, 10))}
        made: dict[str, Any] = {"schema": _schema(name, modules), "encode": draw.choice([True, "background", False])}
        if draw.random() < 0.3:
            made["ttl"] = draw.choice(["5s", "1m"])
        if self.admin and draw.random() < 0.5:
            made["public"] = True
        path = f"{_SCHEMAS}/{quote(name)}"
        await self._ask("POST", _SCHEMAS, made, 201)
        if draw.random() < 0.2:
            await self._ask("PUT", f"{path}/pin", None, 200, 403)  # all pins may take a quarter of the pool
        for _ in range(draw.randint(1, 5)):
            await self._import(name, modules)
        if draw.random() < 0.3:
            modules[draw.choice(list(modules))] = self._text(10, 150)
            await self._ask("PUT", path, {"schema": _schema(name, modules)}, 200)
            await self._import(name, modules)
        if draw.random() < 0.2:
            await self._ask("DELETE", f"{path}/stored", None, 200)
            await self._import(name, modules)
        await self._ask("GET", path, None, 200)
        await self._ask("DELETE", path, None, 200)

    async def parts(self) -> None:
        """Ask about marked documents, in random order, from a set that changes slowly."""
        draw = self.draw
        while len(self.documents) < _DOCUMENTS or draw.random() < 0.3:
            self.documents = [*self.documents[-_DOCUMENTS + 1 :], self._text(50, 200)]
        content: list[dict[str, Any]] = []
        for document in draw.sample(self.documents, draw.randint(1, 4)):
            mark = {"type": "ephemeral"} | ({"ttl": draw.choice(["5s", "5m"])} if draw.random() < 0.3 else {})
            content.append({"type": "text", "text": document, "cache_control": mark})
        content.append({"type": "text", "text": self._text(3, 10)})
        body = self._answer(messages=[{"role": "user", "content": content}], reuse=draw.choice(_POLICIES))
        await self._ask("POST", _CHAT, body, 200)

    async def conversation(self) -> None:
        """Stream growing conversations; some clients leave early."""
        messages = [{"role": "user", "content": self._text(5, 60)}]
        for _ in range(self.draw.randint(1, 6)):
            said = await self._stream(self._answer(messages=messages), leaves=self.draw.random() < 0.1)
            if said is None:
                return
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": self._text(3, 20)}]

    async def completion(self) -> None:
        """Complete new text, with one or several answers."""
        body = self._answer(prompt=self._text(5, 300), n=self.draw.choice([1, 1, 2, 4]), temperature=1)
        if self.draw.random() < 0.3:
            body["logprobs"] = 3
        await self._ask("POST", _COMPLETIONS, body, 200)

    async def grammar(self) -> None:
        """Use a new grammar."""
        words = self._text(4, 4).split()
        properties = {f"{word}{place}": {"type": "integer"} for place, word in enumerate(words)}
        grammar = self.draw.choice(
            [{"choice": words}, {"json": {"properties": properties}}, {"regex": f"[a-f]{{3}} {words[0]}"}]
        )
        await self._ask("POST", _COMPLETIONS, self._answer(prompt="Say one:", structured_outputs=grammar), 200)

    async def mistake(self) -> None:
        """Send a request that the server must refuse."""
        name = f"unknown{next(_numbers)}"
        wrong = [
            (_COMPLETIONS, {"prompt": self._text(3, 9), name: 1}, 400),
            (_COMPLETIONS, {"prompt": {"schema": name, "content": []}}, 404),
            (_SCHEMAS, {"pml": f'<schema name="{name}"><module/>{self._text(3, 30)}</schema>'}, 400),
            (_CHAT, {"messages": [{"role": name, "content": "?"}]}, 400),
        ]
        path, body, status = self.draw.choice(wrong)
        await self._ask("POST", path, body, status)

    async def tokens(self) -> None:
        """Tokenize a text and read one of the server's reports."""
        await self._ask("POST", "/tokenize", {"prompt": self._text(5, 300)}, 200)
        await self._ask("GET", self.draw.choice(["/v1/models", "/v1/cache/segments?limit=20", "/v1/drift"]), None, 200)

    async def _import(self, name: str, modules: dict[str, str]) -> None:
        taken = self.draw.sample(list(modules), self.draw.randint(1, min(4, len(modules))))
        content = [*({"import": module} for module in taken), self._text(3, 15)]
        body = self._answer(prompt={"schema": name, "content": content}, reuse=self.draw.choice(_POLICIES))
        await self._ask("POST", self.draw.choice([_CHAT, _COMPLETIONS]), body, 200)

    def _answer(self, **body: Any) -> dict[str, Any]:
        return {"max_tokens": self.draw.randint(1, 24), "ignore_eos": "structured_outputs" not in body, **body}

    def _text(self, least: int, most: int) -> str:
        """Words with a unique number."""
        return " ".join([f"{next(_numbers)}", *self.draw.choices(_WORDS, k=self.draw.randint(least, most))])

    async def _ask(self, method: str, path: str, body: Any, *expected: int) -> None:
        await self.pace()
        async with asyncio.timeout(_TIMEOUT_S):
            status, answer = await self._wire.ask(method, path, body)
        self.seen.statuses[status] += 1
        if status not in expected:
            self.seen.wrong(f"{method} {path}: {status} {answer.decode()}")

    async def _stream(self, body: dict[str, Any], *, leaves: bool) -> str | None:
        """The text of a chat answer, or None if the client left or was refused."""
        await self.pace()
        said, rest = "", b""
        async with asyncio.timeout(_TIMEOUT_S):
            status = await self._wire.send("POST", _CHAT, {**body, "stream": True})
            self.seen.statuses[status] += 1
            async for part in self._wire.parts():
                if status != 200:
                    self.seen.wrong(f"a stream: {status} {part.decode()}")
                    return None
                *events, rest = (rest + part).split(b"\n\n")
                said += "".join(map(_news, events))
                if leaves and said:
                    self._wire.leave()
                    return None
        return said


def _schema(name: str, modules: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "content": [{"module": module, "content": text} for module, text in modules.items()]}


def _news(event: bytes) -> str:
    """The text of a stream's event. Raises ValueError for an error event."""
    if event.startswith(b":") or event == b"data: [DONE]":
        return ""
    chunk = json.loads(event.removeprefix(b"data: "))
    if "error" in chunk:
        raise ValueError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
