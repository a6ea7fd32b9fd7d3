"""Arguments of past calls that are no JSON object: templates write objects, and these texts come out as they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAME = "arguments"  # under which a template that lists arguments by name sees such a text


class VerbatimArguments:
    """The texts that stand in messages as arguments of calls, each with a mark that a template shows in its place.

    A template writes arguments as JSON, as they are, or each by its name. A text would come out quoted, or not at all.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._messages = messages
        found = [_arguments(call) for message in messages for call in message.get("tool_calls") or ()]
        self.texts = {_mark(text): text for text in found if isinstance(text, str)}

    def as_texts(self) -> list[dict[str, Any]]:
        """The messages with marks as arguments."""
        return self._with(lambda mark: mark)

    def as_objects(self) -> list[dict[str, Any]]:
        """The messages with objects that hold marks as arguments."""
        return self._with(lambda mark: {_NAME: mark})

    def are_shown(self, rendered: str) -> bool:
        """Whether a rendering has all the marks."""
        return all(mark in rendered for mark in self.texts)

    def put(self, rendered: str) -> str:
        """The rendering with the texts in place of their marks, and of the JSON that these stand in."""
        for mark, text in self.texts.items():
            written = rf'\{{\s*"{_NAME}":\s*"{mark}"\s*\}}|"{mark}"|{mark}'
            rendered = text.join(re.split(written, rendered))
        return rendered

    def _with(self, form: Callable[[str], Any]) -> list[dict[str, Any]]:
        return [
            {**message, "tool_calls": [_replaced(call, form) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else dict(message)
            for message in self._messages
        ]


def _replaced(call: Mapping[str, Any], form: Callable[[str], Any]) -> Mapping[str, Any]:
    text = _arguments(call)
    if not isinstance(text, str):
        return call
    return {**call, "function": {**call["function"], "arguments": form(_mark(text))}}


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments")


def _mark(text: str) -> str:
    return f"@arguments-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:24]}@"
