"""One line of a batch's input: ``{"custom_id": …, "method": "POST", "url": …, "body": …}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from inlay.errors import InlayError
from inlay.openai import Endpoint
from inlay.openai.values import shown
from inlay.pml.problems import lone_surrogate

MAX_LINE_BYTES = 64 * 2**20

_KEYS = ("custom_id", "method", "url", "body")
_EXAMPLE = '{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'


class LineError(InlayError):
    """A line is no request. ``custom_id`` is what it calls itself, or None where that cannot be told."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request as it stands in the file; its body is not looked at yet."""

    custom_id: str
    endpoint: Endpoint
    body: Any


def parse_line(data: bytes, *, first: bool = False) -> BatchLine:
    """A line of the input. first: whether a byte order mark may stand before it. Raises LineError."""
    value = _json(_text(data, first))
    if not isinstance(value, Mapping):
        raise LineError(f"this is {shown(value)}; write {_EXAMPLE}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        what = f"custom_id is {shown(custom_id)}" if "custom_id" in value else "there is no custom_id"
        raise LineError(f"{what}; write a text that no other line has")
    problem = _problem(value)
    if problem:
        raise LineError(problem, custom_id)
    return BatchLine(custom_id, Endpoint(value["url"]), value["body"])


def _text(data: bytes, first: bool) -> str:
    if len(data) > MAX_LINE_BYTES:
        raise LineError(f"the line is longer than {MAX_LINE_BYTES:,} bytes; make several requests of it")
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise LineError(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from None


def _json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
        halves = "\\u" in text and lone_surrogate(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise LineError("the JSON is nested too deeply; nest it less") from None
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise LineError(f"this is not JSON ({reason}); write {_EXAMPLE} on one line") from None
    if halves:
        raise LineError("a text holds half a character (a lone surrogate); cut texts between characters")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no value of JSON")


def _problem(line: Mapping[str, Any]) -> str | None:
    """What is wrong with a line that has a custom_id."""
    for name in line:
        if name not in _KEYS:
            return f"a line has no field {shown(name)}; its fields are {', '.join(_KEYS)}"
    for name in _KEYS:
        if name not in line:
            return f"there is no {name}; write {_EXAMPLE}"
    if line["method"] != "POST":
        return f'method is {shown(line["method"])}; write "POST"'
    if line["url"] not in list(Endpoint):
        return f"url is {shown(line['url'])}; inlay answers {' and '.join(Endpoint)}"
    return None
