"""Chat turns in a program: ``with inlay.user():``. While the function runs as plain Python, they note who speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Messages = list[dict[str, str]]

_heard: ContextVar[Messages | None] = ContextVar("inlay_turns", default=None)


def system() -> AbstractContextManager[None]:
    """A system turn of a program; stands at its top level."""
    return _turn("system")


def user() -> AbstractContextManager[None]:
    """A user turn of a program; stands at its top level."""
    return _turn("user")


def assistant() -> AbstractContextManager[None]:
    """An assistant turn of a program; stands at its top level."""
    return _turn("assistant")


TURNS = {system: "system", user: "user", assistant: "assistant"}


def as_messages(pieces: Iterable[str]) -> Messages:
    """What a running program says, turn by turn. All of its text stands inside turns."""
    messages: Messages = []
    token = _heard.set(messages)
    try:
        for piece in pieces:
            messages[-1]["content"] += piece
    finally:
        _heard.reset(token)
    return messages


@contextmanager
def _turn(role: str) -> Iterator[None]:
    messages = _heard.get()
    if messages is not None:
        messages.append({"role": role, "content": ""})
    yield
