"""Asks an engine which texts it has stored, and chooses between texts of nearly equal relevance.

Documents are cut into chunks with borders that an edit does not move, or become marked parts of a message.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf, isnan
from typing import Any

from inlay.errors import ParameterError

_PARAGRAPH = re.compile(r"\n[ \t]*\n+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def chunks(text: str, *, least: int = 400, most: int = 2_000) -> list[str]:
    """Cut a text into chunks at paragraphs, or at sentences of long paragraphs.

    Whether a chunk begins at a paragraph depends only on the hash of the paragraph. So borders stay when text elsewhere
    changes: an edit changes its own chunk and at most its neighbours. The chunks, joined, are the text.

    Args:
        text: the text.
        least: the fewest characters of a chunk, except the last one.
        most: the most characters of a chunk, except for a longer sentence.

    Raises:
        ParameterError: ``least`` is below 1 or above half of ``most``.
    """
    if not 1 <= least <= most / 2:
        raise ParameterError(
            f"least is {least} and most is {most}; give a least of at least 1 and at most half of most",
            code="retrieval.wrong_setting",
        )
    found: list[str] = []
    held = ""
    # one border in as many pieces as fill the room between least and most on average
    for piece in _pieces(text, least):
        if held and (len(held) + len(piece) > most or (len(held) >= least and _begins(piece))):
            found.append(held)
            held = ""
        held += piece
    if held:
        found.append(held)
    return found


def _begins(piece: str) -> bool:
    """Return True if a chunk begins at this piece. It depends on the piece alone."""
    return zlib.crc32(piece.strip().encode()) % 4 == 0


def _pieces(text: str, longest: int) -> list[str]:
    """Cut a text behind each paragraph, and behind sentences of paragraphs longer than ``longest``."""
    paragraphs = _cut(text, _PARAGRAPH)
    return [
        piece
        for paragraph in paragraphs
        for piece in ([paragraph] if len(paragraph) <= longest else _cut(paragraph, _SENTENCE))
    ]


def _cut(text: str, border: re.Pattern[str]) -> list[str]:
    ends = [match.end() for match in border.finditer(text)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if end > start]


def marked_parts(texts: Sequence[str], question: str) -> list[dict[str, Any]]:
    """Return the content of a user's message: each text as a marked part, and the question behind them.

    A part has the text only. A score or a time in it would change its text at every request, so it would never be
    found.
    """
    marked = [{"type": "text", "text": part_text(text), "cache_control": {"type": "ephemeral"}} for text in texts]
    return [*marked, {"type": "text", "text": question}]


def part_text(text: str) -> str:
    """Return a document's text as a part has it: with a line break at its end."""
    return text if text.endswith("\n") else f"{text}\n"


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


def choose_cached(
    texts: Sequence[str], relevance: Sequence[float], scorer: Scorer, *, epsilon: float, most: int
) -> list[int]:
    """Choose texts as ``rerank`` does, with their value from a scorer. It is asked about open choices only.

    A text that is more than ``epsilon`` less relevant than the last place cannot be chosen. If no more texts than
    places are left, the scorer is not asked.

    Args:
        texts: candidates, such as retrieved documents.
        scorer: such as CacheScorer.
        relevance, epsilon, most: see ``rerank``.

    Returns:
        Indices of the chosen texts, by falling relevance.

    Raises:
        ParameterError: see ``rerank``.
    """
    value = [0.0] * len(texts)
    rerank(relevance, value, epsilon=epsilon, most=most)  # checks all
    places = sorted(relevance, reverse=True)[:most]
    open_to = [index for index, each in enumerate(relevance) if places and each >= _least(places[-1], epsilon)]
    if len(open_to) > len(places):
        for index, scored in zip(open_to, scorer([texts[index] for index in open_to]), strict=True):
            value[index] = scored
    return rerank(relevance, value, epsilon=epsilon, most=most)


def rerank(relevance: Sequence[float], value: Sequence[float], *, epsilon: float, most: int) -> list[int]:
    """Choose texts, the most relevant first; within ``epsilon``, prefer texts of high value.

    The text at place i is at most ``epsilon`` less relevant than the i-th most relevant text. Among all choices with
    this bound, the result has the highest sum of values. A place may take every text that an earlier place could take.
    So the best open text at each place is optimal.

    Args:
        relevance: one number per text, in the retriever's unit. Higher is better.
        value: one number per text, such as the seconds that its stored KV saves.
        epsilon: the most relevance to lose at a place, in the unit of ``relevance``. 0 keeps the retriever's choice.
        most: the number of texts to choose. All texts, if there are fewer.

    Returns:
        Indices of the chosen texts, by falling relevance.

    Raises:
        ParameterError: the lists differ in length, a number is NaN, or ``epsilon`` or ``most`` is negative.
    """
    if len(relevance) != len(value):
        raise ParameterError(
            f"there are {len(relevance)} relevances and {len(value)} values; give one of each for every text",
            code="retrieval.wrong_setting",
        )
    if not epsilon >= 0 or most < 0:
        raise ParameterError(
            f"epsilon is {epsilon} and most is {most}; give numbers that are not negative",
            code="retrieval.wrong_setting",
        )
    for name, numbers in (("relevance", relevance), ("value", value)):
        if (wrong := next((place for place, number in enumerate(numbers) if isnan(number)), None)) is not None:
            raise ParameterError(
                f"{name}[{wrong}] is NaN; give a number for every text", code="retrieval.wrong_setting"
            )
    ranked = sorted(range(len(relevance)), key=lambda index: -relevance[index])
    chosen: list[int] = []
    # Texts that this place may take, and no earlier place took: the best one first, by value, then by rank.
    open_to: list[tuple[float, int]] = []
    at = 0
    for place in range(min(most, len(ranked))):
        least = _least(relevance[ranked[place]], epsilon)
        while at < len(ranked) and relevance[ranked[at]] >= least:
            heappush(open_to, (-value[ranked[at]], at))
            at += 1
        chosen.append(ranked[heappop(open_to)[1]])
    return sorted(chosen, key=lambda index: (-relevance[index], index))


def _least(relevance: float, epsilon: float) -> float:
    """Return the least relevance within ``epsilon`` of this one."""
    return -inf if epsilon == inf else relevance - epsilon
