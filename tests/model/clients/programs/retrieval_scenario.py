"""What the retrieval programs share: four texts, a chat about some of them, and what must be chosen afterwards."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from inlay.retrieval import marked_parts

SYSTEM = {"role": "system", "content": "Answer from the documents."}
TEXTS = [f"{name} is a ship of {place}. Its captain is {captain}. " * 4 for name, place, captain in (
    ("Star", "Gamin", "Ada"), ("Moon", "Bravel", "Bo"), ("Sun", "Monar", "Cy"), ("Reef", "Tamor", "Di"),
)]  # fmt: skip
#: The third text is slightly less relevant than the second one, and the last one much less.
RELEVANCE = [0.9, 0.70, 0.69, 0.1]


def answer(base: str, message: dict[str, Any]) -> dict[str, Any]:
    """Ask a chat of the system message and this one. Returns the usage."""
    body = {"model": "demo", "messages": [SYSTEM, message], "max_tokens": 4}
    asked = urllib.request.Request(
        f"{base}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        usage: dict[str, Any] = json.loads(response.read())["usage"]
    return usage


def check_answer(base: str, chosen: Callable[[float], list[str]]) -> None:
    """Store the last two texts instead of the first two, and check what is chosen for several epsilons."""
    assert chosen(0.0) == TEXTS[:2]
    assert chosen(0.05) == TEXTS[:2]  # both are stored by the first chat
    evict(base)
    answer(base, {"role": "user", "content": marked_parts(TEXTS[2:], "Who?")})
    assert chosen(0.0) == TEXTS[:2]
    assert chosen(0.05) == [TEXTS[0], TEXTS[2]]
    print(json.dumps({"scenario": "retrieval", "error": None}))


def evict(base: str) -> None:
    """Evict everything of the caller."""
    asked = urllib.request.Request(f"{base}/cache/segments", method="DELETE")
    urllib.request.urlopen(asked, timeout=60).close()
