"""Asks an engine which texts it has stored."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from inlay.retrieval.parts import part_text

#: Returns a value for each text: the time that its stored KV saves.
Scorer = Callable[[Sequence[str]], Sequence[float]]

_MOST = 1_000  # texts of a request


class CacheScorer:
    """Scores texts by the stored tokens that a server reports at ``/v1/cache/score``.

    Texts are scored as ``marked_parts`` writes them. If the server does not answer, all texts score 0, so that
    retrieval goes on without it.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        api_key: of a server with keys.
        messages: the messages in front of the texts, usually the system message. They must be those of the later chat.
        reuse: the reuse policy of the later chat. None for the server's default.
        alone: True if each chat has one text.
        timeout_s: the most seconds to wait for an answer.

    Attributes:
        error: the reason that the last call failed. None if it succeeded.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        messages: Sequence[dict[str, Any]] = (),
        reuse: str | None = None,
        alone: bool = False,
        timeout_s: float = 2.0,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/cache/score"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields: dict[str, Any] = {"messages": list(messages)} | ({} if reuse is None else {"reuse": reuse})
        self._fields |= {"alone": True} if alone else {}
        self._timeout_s = timeout_s
        self.error: str | None = None

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return the stored tokens of each text."""
        self.error = None
        try:
            return [
                float(row["resident_tokens"])
                for first in range(0, len(texts), _MOST)
                for row in self._ask(texts[first : first + _MOST])
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            body = error.read(2_000).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            self.error = f"{error} {body}".strip()
            return [0.0] * len(texts)

    def _ask(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        body = json.dumps({**self._fields, "texts": list(map(part_text, texts))}).encode()
        asked = urllib.request.Request(self._url, body, self._headers, method="POST")
        with urllib.request.urlopen(asked, timeout=self._timeout_s) as answer:
            rows: list[dict[str, Any]] = json.loads(answer.read())["data"]
        if len(rows) != len(texts):
            raise ValueError(f"{len(rows)} scores for {len(texts)} texts")
        return rows
