"""Parses answers in OpenAI's harmony format: messages, each with a channel and perhaps a recipient.

``<|channel|>analysis<|message|>…<|end|>`` is reasoning, and ``final`` is content. A ``commentary`` to
``functions.weather`` is a call of that function, whose arguments are returned as they come. Any other commentary is
content. A message to an unknown recipient is returned as it was written.
"""

from __future__ import annotations

import re
from typing import Any

from inlay.api.reasoning import Thought
from inlay.api.tools.free_parser import Marks
from inlay.api.tools.parsers import Delta
from inlay.api.tools.readers import LONGEST_HEAD, Functions

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
#: The marks behind a message. The last two end the answer.
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_HEADER = re.compile(r"(?:<\|start\|>)?\s*(?:assistant)?[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?")
_BEGINNINGS = (START, CHANNEL, "assistant", " to=")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<|\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTION = "functions."


class HarmonyParser:
    """Separates reasoning, content and calls in a growing answer. The result does not depend on its division.

    Args:
        functions: the known functions.
        parallel: the answer continues after its first call.
    """

    def __init__(self, functions: Functions, *, parallel: bool) -> None:
        self._functions = functions
        self._parallel = parallel
        self._ends = Marks((*ENDS, START))
        self._rest = ""
        self._header: str | None = ""  # the header that is being read; None inside a message
        #: The current message: reasoning, a call by its number, or content.
        self._kind: type[Thought] | int | None = None
        self._thoughts = 0
        self._calls = 0
        self._over = False
        self._told: list[Thought | Delta] = []

    def feed(self, text: str) -> list[Thought | Delta]:
        """Add text, and return the new pieces that are certain."""
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Thought | Delta]:
        """Return the rest at the end of the answer."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Thought | Delta]:
        while not self._over and (self._read_header(final) if self._header is not None else self._read_body(final)):
            pass
        told, self._told = self._told, []
        return told

    def _read_header(self, final: bool) -> bool:
        """Read the header of a message, up to its mark. Text that is no header is content."""
        at = self._rest.find(MESSAGE)
        header = self._rest if at < 0 else self._rest[:at]
        if at >= 0 and header.startswith(_BEGINNINGS) and _HEADER.fullmatch(header):
            self._rest = self._rest[at + len(MESSAGE) :]
            self._open(header)
            return True
        if at < 0 and not final and len(header) <= LONGEST_HEAD and _may_begin(header):
            return False
        if final and (self._rest in ENDS or (self._rest.startswith("<|") and _HEADER.fullmatch(self._rest))):
            self._rest = ""  # the answer ends before its next message
        self._header, self._kind = None, None
        return bool(self._rest)

    def _open(self, header: str) -> None:
        """Begin the message with this header."""
        self._header = None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTION) if recipient else None
        if name is not None and name in self._functions:
            if self._calls and not self._parallel:
                self._over = True
                return
            self._kind = self._calls
            self._told.append(Delta(call=self._calls, name=name))
            self._calls += 1
        elif name is not None:
            self._kind = None
            self._say(header + MESSAGE)
        elif channel is not None and channel[1] == "analysis":
            self._kind = Thought
            self._thoughts += 1
            if self._thoughts > 1:
                self._say("\n")
        else:
            self._kind = None

    def _read_body(self, final: bool) -> bool:
        found = self._ends.find(self._rest, final)
        if found is None:
            certain = len(self._rest) - (0 if final else self._ends.held(self._rest))
            self._say(self._rest[:certain])
            self._rest = self._rest[certain:]
            return False
        self._say(self._rest[: found.start()])
        self._rest = self._rest[found.start() if found[0] == START else found.end() :]
        self._header = ""
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        last = self._told[-1] if self._told else None
        if self._kind is Thought:
            if isinstance(last, Thought):
                text = last.text + text
                self._told.pop()
            self._told.append(Thought(text))
        elif isinstance(self._kind, int):
            self._told.append(Delta(call=self._kind, arguments=text))
        else:
            self._told.append(Delta(text))


def _may_begin(header: str) -> bool:
    """True if this text is the start of a header, or may become one."""
    return any(header.startswith(one) or one.startswith(header) for one in _BEGINNINGS)


def forced(functions: Functions, form: Any = None) -> dict[str, Any]:
    """Return the structural tag of an answer that calls one of these functions.

    Args:
        functions: the functions and the schemas of their arguments.
        form: the schema of an answer without a call; None if there must be a call.
    """
    structures: list[dict[str, Any]] = [
        {"begin": f"{CHANNEL}commentary to={_FUNCTION}{name} <|constrain|>json{MESSAGE}", "schema": schema, "end": ""}
        for name, schema in functions.items()
    ]
    if form is not None:
        structures.append({"begin": f"{CHANNEL}final{MESSAGE}", "schema": form, "end": ""})
    return {"structures": structures, "triggers": [CHANNEL], "forced": True, "lead": f"{START}assistant"}
