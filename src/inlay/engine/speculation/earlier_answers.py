"""The last answers of each cache salt, in which later answers of that salt are looked up."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from inlay.engine.speculation.text_index import LEAST_MATCH, GrowingIndex, TextMatch, match_at

#: The most tokens of one answer that are kept, its last ones.
MOST_OF_ANSWER = 2048
#: The most tokens of one salt. Each takes about 150 bytes.
MOST_OF_SALT = 2**14
#: The most tokens of all salts.
MOST_TOKENS = 2**16


@dataclass(eq=False, slots=True)
class EarlierAnswer:
    """A finished answer.

    Attributes:
        ids: its tokens.
        modules: the keys of the modules in its prompt.
        until: the end of its lifetime, on the clock of ``time.monotonic``. None for no end.
        dropped: True once it was dropped, for answers that copy from it at that time.
    """

    ids: tuple[int, ...]
    modules: frozenset[bytes]
    until: float | None = None
    dropped: bool = False

    @property
    def gone(self) -> bool:
        """True if nothing may be copied from it any more."""
        return self.dropped or (self.until is not None and time.monotonic() >= self.until)


@dataclass(slots=True)
class _Answers:
    """The answers of one salt, oldest first. ``places``: by key, the last answer that contains it, and the place."""

    answers: deque[EarlierAnswer] = field(default_factory=deque)
    places: dict[int, tuple[EarlierAnswer, int]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, answer: EarlierAnswer) -> None:
        self.answers.append(answer)
        self.tokens += len(answer.ids)
        self.places.update((key, (answer, place)) for key, place in GrowingIndex(answer.ids).places.items())

    def drop(self, answer: EarlierAnswer) -> None:
        answer.dropped = True
        self.answers.remove(answer)
        self.tokens -= len(answer.ids)
        for key in GrowingIndex(answer.ids).places:
            if key in self.places and self.places[key][0] is answer:
                del self.places[key]


class EarlierAnswers:
    """The last answers of each salt. Within a salt the oldest go first, then the salts without a new answer."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, _Answers] = OrderedDict()
        self.tokens = 0

    def add(self, salt: str, ids: Sequence[int], modules: frozenset[bytes], ttl_s: float | None = None) -> None:
        """Keep an answer, and drop those of its salt that have expired.

        Args:
            salt: the cache salt of its request.
            ids: its tokens.
            modules: the keys of the modules in its prompt.
            ttl_s: its lifetime in seconds. None for no end.
        """
        if len(ids) <= LEAST_MATCH:
            return
        own = self._salts.setdefault(salt, _Answers())
        self._salts.move_to_end(salt)
        for expired in [each for each in own.answers if each.gone]:
            self._drop(own, expired)
        answer = EarlierAnswer(
            tuple(ids[-MOST_OF_ANSWER:]), modules, None if ttl_s is None else time.monotonic() + ttl_s
        )
        own.add(answer)
        self.tokens += len(answer.ids)
        while own.tokens > MOST_OF_SALT:
            self._drop(own, own.answers[0])
        while self.tokens > MOST_TOKENS:
            self.forget_salt(next(iter(self._salts)))

    @property
    def salts(self) -> int:
        """The number of salts with answers."""
        return len(self._salts)

    def find(self, salt: str, text: GrowingIndex) -> tuple[EarlierAnswer, TextMatch] | None:
        """The last answer of a salt that contains the end of a text. None if none does."""
        own = self._salts.get(salt)
        found = None if own is None else own.places.get(text.key)
        if found is None or found[0].gone:
            return None
        match = match_at(found[1], found[0].ids, text)
        return None if match is None else (found[0], match)

    def forget_salt(self, salt: str) -> None:
        """Drop the answers of a salt."""
        own = self._salts.pop(salt, None)
        if own is not None:
            self.tokens -= own.tokens
            for answer in own.answers:
                answer.dropped = True

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Drop the answers to prompts with any of these modules."""
        for own in self._salts.values():
            for answer in [each for each in own.answers if not keys.isdisjoint(each.modules)]:
                self._drop(own, answer)
        for salt in [salt for salt, own in self._salts.items() if not own.answers]:
            del self._salts[salt]

    def clear(self) -> None:
        """Drop all answers."""
        for salt in [*self._salts]:
            self.forget_salt(salt)

    def _drop(self, own: _Answers, answer: EarlierAnswer) -> None:
        own.drop(answer)
        self.tokens -= len(answer.ids)
