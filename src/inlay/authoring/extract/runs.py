"""Turns repeated windows into runs: disjoint stretches of text, each of which occurs only as a whole.

Two places are *aligned* if equal windows begin at the same distance before them. Aligned words are equal, and aligned
places form groups. A run is a chain of groups that always follow each other. It ends where some prompt has another word
or no repeated text beside it. So overlapping and nested repeats are split where the set of places that share the text
changes. (These are the unitigs of a compacted de Bruijn graph, with words for bases.)

``join_runs`` then turns runs into candidates for modules. A single prompt with a truncated document splits that
document into two runs for all prompts, but a module should be the whole document. So neighbours that nearly always
occur together become one run. Where only one of them occurs, it stays a run of its own. Runs that are too short for a
module join a neighbour, preferably on the same line: a heading that several documents share belongs to the text after
it.

``Corpus`` holds the prompts of a log in memory: their texts, their words as one array of numbers, and their repeated
windows. A word is one of these: letters of one kind with their capital, digits, a rule such as ``----``, or any other
single character. Each includes one space before it. Other white space forms words too. Scripts without spaces between
words (Chinese, Japanese, Thai, …) are cut into single characters. The end of a word depends only on the characters
directly around it. So the same text is cut the same way everywhere, except for the first word or two. The words of a
text, joined, are the text.

Repeated windows of a fixed number of words are found exactly, without a hash. They are named by doubling (Karp, Miller,
Rosenberg 1972). Words have numbers, and a window of 2 n words is named by the names of its halves. Equal pairs are
found by sorting, so equal names mean equal words. A window that occurs too seldom loses its name, and so do all windows
that contain it. This keeps the arrays short if little repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from inlay.authoring.extract.log import LogError, LoggedPrompt, LoggedTurn

TOGETHER = 0.9
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Runs:
    """The occurrences of runs, in the order of their places. Runs do not overlap.

    Attributes:
        starts: The first place of each occurrence, [occurrences].
        ids: The run of each occurrence, [occurrences].
        lengths: Words of each run, [runs].
    """

    starts: Longs
    ids: Ints
    lengths: Longs

    @property
    def stops(self) -> Longs:
        """The place after each occurrence."""
        return self.starts + self.lengths[self.ids]

    def beside(self, others: Runs) -> Runs:
        """These and others, which do not overlap them and whose ids follow theirs."""
        starts = np.concatenate((self.starts, others.starts))
        ids = np.concatenate((self.ids, others.ids + np.int32(len(self.lengths))))
        order = np.argsort(starts, kind="stable")
        return Runs(starts[order], ids[order].astype(np.int32), np.concatenate((self.lengths, others.lengths)))

    def only(self, runs: Bools) -> Runs:
        """Return the occurrences of the selected runs. Ids stay the same."""
        kept = runs[self.ids]
        return Runs(self.starts[kept], self.ids[kept], self.lengths)


def find_runs(names: Ints, size: int) -> Runs:
    """Return the runs made of named windows of ``size`` words. Every place in a named window is in exactly one run.

    Args:
        names: Name of the window at each place, from ``repeated_windows``.
        size: Words of a window.
    """
    groups = _aligned(names, size)
    before = np.concatenate(([NONE], groups[:-1])).astype(np.int32)
    after = np.concatenate((groups[1:], [NONE])).astype(np.int32)
    begins = (groups != NONE) & _varies(groups, before)
    ends = (groups != NONE) & _varies(groups, after)
    # a link must hold from both sides
    begins[1:] |= ends[:-1] & (groups[1:] != NONE)
    ends[:-1] |= begins[1:] & (groups[:-1] != NONE)
    starts = np.flatnonzero(begins)
    heads, ids = np.unique(groups[starts], return_inverse=True)
    lengths = np.zeros(len(heads), np.int64)
    lengths[ids] = np.flatnonzero(ends) + 1 - starts
    return Runs(starts, ids.astype(np.int32), lengths)


def _aligned(names: Ints, size: int) -> Ints:
    """Return the group of aligned places for each place, or NONE outside of all named windows."""
    places = np.arange(len(names), dtype=np.int32)
    latest = np.maximum.accumulate(np.where(names != NONE, places, np.int32(-size)), dtype=np.int32)
    behind = places - latest  # distance from the latest named window
    example = np.zeros(int(names.max(initial=NONE)) + 1, np.int32)  # one place of each window
    example[names[names != NONE]] = np.flatnonzero(names != NONE)
    groups = np.full_like(names, NONE)
    inside = np.flatnonzero(behind < size)
    groups[inside] = example[names[latest[inside]]] + behind[inside]
    return _united(groups, _alignments(names, groups, example, size))


def _alignments(names: Ints, groups: Ints, example: Ints, size: int) -> Longs:
    """Return pairs of groups that are one, [pairs, 2].

    Only windows with different successors are examined. Where the same window always follows, its alignment gives the
    same pairs.
    """
    branching = np.zeros(len(example), np.bool_)
    named = np.flatnonzero(names != NONE)
    found, following = names[named], names[named + 1]  # the last place is never named
    some = np.zeros(len(example), np.int32)
    some[found] = following
    branching[found[(following != some[found]) | (following == NONE)]] = True
    places = named[branching[found]]
    examples = example[names[places]]
    codes = [np.zeros(0, np.int64)]
    for shift in range(1, size):
        here, there = groups[places + shift], groups[examples + shift]
        differ = here != there
        if differ.any():
            codes.append(np.unique(here[differ].astype(np.int64) * len(names) + there[differ]))
    return np.stack(np.divmod(np.unique(np.concatenate(codes)), len(names)), axis=1)


def _united(groups: Ints, pairs: Longs) -> Ints:
    """Merge the groups of each pair: connected components, by spreading the smallest label."""
    if not len(pairs):
        return groups
    labels, ends = np.unique(pairs, return_inverse=True)
    one, other = ends.reshape(pairs.shape).T
    parents = np.arange(len(labels))
    while True:
        low, high = np.minimum(parents[one], parents[other]), np.maximum(parents[one], parents[other])
        if (low == high).all():
            break
        np.minimum.at(parents, high, low)
        parents = _roots(parents)
    table = np.arange(len(groups), dtype=np.int32)
    table[labels] = labels[parents]
    united = table[groups]
    united[groups == NONE] = NONE
    return united


def _roots(parents: Longs) -> Longs:
    while not np.array_equal(shorter := parents[parents], parents):
        parents = shorter
    return parents


def _varies(groups: Ints, beside: Ints) -> Bools:
    """Return, by place, True if the neighbours of its group's places are not all in one group."""
    kept = groups != NONE
    some = np.full(len(groups), NONE, np.int32)
    some[groups[kept]] = beside[kept]
    varies = np.zeros(len(groups), np.bool_)
    varies[groups[kept & ((beside != some[groups]) | (beside == NONE))]] = True
    return varies[groups]


@dataclass(frozen=True)
class _Joining:
    """The state of joining.

    Attributes:
        runs: The runs so far.
        claims: The most occurrences that a long part of each run had, 0 for a short run, [runs].
    """

    runs: Runs
    claims: Longs


def join_runs(runs: Runs, breaks: Bools, size: int, least: int) -> Runs:
    """Join neighbouring runs, pair by pair.

    Two short runs join if they meet at ``least`` places. Other pairs must meet at nine in ten places of either long
    run. A short run must also add more words than are lost at the other places.

    Args:
        runs: The runs to join.
        breaks: The word at each place holds a line break.
        size: A run of fewer words is short.
        least: The least number of places where two runs meet.
    """
    runs = _cut_at_breaks(runs, breaks, size)
    counts = np.bincount(runs.ids, minlength=len(runs.lengths))
    state = _Joining(runs, np.where(runs.lengths >= size, counts, 0))
    for _ in range(MAX_ROUNDS):
        chosen = _pairs(state, breaks, least)
        if not len(chosen):
            break
        state = _join(state, chosen, size)
    return state.runs


def _cut_at_breaks(runs: Runs, breaks: Bools, size: int) -> Runs:
    """Cut each short run in two after its last line break."""
    ids, first = np.unique(runs.ids, return_index=True)
    heads = np.zeros(len(runs.lengths), np.int64)  # words before the cut; 0 for none
    for run, start in zip(ids, runs.starts[first], strict=True):
        length = runs.lengths[run]
        if 1 < length < size:
            behind = np.flatnonzero(breaks[start : start + length - 1])
            heads[run] = behind[-1] + 1 if len(behind) else 0
    cut = np.flatnonzero(heads)
    tail_of = np.zeros(len(heads), np.int32)
    tail_of[cut] = len(heads) + np.arange(len(cut))
    lengths = np.concatenate((np.where(heads > 0, heads, runs.lengths), runs.lengths[cut] - heads[cut]))
    halved = heads[runs.ids] > 0
    starts = np.concatenate((runs.starts, runs.starts[halved] + heads[runs.ids[halved]]))
    order = np.argsort(starts, kind="stable")
    return Runs(starts[order], np.concatenate((runs.ids, tail_of[runs.ids[halved]]))[order], lengths)


def _pairs(state: _Joining, breaks: Bools, least: int) -> Longs:
    """Return the pairs to join now, [pairs, 3]: left, right, count. No run is left in one pair and right in another."""
    runs, known = state.runs, len(state.runs.lengths)
    meet = np.flatnonzero(_adjacent(runs))
    codes, one, counts = np.unique(_codes(runs)[meet], return_index=True, return_counts=True)
    left, right = codes // max(known, 1), codes % max(known, 1)
    fit = (left != right) & (counts >= least) & _pays(state, left, right, counts)
    pairs = np.stack((left, right, counts), axis=1)[fit]
    # long runs join short ones as long as that pays; then short runs join each other
    both_short = (state.claims[pairs[:, :2]] == 0).all(axis=1)
    pairs = pairs[np.lexsort((-pairs[:, 2], _seams(breaks, runs.starts[meet[one[fit]] + 1]), both_short))]
    # a run is only left or only right in a round, as in its first pair
    first = np.full((2, known), len(pairs))
    for side in (0, 1):
        np.minimum.at(first[side], pairs[:, side], np.arange(len(pairs)))
    is_left = first[0] < first[1]
    taken: Longs = pairs[is_left[pairs[:, 0]] & ~is_left[pairs[:, 1]]]
    return taken


def _seams(breaks: Bools, places: Longs) -> Longs:
    """Rate a border before these places: 0 within a line, 1 before a line break, 2 after one.

    Pairs with a poorly placed border join first.
    """
    return np.where(breaks[places], np.int64(1), np.where(breaks[places - 1], np.int64(2), np.int64(0)))


def _pays(state: _Joining, left: Longs, right: Longs, counts: Longs) -> Bools:
    """Return True for each pair of runs that should join. ``counts`` are their meetings."""
    lengths = state.runs.lengths
    lost = [np.maximum(state.claims[side] - counts, 0) for side in (left, right)]
    together = counts >= TOGETHER * np.maximum(state.claims[left], state.claims[right])
    short_left, short_right = (state.claims[side] == 0 for side in (left, right))
    gains_left = ~short_left | short_right | (counts * lengths[left] >= lost[1] * lengths[right])
    gains_right = ~short_right | short_left | (counts * lengths[right] >= lost[0] * lengths[left])
    pays: Bools = together & gains_left & gains_right
    return pays


def _adjacent(runs: Runs) -> Bools:
    """Return, by occurrence, True if the next one begins at its end."""
    return np.concatenate((runs.stops[:-1] == runs.starts[1:], [False]))[: len(runs.starts)]


def _codes(runs: Runs) -> Longs:
    """Return, by occurrence, a number for the pair of it and the next one."""
    following = np.concatenate((runs.ids[1:], [0]))[: len(runs.ids)]
    return runs.ids.astype(np.int64) * len(runs.lengths) + following


def _join(state: _Joining, pairs: Longs, size: int) -> _Joining:
    runs, known = state.runs, len(state.runs.lengths)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    known_codes, codes = pairs[:, 0] * known + pairs[:, 1], _codes(runs)
    which = np.minimum(np.searchsorted(known_codes, codes), len(pairs) - 1)
    joins = _adjacent(runs) & (known_codes[which] == codes)
    ids = np.where(joins, known + which, runs.ids).astype(np.int32)
    kept = np.concatenate(([True], ~joins[:-1]))[: len(ids)]
    lengths = np.concatenate((runs.lengths, runs.lengths[pairs[:, :2]].sum(axis=1)))
    claims = state.claims[pairs[:, :2]].max(axis=1)
    claims[claims == 0] = pairs[claims == 0, 2]
    claims[lengths[known:] < size] = 0
    return _Joining(Runs(runs.starts[kept], ids[kept], lengths), np.concatenate((state.claims, claims)))


_UPPER = "A-ZÀ-ÖØ-Þ"
_LOWER = "a-zß-öø-ÿ"
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(
    rf" ?(?:[{_UPPER}]?[{_LOWER}]+|[{_UPPER}]+|[0-9]+|[{_NO_SPACES}]"
    rf"|[^\W0-9_{_UPPER}{_LOWER}{_NO_SPACES}]+|[-=_*#~]+|[^\w\s])|\s+(?!\S)|\s"
)
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def split_words(text: str) -> list[str]:
    """Split a text into words. The words, joined, are the text."""
    return _WORD.findall(text)


def carried_by_xml(text: str) -> bool:
    """Return True if XML, and so a schema, can hold this text."""
    return not _NO_XML.search(text)


class Vocabulary:
    """Numbers words from 0 in the order of their first use. Equal numbers mean equal words."""

    def __init__(self) -> None:
        self._numbers = _Numbers()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the numbers of the words of a text."""
        words = split_words(text)
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the words in the order of their numbers."""
        return iter(self._numbers)


class _Numbers(dict[str, int]):
    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

END = -1
"""Follows the words of each turn, so that no run of words crosses from one turn into the next."""

MAX_WORDS = 2**27
"""The most words of a log. Finding repeats takes about 80 bytes for each."""


@dataclass(frozen=True)
class Corpus:
    """The prompts of a log.

    Attributes:
        lines: The line of each prompt, [prompts].
        first_turns: Prompt p holds the turns first_turns[p] … first_turns[p + 1] - 1, [prompts + 1].
        roles: The role of each turn, None for a prompt without turns, [turns].
        texts: The text of each turn in UTF-8, [turns].
        starts: The words of turn t are at the places starts[t] … starts[t + 1] - 2, followed by END, [turns + 1].
        words: The numbers of the words of all turns, [places].
        marks: First word and end of each part that its request marked, increasing and disjoint, [marked parts, 2].
        word_lengths: Characters of each word, [vocabulary].
        usable: Mask of the words that a schema can hold, [vocabulary].
        breaks: Mask of the words with a line break, [vocabulary].
    """

    source: str
    lines: Longs
    first_turns: Longs
    roles: tuple[str | None, ...]
    texts: tuple[bytes, ...]
    starts: Longs
    words: Ints
    marks: Longs
    word_lengths: Ints
    usable: Bools
    breaks: Bools

    @classmethod
    def of(cls, prompts: Iterable[LoggedPrompt], source: str = "<log>") -> Corpus:
        """Read all prompts. Raises LogError if they have more than ``MAX_WORDS`` words."""
        vocabulary = Vocabulary()
        lines, first_turns, starts = [], [0], [0]
        roles: list[str | None] = []
        texts: list[bytes] = []
        words: list[Ints] = []
        marks: list[tuple[int, int]] = []
        end = np.array([END], np.int32)
        for prompt in prompts:
            for turn in prompt.turns:
                found, marked = _encoded(vocabulary, turn)
                words += [found, end]
                marks += [(starts[-1] + start, starts[-1] + stop) for start, stop in marked]
                starts.append(starts[-1] + len(found) + 1)
                roles.append(turn.role)
                texts.append(turn.text.encode())
            lines.append(prompt.line)
            first_turns.append(len(roles))
            if starts[-1] > MAX_WORDS:
                part = "give a part of it, as in: head -n 10000 FILE | inlay schema from-prompts -"
                raise LogError(f"{source}: holds more than {MAX_WORDS:,} words; {part}", code="prompt.log_too_large")
        return cls(
            source=source,
            lines=np.array(lines, np.int64),
            first_turns=np.array(first_turns, np.int64),
            roles=tuple(roles),
            texts=tuple(texts),
            starts=np.array(starts, np.int64),
            words=np.concatenate(words or [end[:0]]),
            marks=np.array(marks, np.int64).reshape(-1, 2),
            word_lengths=np.fromiter(map(len, vocabulary), np.int32, len(vocabulary)),
            usable=np.fromiter(map(carried_by_xml, vocabulary), np.bool_, len(vocabulary)),
            breaks=np.fromiter(("\n" in word for word in vocabulary), np.bool_, len(vocabulary)),
        )

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.lines)

    def turns(self, prompt: int) -> range:
        """Return the turns of a prompt."""
        return range(int(self.first_turns[prompt]), int(self.first_turns[prompt + 1]))

    def places(self, turn: int) -> slice:
        """Return the places of a turn's words."""
        return slice(int(self.starts[turn]), int(self.starts[turn + 1]) - 1)

    def turn_of(self, places: Longs) -> Longs:
        """Return the turns that contain these places."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def prompts_of(self, places: Longs) -> Longs:
        """Return the prompts that contain these places."""
        return np.searchsorted(self.first_turns, self.turn_of(places), side="right") - 1

    def text(self, turn: int) -> str:
        """Return the text of a turn."""
        return self.texts[turn].decode()

    def cut(self, turn: int, borders: Iterable[int]) -> list[str]:
        """Cut the text of a turn before the words at these ascending places, into one piece more than places."""
        places = self.places(turn)
        ends = np.concatenate(([0], np.cumsum(self.word_lengths[self.words[places]], dtype=np.int64)))
        text = self.text(turn)
        characters = [0, *(int(ends[border - places.start]) for border in borders), len(text)]
        return [text[start:end] for start, end in pairwise(characters)]

    def spans(self, starts: Longs, stops: Longs) -> list[str]:
        """Return the texts of these stretches of words. Each lies within one turn. They ascend without overlap."""
        turns, first = np.unique(self.turn_of(starts), return_index=True)
        borders = np.stack((starts, stops), axis=1)
        groups = zip(turns.tolist(), np.split(borders, first[1:]), strict=True) if len(turns) else ()
        return [text for turn, group in groups for text in self.cut(turn, group.ravel().tolist())[1::2]]


def _encoded(vocabulary: Vocabulary, turn: LoggedTurn) -> tuple[Ints, list[tuple[int, int]]]:
    """Return the words of a turn, and the places of its marked parts among them. No word crosses such a border."""
    borders = [0, *(border for mark in turn.marks for border in mark), len(turn.text)]
    pieces = [vocabulary.encode(turn.text[start:stop]) for start, stop in pairwise(borders)]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    marked = [(ends[number - 1], ends[number]) for number in range(1, len(pieces), 2)]
    return np.concatenate(pieces), marked


NONE = -1
"""No name. The window occurs too seldom, holds an unusable word, or crosses the end of a turn."""


def repeated_windows(words: Ints, size: int, least: int, prompt_ends: Longs) -> Ints:
    """Name the window of ``size`` words at each place, or NONE.

    Args:
        words: Numbers of words, and NONE for unusable words. The last one is NONE.
        size: Words of a window.
        least: Number of different prompts that must hold a named window.
        prompt_ends: The place after each prompt, [prompts].

    Returns:
        Names 0, 1, 2, … by place. Two places have the same name if and only if the same words follow them.
    """
    names, length = _renamed(words, _often(words, least)), 1
    while length < size:
        bits = max(int(names.max(initial=0)).bit_length(), 1)
        # as many shorter windows as fit into one 64-bit key; the last two may overlap
        many = min(64 // bits, -(-size // length))
        shifts = [min(number * length, size - length) for number in range(many)]
        names = _joined(names, shifts, bits, least)
        length = shifts[-1] + length
    return _in_prompts(names, least, prompt_ends)


def _often(names: Ints, least: int) -> Longs:
    """Count each name, with 0 for names that occur less than ``least`` times."""
    counts = np.bincount(names[names != NONE])
    counts[counts < least] = 0
    return counts


def _renamed(names: Ints, counts: Longs) -> Ints:
    """Renumber the names with a count as 0, 1, 2, …, and replace the others by NONE."""
    fresh = np.full(len(counts) + 1, NONE, np.int32)  # the last element is for NONE itself
    kept = np.flatnonzero(counts)
    fresh[kept] = np.arange(len(kept), dtype=np.int32)
    return fresh[names]


def _joined(names: Ints, shifts: list[int], bits: int, least: int) -> Ints:
    """Name the windows that consist of the named windows at these shifts."""
    joined = np.full_like(names, NONE)
    room = len(names) - shifts[-1]
    if room <= 0:
        return joined
    whole = names[:room] != NONE
    for shift in shifts[1:]:
        whole &= names[shift : shift + room] != NONE
    places = np.flatnonzero(whole)
    keys = np.zeros(len(places), np.uint64)
    for shift in shifts:
        keys = (keys << np.uint64(bits)) | names[places + shift].astype(np.uint64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    group = np.cumsum(first) - 1
    often = np.bincount(group) >= least
    fresh = np.where(often, np.cumsum(often) - 1, NONE).astype(np.int32)
    joined[places[order]] = fresh[group]
    return joined


def _in_prompts(names: Ints, least: int, prompt_ends: Longs) -> Ints:
    """Keep the names of windows in at least ``least`` different prompts."""
    places = np.flatnonzero(names != NONE)
    order = np.argsort(names[places], kind="stable")  # so the prompts of one name ascend
    places = places[order]
    found, prompts = names[places], np.searchsorted(prompt_ends, places, side="right")
    fresh = np.concatenate(([True], (found[1:] != found[:-1]) | (prompts[1:] != prompts[:-1])))[: len(found)]
    counts = np.bincount(found[fresh], minlength=int(names.max(initial=NONE)) + 1)
    counts[counts < least] = 0
    return _renamed(names, counts)
