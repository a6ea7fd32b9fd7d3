"""Requests that try to harm a server. Each attack is a few bodies, sent in a loop by several clients at once.

Bodies are made before the measurement, because clients share the cores with the server. Bodies that a cache could
answer differ from each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_CHAT, _COMPLETIONS, _SCHEMAS = "/v1/chat/completions", "/v1/completions", "/v1/schemas"
_SENTENCE = "The ferry goes to the town. "
FILL = "town " * 100  # a module of the schema that fills the pool
_OPTIONS = 4000  # options of a choice: nearly the limits of a grammar in number and length


@dataclass(frozen=True)
class Send:
    """One request.

    Attributes:
        leaves_s: Seconds after which the client hangs up. None if it waits for the answer.
        trickles: Send the body a byte at a time.
        reads: Read the response.
    """

    method: str
    path: str
    body: bytes = b""
    leaves_s: float | None = None
    trickles: bool = False
    reads: bool = True


@dataclass(frozen=True)
class Attack:
    """Requests that several clients of one tenant send at once.

    Attributes:
        what: Description for the table.
        rounds: Requests that follow each other on one connection. The clients divide the rounds; each repeats its own.
        clients: Number of clients.
        limited: The tenant has a limit of 500 tokens a minute.
        before: Sent once before the measurement.
        after: Sent last, to tidy up.
    """

    what: str
    rounds: Callable[[], list[list[Send]]]
    clients: int = 2
    limited: bool = False
    before: Callable[[], list[Send]] = list
    after: Callable[[], list[Send]] = list


def _post(path: str, body: Any = None, **how: Any) -> Send:
    return Send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **how)


def _alike(path: str, body: Any, **how: Any) -> Callable[[], list[list[Send]]]:
    """One body again and again. ``body`` is JSON bytes, a value, or a function that returns one of these."""
    return lambda: [[_post(path, body() if callable(body) else body, **how)]]


def _list(member: bytes, times: int, first: bytes = b"") -> bytes:
    return b"[" + first + b",".join([member] * times) + b"]"


def _field(name: str, value: bytes) -> bytes:
    return b'{"%s":%s}' % (name.encode(), value)


def _schema(name: str, modules: int, between: str = "x", text: str = "y") -> dict[str, Any]:
    inside = "".join(f'{between}<module name="m{n}">{text} {n}</module>' for n in range(modules))
    return {"pml": f'<schema name="{name}">{inside}</schema>', "encode": False}


def _schemas(modules: int, **how: Any) -> Callable[[], list[list[Send]]]:
    """Rounds that create and delete a schema; two clients use two names."""
    return lambda: [[_post(_SCHEMAS, _schema(name, modules, **how)), _deleted(name)] for name in ("one", "other")]


def _deleted(name: str) -> Send:
    return Send("DELETE", f"{_SCHEMAS}/{name}")


def _filling(modules: int) -> list[list[Send]]:
    """A schema of ``modules`` modules of FILL that is deleted while it is encoded."""
    schema = {**_schema("large", modules, between="", text=FILL), "encode": "background"}
    return [[_post(_SCHEMAS, schema), _post(_COMPLETIONS, {"prompt": "Hi", "max_tokens": 8}), _deleted("large")]]


def _structured(grammar: dict[str, Any], **how: Any) -> Send:
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": grammar}
    return _post(_COMPLETIONS, body, **how)


def _named_tokens() -> dict[str, Any]:
    """Fields that name tokens, each near its limit."""
    words = [" ".join([f"{n * 7919 % 10_007:05}"] * 41) for n in range(250)]
    allowed = [n % 200 for n in range(250_000)]
    return {"prompt": "x", "n": 31, "max_tokens": 2, "bad_words": words, "allowed_token_ids": allowed}


def _choices(**how: Any) -> list[list[Send]]:
    return [
        [_structured({"choice": [f"option {n} of {client}, {n * 7919 % _OPTIONS}" for n in range(_OPTIONS)]}, **how)]
        for client in range(24)
    ]


def _json_schemas() -> list[list[Send]]:
    """Objects with 1,500 required properties."""
    return [
        [_structured({"json": {"properties": (names := _properties(client)), "required": list(names)}})]
        for client in range(24)
    ]


def _properties(client: int) -> dict[str, Any]:
    return {f"p{client}_{n}": {"type": "string"} for n in range(1500)}


def _wrong_grammars() -> list[list[Send]]:
    nested = "[" * 5000
    patterns = ("(a{1,1000}){1,1000}", "(a|b)*a(a|b){25}", "(.*a.*b){30}", "((a?){50}){50}a{50}")
    wide = {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"const": j}}} for j in range(8)]} for i in range(8)]}
    many = {"choice": [f"option {n}" for n in range(200_000)]}
    grammars: list[dict[str, Any]] = [
        {"json": nested},
        {"json": wide},
        many,
        *({"regex": pattern} for pattern in patterns),
    ]
    return [[_structured(grammar)] for grammar in grammars]


def _metadata() -> bytes:
    """7 MB of unused metadata in a request that takes a while."""
    junk = ",".join(f'"{n % 65536 + 65536:x}"' for n in range(850_000))
    return b'{"prompt":"The ferry","max_tokens":300,"ignore_eos":true,"metadata":[%s]}' % junk.encode()


def _turns() -> dict[str, Any]:
    parts = [{"type": "text", "text": "a"}]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": parts} for n in range(20_000)]}


def _long(**how: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "ignore_eos": True, "temperature": 1, **how}


def _tags() -> dict[str, Any]:
    return {"pml": '<prompt schema="many">' + '<a b="c"/>' * 99_000 + "</prompt>"}


_ENDLESS = {"prompt": "The ferry", "stream": True, **_long(max_tokens=3000)}
_LISTED = 2000  # modules of the schema that clients read repeatedly


def attacks(filling: int) -> dict[str, Attack]:
    """All attacks by name, in the order of the table.

    Args:
        filling: Number of modules of FILL that fill the pool.
    """
    return {
        "list": Attack(
            'a prompt `["",1,1,…]` of 8 MB',
            _alike(_COMPLETIONS, lambda: _field("prompt", _list(b"1", 4_000_000, b'"",'))),
        ),
        "true": Attack(
            "a prompt of 1 MB of `true`", _alike(_COMPLETIONS, lambda: _field("prompt", _list(b"true", 200_000)))
        ),
        "ids": Attack(
            "a prompt of 1,000,000 ids", _alike(_COMPLETIONS, lambda: _field("prompt", _list(b"1", 1_000_000)))
        ),
        "messages": Attack("2 MB of wrong messages", _alike(_CHAT, lambda: _field("messages", _list(b"1", 1_000_000)))),
        "fields": Attack("10,000 unknown fields", _alike(_CHAT, lambda: {f"max_token_{n}": 1 for n in range(10_000)})),
        "schema-800": Attack("a schema of 800 modules, text between", _schemas(800)),
        "schema-1600": Attack("a schema of 1,600 modules, text between", _schemas(1600)),
        "text": Attack("a text of 8 MB", _alike(_COMPLETIONS, lambda: {"prompt": _SENTENCE * 290_000})),
        "word": Attack("one word of 8 MB", _alike(_COMPLETIONS, lambda: {"prompt": "a" * 8_000_000})),
        "fitting": Attack(
            "texts that just may be tokenized", _alike(_COMPLETIONS, lambda: {"prompt": "a b " * 8000}), clients=8
        ),
        "turns": Attack("20,000 turns in parts", _alike(_CHAT, _turns)),
        "texts": Attack(
            "a prompt of 50,000 texts",
            _alike(_COMPLETIONS, lambda: {"prompt": {"schema": "many", "content": ["a "] * 50_000}}),
            before=lambda: [_post(_SCHEMAS, _schema("many", 1))],
            after=lambda: [_deleted("many")],
        ),
        "tags": Attack("a prompt in PML of 99,000 tags", _alike(_COMPLETIONS, _tags)),
        "choices": Attack("6 choices of 4,000 at once", _choices, clients=6),
        "grammars": Attack("6 JSON Schemas of 1,500 properties at once", _json_schemas, clients=6),
        "wrong-grammars": Attack("grammars that are wrong, or too much", _wrong_grammars, clients=7),
        "stop-ids": Attack(
            "2,000,000 stop_token_ids", _alike(_COMPLETIONS, lambda: {"prompt": "x", "stop_token_ids": [5] * 2_000_000})
        ),
        "tokens": Attack(
            "n = 31 with 250,000 allowed_token_ids and 250 long bad_words", _alike(_COMPLETIONS, _named_tokens)
        ),
        "prompts": Attack(
            "64 prompts with n = 8, 400 tokens each",
            _alike(_COMPLETIONS, _long(prompt=[f"The town {n}" for n in range(64)], n=8)),
            clients=1,
        ),
        "answers": Attack(
            "40 answers of 400 tokens, 500 a minute",
            _alike(_COMPLETIONS, _long(prompt="The ferry")),
            clients=40,
            limited=True,
        ),
        "logprobs": Attack(
            "n = 64 with 20 log-probabilities",
            _alike(
                _CHAT,
                _long(
                    messages=[{"role": "user", "content": "x"}], n=64, max_tokens=180, logprobs=True, top_logprobs=20
                ),
            ),
        ),
        "list-schema": Attack(
            "8 clients that read a schema of 2,000 modules",
            lambda: [[Send("GET", f"{_SCHEMAS}/listed")]],
            clients=8,
            before=lambda: [_post(_SCHEMAS, _schema("listed", _LISTED, between=""))],
            after=lambda: [_deleted("listed")],
        ),
        "tokenize": Attack(
            "`/tokenize` of 8 MB, with strings",
            _alike("/tokenize", lambda: {"prompt": "a b c d " * 1_000_000, "return_token_strs": True}),
        ),
        "tokenize-fitting": Attack(
            "`/tokenize` of what it takes, with strings",
            _alike("/tokenize", lambda: {"prompt": "a b " * 8000, "return_token_strs": True}),
            clients=8,
        ),
        "metadata": Attack("20 bodies of 7 MB of metadata", _alike(_COMPLETIONS, _metadata), clients=20),
        "fill": Attack("a schema that fills the pool, deleted", lambda: _filling(filling), clients=1),
        "module": Attack(
            "a module longer than the context",
            lambda: [
                [
                    _post(
                        _SCHEMAS,
                        {"pml": f'<schema name="long"><module name="m">{_SENTENCE * 20_000}</module></schema>'},
                    )
                ]
            ],
        ),
        "leave": Attack("grammars whose clients hang up", lambda: _choices(leaves_s=0.1), clients=6),
        "leave-streams": Attack(
            "streams whose clients hang up", _alike(_COMPLETIONS, _ENDLESS, leaves_s=0.2), clients=16
        ),
        "slow-bodies": Attack(
            "32 bodies sent a byte at a time", _alike(_COMPLETIONS, _ENDLESS, trickles=True), clients=32
        ),
        "slow-readers": Attack("32 streams that nobody reads", _alike(_COMPLETIONS, _ENDLESS, reads=False), clients=32),
    }


def rounds_of(rounds: Sequence[list[Send]], clients: int) -> Iterator[list[list[Send]]]:
    """Yield the rounds of each client. Clients have different requests if there are enough rounds."""
    for client in range(clients):
        yield list(rounds[client % len(rounds) :: clients]) or [rounds[client % len(rounds)]]
