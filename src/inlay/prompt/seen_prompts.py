"""The latest prompts of each tenant and salt, and the first difference of a later prompt: its place and its kind."""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inlay import diagnostics
from inlay.prompt.tokens import common_length

_MAX_BYTES = 8 * 2**20
_MAX_PROMPTS = 8  # of one owner
_PROMPT_BYTES = 512  # of a prompt's bookkeeping
_OWNER_BYTES = 512  # of an owner's, with its name

#: The tenant and the salt of a prompt. It is compared with prompts of this owner alone.
Owner = tuple[str, str]


@dataclass(eq=False, slots=True)
class SeenPrompt:
    """A prompt with the first of its answers.

    Attributes:
        ids: its token ids, 4 bytes each. The answer is appended.
        prompt_tokens: the number of tokens in front of the answer.
        adapter: the digest of its adapter.
        policy: the written form of its reuse policy.
        kept: the number of its first tokens that may be stored.
        tools: the hash of its tools; 0 for none.
        ttl_s: the shortest lifetime of its parts in seconds. None for no limit.
        used: its last use, on the clock of ``time.monotonic``.
        stored: the number of its first tokens that are known to be computed and kept. 0 while it runs.
    """

    ids: bytes
    prompt_tokens: int
    adapter: bytes = b""
    policy: str = ""
    kept: int = 0
    tools: int = 0
    ttl_s: float | None = None
    used: float = field(default_factory=time.monotonic)
    stored: int = 0

    @property
    def bytes(self) -> int:
        return _PROMPT_BYTES + len(self.ids)

    @property
    def expired(self) -> bool:
        """True if the lifetime of one of its parts is over."""
        return self.ttl_s is not None and time.monotonic() - self.used > self.ttl_s


@dataclass(eq=False, slots=True)
class _Prompts:
    """The prompts of one owner, the most recently used last."""

    owner: Owner
    prompts: list[SeenPrompt] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return _OWNER_BYTES + 4 * sum(map(len, self.owner)) + sum(prompt.bytes for prompt in self.prompts)


class SeenPrompts:
    """The latest prompts of each owner: at most 8 of one owner, and 8 MiB in all. Thread-safe.

    The least recently active owners are dropped first. A prompt that continues an earlier one replaces it.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._owners: OrderedDict[Owner, _Prompts] = OrderedDict()  # the most recently active last
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of the table."""
        return self._bytes

    def note(self, owner: Owner, prompt: SeenPrompt) -> tuple[SeenPrompt, ...]:
        """Add a prompt. Returns the owner's earlier prompts, the most recently used last."""
        with self._lock:
            mine = self._taken(owner)
            earlier = tuple(mine.prompts)
            replaced = [one for one in earlier if _continues(prompt, one)]
            prompt.stored = max((one.stored for one in replaced), default=0)
            mine.prompts = [*(one for one in earlier if one not in replaced), prompt][-_MAX_PROMPTS:]
            self._put(mine)
            return earlier

    def answered(self, owner: Owner, prompt: SeenPrompt, answer: Sequence[int]) -> None:
        """Append an answer to its prompt. Does nothing if the prompt was dropped."""
        with self._lock:
            if owner not in self._owners:
                return
            mine = self._taken(owner)
            if prompt in mine.prompts:
                prompt.ids += packed(answer)
                prompt.used = time.monotonic()
                prompt.stored = prompt.kept + (len(answer) if prompt.kept == prompt.prompt_tokens else 0)
            self._put(mine)

    def forget(self, salt: str) -> None:
        """Drop the prompts of all owners with this salt. An answer that still runs is not added."""
        with self._lock:
            for owner in [each for each in self._owners if each[1] == salt]:
                self._taken(owner)

    def _taken(self, owner: Owner) -> _Prompts:
        mine = self._owners.pop(owner, None)
        if mine is None:
            return _Prompts(owner)
        self._bytes -= mine.bytes
        return mine

    def _put(self, mine: _Prompts) -> None:
        self._owners[mine.owner] = mine
        self._bytes += mine.bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._owners.popitem(last=False)[1].bytes


def _continues(prompt: SeenPrompt, earlier: SeenPrompt) -> bool:
    """True if a prompt equals an earlier one, or continues it with its answer."""
    if (prompt.adapter, prompt.policy) != (earlier.adapter, earlier.policy):
        return False
    whole = earlier.prompt_tokens == prompt.prompt_tokens and earlier.ids.startswith(prompt.ids)
    return whole or prompt.ids.startswith(earlier.ids)


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as 4 bytes each."""
    return array("I", ids).tobytes()


_GRAM = 8  # tokens that count as the same text
_NEAR = 24  # tokens: behind a changed word, the same text goes on within these
#: Two prompts that share fewer tokens behind the first difference are different prompts.
_LEAST_LOST = 16
_SHOWN = 40  # characters of either text around the departure
_MONTHS = r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
_MONTHS += r"|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
_DAYS = r"mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r(?:s(?:day)?)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"
_DATE = re.compile(rf"\d+|\b(?:{_MONTHS}|{_DAYS})\b", re.IGNORECASE)
_REASONING = re.compile(r"<((?:seed:)?think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)", re.DOTALL)

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of a prompt's text.

    Args:
        name: ``messages[1]``, ``tools``, or the path of a module.
        kind: system, message, tools, module or prompt.
        text: it stands in the prompt as it is, perhaps without the white space around it.
    """

    name: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A prompt, compared with an earlier one.

    Args:
        first: the number of tokens that both begin with.
        again: (tokens,) of bool. True for tokens behind ``first`` that the earlier prompt has, too.
        ends: True if one of the prompts ends at ``first``.
    """

    first: int
    again: np.ndarray
    ends: bool

    @property
    def nearness(self) -> int:
        """Return the number of tokens that both prompts have. Tokens of the common prefix count twice."""
        return 2 * self.first + int(self.again.sum())


def compare(earlier: np.ndarray, ids: np.ndarray) -> Compared:
    """Compare the token ids of two prompts, (tokens,) each."""
    first = common(earlier, ids)
    starts = first + np.flatnonzero(np.isin(_grams(ids[first:]), _grams(earlier[first:])))
    edges = np.zeros(len(ids) + 1, int)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + _GRAM, -1)
    return Compared(first, edges.cumsum()[:-1] > 0, first in (len(earlier), len(ids)))


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())


def depart(
    earlier: np.ndarray,
    ids: np.ndarray,
    compared: Compared,
    sections: Sequence[Section],
    texts: tuple[str, str],
    *,
    tools: bool,
) -> diagnostics.Departure | None:
    """Describe the difference between a prompt and an earlier one.

    Args:
        earlier, ids: token ids of the two prompts.
        compared: the result of ``compare``.
        sections: of the prompt, in the order of its text.
        texts: of the earlier prompt and of the prompt.
        tools: True if the two prompts have different tools.

    Returns:
        None if one of them begins with the other. ``lost_tokens`` counts all tokens that the earlier prompt has, too.
    """
    if compared.ends:
        return None
    old, new = texts
    at = common_length(old, new)
    place, kind, inside = section_at(sections, new, at)
    return diagnostics.Departure(
        token=compared.first,
        place=place,
        stored_text=_around(old, at),
        new_text=_around(new, at),
        lost_tokens=int(compared.again.sum()),
        kind=_kind(earlier, ids, compared, old, new, at, kind, tools=tools and not (inside and kind == "system")),
    )


def _kind(
    earlier: np.ndarray,
    ids: np.ndarray,
    compared: Compared,
    old: str,
    new: str,
    at: int,
    section: str,
    *,
    tools: bool,
) -> str:
    if tools and section in ("tools", "system", "template"):
        return diagnostics.TOOLS
    if _drops_reasoning(old, new, at):
        return diagnostics.THINKING
    if int(compared.again.sum()) < _LEAST_LOST:
        return diagnostics.NEW
    moved = _moved(earlier, ids, compared.first)
    if section in ("template", "system", "prompt") and not moved and _only_dates(old, new, at):
        return diagnostics.TEMPLATE_DATE if section == "template" else diagnostics.DATE
    if moved:
        return diagnostics.MOVED
    return diagnostics.SYSTEM if section in ("system", "template") else diagnostics.MESSAGE


def _drops_reasoning(old: str, new: str, at: int) -> bool:
    """True if the earlier text has reasoning at this place, and the new text continues behind this reasoning."""
    block = next((one for one in _REASONING.finditer(old) if at < one.end()), None)
    if block is None or at < block.start():
        return False
    rest = old[block.end() :].lstrip()[:12]
    here = new[block.start() : at + 200]
    return rest in here if rest else _REASONING.match(here) is None


def _only_dates(old: str, new: str, at: int) -> bool:
    """True if the lines at this place differ in digits and names of days and months alone.

    Of a long line, 40 characters behind the difference count.
    """
    one, other = (_line_at(text, at) for text in (old, new))
    plain, changed = _DATE.sub("#", one), _DATE.sub("#", other)
    differs = common_length(one, other)
    enough = len(_DATE.sub("#", one[:differs])) + _SHOWN
    return one != other and (plain == changed or common_length(plain, changed) >= enough)


def _line_at(text: str, at: int) -> str:
    """Return the line around a character, at most 200 characters to each side. It ends at a template's mark, too."""
    begin = max(text.rfind("\n", max(0, at - 200), at) + 1, at - 200, 0)
    return text[begin:at] + re.split(r"\n|<\|", text[at : at + 200], maxsplit=1)[0]


def _moved(earlier: np.ndarray, ids: np.ndarray, first: int) -> bool:
    """True if the text at the departure stands at another place in the earlier prompt."""
    old, new = _grams(earlier[first:]), _grams(ids[first : first + _NEAR + _GRAM])
    for at, gram in enumerate(new):
        found = np.flatnonzero(old == gram)
        if len(found):
            return int(np.abs(found - at).min()) > _NEAR
    return False


def section_at(sections: Sequence[Section], text: str, at: int) -> tuple[str, str, bool]:
    """Return the name and the kind of the section with a character, and False if the character is right behind it."""
    end, touching = 0, None
    for section in sections:
        if section.kind == "tools":  # a template may write tools in front of any message
            start = text.find(section.text)
            if 0 <= start <= at < start + len(section.text):
                return section.name, section.kind, True
            continue
        body = section.text.strip()
        start = text.find(body, end) if body else -1
        if start < 0:
            continue
        if at < start:
            break
        end = start + len(body)
        if at < end:
            return section.name, section.kind, True
        touching = section if at == end else None
    return ("template", "template", False) if touching is None else (touching.name, touching.kind, False)


def _around(text: str, at: int) -> str:
    half = _SHOWN // 2
    return text[max(0, at - half) : at + half]


def _grams(ids: np.ndarray) -> np.ndarray:
    """Return a hash of each run of _GRAM tokens, (tokens - _GRAM + 1,)."""
    length = max(0, len(ids) - _GRAM + 1)
    made = np.zeros(length, np.uint64)
    for offset in range(_GRAM):
        made = made * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + length].astype(np.uint64) + np.uint64(1)
    return made
