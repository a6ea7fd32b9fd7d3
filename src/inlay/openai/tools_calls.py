"""What the text of an answer is made of once calls of tools are told apart: pieces, and who finds them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from inlay.openai.tools_formats import KEYS
from inlay.openai.tools_json import parsed


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its text, or of a call.

    content: text; "" in a piece of a call.
    call: the number of the call, from 0; None in a piece of text.
    name: of the function, in the first piece of a call alone.
    arguments: JSON text, as far as it is there.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class AnswerParser(Protocol):
    """Tells calls from text while an answer grows. How it is cut into pieces changes nothing about the outcome."""

    def feed(self, text: str) -> list[Delta]:
        """What can be told now that this text has come."""

    def finish(self) -> list[Delta]:
        """What is left, now that no more text will come."""


def calls_in(text: str, names: Collection[str], key: str) -> list[tuple[str, str]]:
    """The calls that a JSON object or a list of objects is, each as a name and its arguments in JSON.

    names: the functions that there are. key: what arguments stand under; the other one of KEYS is taken as well.
    Empty for everything else: of a list, all must be calls.
    """
    try:
        value = parsed(text)
        made = [_call(one, names, key) for one in (value if isinstance(value, list) else [value])]
    except ValueError:
        return []
    return [call for call in made if call is not None] if None not in made else []


def _call(value: Any, names: Collection[str], key: str) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    given = [value[name] for name in (key, *KEYS) if value.get(name) is not None]
    arguments = given[0] if given else {}
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
