"""Gives calls of a conversation the ids that a model's chat template shows or requires.

A server's own ids are opaque, and some templates write ids into the prompt, where the model expects its family's form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from inlay.api.tools.formats import ModelTools

_NINE = re.compile(r"[A-Za-z0-9]{9}")


def with_family_ids(messages: Sequence[dict[str, Any]], model: ModelTools | None) -> list[dict[str, Any]]:
    """Return messages whose calls and results have ids of the model's family. The ids depend on earlier turns alone.

    Args:
        messages: in the form of chat templates.
        model: the model's tools; None for a model without tools.
    """
    form = None if model is None else model.format.ids
    if form is None:
        return list(messages)
    ids: dict[str, str] = {}
    made, count = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            ids[call["id"]] = f"functions.{name}:{count}" if form == "numbered" else _nine(call["id"])
            calls.append({**call, "id": ids[call["id"]]})
            count += 1
        changed: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        made.append({**message, **changed})
    return made


def _nine(name: str) -> str:
    return name if _NINE.fullmatch(name) else hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:9]
