"""The latest prompts of each tenant and salt, for the diagnostics of later prompts."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
