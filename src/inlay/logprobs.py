"""Log-probabilities of one token, and flat arrays of them for an answer or a prompt.

An answer of a thousand tokens with twenty alternatives each has 21,000 of them. A dictionary of objects would take 5 KB
a token in half a million small allocations, and Python returns little of that memory to the system.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

#: A token id, its natural log-probability under the raw logits, and its rank from 1.
RankedLogprob = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model's own distribution, before temperature and filters.

    ``logprob`` is a natural logarithm. ``rank`` is 1 for the most probable token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Log-probabilities by token id; None for the first token of a prompt.
Entry = TypeVar("Entry", bound=dict[int, Logprob] | None)


class FlatLogprobs(Sequence[Entry], Generic[Entry]):
    """A list with an entry for each token. Its dictionaries are made on access (20 bytes a number).

    It equals a list of the same entries, and pickles as one. One thread may append while others read the results of
    ``so_far``.

    Args:
        entries: the initial entries.
        texts: token id → text, looked up on access. None for no texts.
    """

    __slots__ = ("_ends", "_ids", "_length", "_ranks", "_texts", "_values")

    def __init__(
        self, entries: Iterable[Sequence[RankedLogprob] | None] = (), texts: Mapping[int, str] | None = None
    ) -> None:
        self._ends, self._ids, self._values, self._ranks = array("q"), array("i"), array("d"), array("i")
        self._texts = texts
        self._length: int | None = None  # None while the list grows
        for entry in entries:
            self.append(entry)

    def append(self, entry: Sequence[RankedLogprob] | None) -> None:
        """Append the next token's log-probabilities: its own and the alternatives'. None for none."""
        assert self._length is None, "what others read does not grow"
        for token, logprob, rank in entry or ():
            self._ids.append(token)
            self._values.append(logprob)
            self._ranks.append(rank)
        self._ends.append(len(self._ids))  # last, because concurrent readers count these

    def so_far(self, texts: Mapping[int, str] | None = None) -> FlatLogprobs[Entry]:
        """Return the entries so far without a copy, as a list that does not grow. ``texts`` replaces its own."""
        taken: FlatLogprobs[Entry] = FlatLogprobs(texts=self._texts if texts is None else texts)
        taken._ends, taken._ids, taken._values, taken._ranks = self._ends, self._ids, self._values, self._ranks
        taken._length = len(self)
        return taken

    def ranked(self) -> Iterator[list[RankedLogprob] | None]:
        """Yield the entries as they were appended."""
        for at in range(len(self)):
            span = self._span(at)
            found = list(zip(self._ids[span], self._values[span], self._ranks[span], strict=True))
            yield found or None

    def __len__(self) -> int:
        return len(self._ends) if self._length is None else self._length

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> list[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[at]
        return self._entry(places) if isinstance(places, int) else [self._entry(place) for place in places]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _entry(self, at: int) -> Entry:
        span, texts = self._span(at), self._texts
        found = {
            token: Logprob(logprob, rank, None if texts is None else texts[token])
            for token, logprob, rank in zip(self._ids[span], self._values[span], self._ranks[span], strict=True)
        }
        return cast(Entry, found or None)

    def _span(self, at: int) -> slice:
        return slice(self._ends[at - 1] if at else 0, self._ends[at])
