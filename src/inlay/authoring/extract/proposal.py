"""A schema for a log, and each prompt of the log as a prompt of that schema.

Modules get an order, unions and names. Names are readable and unique, and the same log always gives the same names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inlay.authoring.extract.find import ChosenPieces, Cover, SchemaFrame
from inlay.authoring.extract.runs import Bools, Corpus, Longs
from inlay.errors import Place
from inlay.pml import Import, Module, Prompt, PromptTurn, Schema, Text, Turn, Union, numbered
from inlay.pml.attributes import TAGS, objection


@dataclass(frozen=True)
class Proposal:
    """A schema, and its use by the log's prompts.

    Attributes:
        names: The names of the modules, by piece.
        moved: Number of prompts that import modules in another order than the schema's.
    """

    corpus: Corpus
    frame: SchemaFrame | None
    choice: ChosenPieces
    arrangement: Arrangement
    names: tuple[str, ...]
    schema: Schema
    moved: int = field(default=0)

    def fits(self, prompt: int) -> bool:
        """Return True if a prompt of the log can be written as a prompt of the schema."""
        return self.frame is None or bool(self.frame.prompts[prompt])

    def prompt(self, prompt: int) -> Prompt | None:
        """Return a prompt of the log as a prompt of the schema with the same text, or None if it does not fit.

        It may need ``resolve(…, moves=True)``: see ``moved``.
        """
        if not self.fits(prompt):
            return None
        place = Place(self.corpus.source, int(self.corpus.lines[prompt]))
        turns = self.corpus.turns(prompt)
        children: list[Text | Import | PromptTurn] = []
        if self.frame is not None:
            open_turn = len(self.frame.example) - 1
            children += self._parts(prompt, turns[open_turn], place, self.frame.opening)
            turns = turns[open_turn + 1 :]
        for turn in turns:
            role, parts = self.corpus.roles[turn], self._parts(prompt, turn, place)
            children += parts if role is None else [PromptTurn(role, parts, place)]
        return Prompt(self.schema.name, tuple(children), place.source, place)

    def _parts(self, prompt: int, turn: int, place: Place, skipped: int = 0) -> tuple[Text | Import, ...]:
        """Return a turn without its first ``skipped`` words, as imports and new text."""
        cover, places = self.choice.cover, self.corpus.places(turn)
        here = cover.of(prompt)
        starts, stops, pieces = cover.starts[here], cover.stops[here], cover.pieces[here]
        inside = (starts >= places.start) & (starts < places.stop)
        borders = np.stack((starts[inside], stops[inside]), axis=1).ravel()
        texts = self.corpus.cut(turn, [places.start + skipped, *borders.tolist()])[1:]
        parts: list[Text | Import] = []
        for number, text in enumerate(texts):
            if number % 2:
                parts.append(Import(self.names[pieces[inside][number // 2]], (), (), place))
            elif text:
                parts.append(Text(text, place))
        return tuple(parts)


def propose(corpus: Corpus, frame: SchemaFrame | None, choice: ChosenPieces, name: str) -> Proposal:
    """Make a schema of the chosen pieces, after the frame if there is one."""
    arrangement = arrange(corpus, choice.cover, len(choice.pieces))
    names = names_for(piece.text for piece in choice.pieces)
    place = Place(corpus.source)
    groups = [
        [Module(names[piece], (Text(choice.pieces[piece].text, place),), place) for piece in group]
        for group in arrangement.groups
    ]
    modules = tuple(Union(tuple(group), place) if len(group) > 1 else group[0] for group in groups)
    children = modules if frame is None else _behind(corpus, frame, modules, place)
    schema = Schema(name, numbered(children))
    return Proposal(corpus, frame, choice, arrangement, tuple(names), schema, _moved(choice, arrangement))


def _behind(
    corpus: Corpus, frame: SchemaFrame, modules: tuple[Module | Union, ...], place: Place
) -> tuple[Text | Module | Union | Turn, ...]:
    """Return the frame, with the modules at its end."""
    *whole, last = frame.example
    front = corpus.cut(last, [corpus.places(last).start + frame.opening])[0]
    content = (*((Text(front, place),) if front else ()), *modules)
    role = corpus.roles[last]
    if role is None:
        return content
    turns = [
        Turn(corpus.roles[turn] or "", ((Text(corpus.text(turn), place),) if corpus.texts[turn] else ()), place)
        for turn in whole
    ]
    return (*turns, Turn(role, content, place))


def _moved(choice: ChosenPieces, arrangement: Arrangement) -> int:
    """Return the number of prompts that hold modules in another order than the schema."""
    order = np.zeros(len(choice.pieces), np.int64)
    for number, group in enumerate(arrangement.groups):
        order[list(group)] = number
    cover = choice.cover
    falls = np.flatnonzero(np.diff(order[cover.pieces]) < 0)
    prompts = np.searchsorted(cover.bounds, falls, side="right") - 1
    same = prompts == np.searchsorted(cover.bounds, falls + 1, side="right") - 1
    return len(np.unique(prompts[same]))


Floats = npt.NDArray[np.float64]

EXPECTED = 3.0
"""Two modules that never meet are exclusive only if this many prompts would hold both by chance."""

_OFTEN = 0.5  # a neighbour counts if it is beside the module in this share of the module's places
_START, _END, _VARIES = -1, -2, -3
_EXAMPLES = 5


@dataclass(frozen=True)
class Arrangement:
    """The order of pieces in a schema.

    Attributes:
        groups: Pieces in schema order. A group of several is a union.
        swapped: Number of pairs that occur in both orders.
        examples: The most balanced of these pairs: (one, other, times one comes first, times the other does).
    """

    groups: tuple[tuple[int, ...], ...]
    swapped: int
    examples: tuple[tuple[int, int, int, int], ...]


def arrange(corpus: Corpus, cover: Cover, pieces: int) -> Arrangement:
    """Put pieces into their usual order, and unite pieces that take the same place and never meet.

    Two pieces take the same place if their turns have the same role and they usually share a neighbour on one side. A
    neighbour is a piece, or the start or the end of the turn.
    """
    before, positions = _precedence(cover, pieces)
    groups = _groups(corpus, cover, pieces, before)
    balance = np.triu(np.minimum(before, before.T), 1)
    return Arrangement(_ordered(groups, before, positions), int(np.count_nonzero(balance)), _examples(before, balance))


def _precedence(cover: Cover, pieces: int) -> tuple[Longs, Floats]:
    """Count how often one piece precedes another, and compute the mean rank of each piece.

    Returns:
        The counts, [pieces, pieces], and the mean rank in prompts, 0 to 1, [pieces].
    """
    before = np.zeros((pieces, pieces), np.int64)
    ranks, counts = np.zeros(pieces), np.zeros(pieces)
    for prompt in range(len(cover.bounds) - 1):
        said = cover.pieces[cover.of(prompt)]
        if len(said):
            before[np.ix_(said, said)] += np.triu(np.ones((len(said), len(said)), np.int64), 1)
            ranks[said] += np.arange(len(said)) / max(len(said) - 1, 1)
            counts[said] += 1
    return before, ranks / np.maximum(counts, 1)


def _groups(corpus: Corpus, cover: Cover, pieces: int, before: Longs) -> list[list[int]]:
    """Return unions and single pieces. A piece joins the first union that has its place and that it never meets."""
    roles, left, right = _places(corpus, cover, pieces)
    counts = np.bincount(cover.pieces, minlength=pieces)
    together = before + before.T
    groups: list[list[int]] = []
    for piece in range(pieces):
        for group in groups:
            same = roles[group[0]] == roles[piece] and any(_agree(side[[*group, piece]]) for side in (left, right))
            expected = (counts[group] * counts[piece]).sum() / max(len(cover.bounds) - 1, 1)
            if same and not together[group, piece].any() and expected >= EXPECTED:
                group.append(piece)
                break
        else:
            groups.append([piece])
    return groups


def _agree(neighbours: Longs) -> bool:
    return bool(neighbours[0] != _VARIES and (neighbours == neighbours[0]).all())


def _places(corpus: Corpus, cover: Cover, pieces: int) -> tuple[list[str | None], Longs, Longs]:
    """Return, by piece, the usual role of its turns and its usual left and right neighbours."""
    turns = corpus.turn_of(cover.starts)
    side_by_side = turns[1:] == turns[:-1]
    left, right = np.full(len(turns), _START), np.full(len(turns), _END)
    left[1:][side_by_side] = cover.pieces[:-1][side_by_side]
    right[:-1][side_by_side] = cover.pieces[1:][side_by_side]
    kinds = sorted({corpus.roles[turn] or "" for turn in np.unique(turns)})
    roles = np.array([kinds.index(corpus.roles[turn] or "") for turn in turns], np.int64)
    most = _mostly(cover, pieces, roles, often=0)
    return (
        [kinds[role] if kinds else None for role in most],
        _mostly(cover, pieces, left, _OFTEN),
        _mostly(cover, pieces, right, _OFTEN),
    )


def _mostly(cover: Cover, pieces: int, values: Longs, often: float) -> Longs:
    """Return, by piece, the most frequent value of its occurrences, or _VARIES if its share is below ``often``."""
    most = np.full(pieces, _VARIES)
    order = np.argsort(cover.pieces, kind="stable")
    borders = np.searchsorted(cover.pieces[order], np.arange(pieces + 1))
    for piece in range(pieces):
        found, counts = np.unique(values[order[borders[piece] : borders[piece + 1]]], return_counts=True)
        if len(found) and counts.max() >= often * counts.sum():
            most[piece] = found[counts.argmax()]
    return most


def _ordered(groups: list[list[int]], before: Longs, positions: Floats) -> tuple[tuple[int, ...], ...]:
    """Order the groups by their usual precedence. In a cycle, the group with the fewest predecessors comes first."""
    member = np.zeros((len(before), len(groups)), np.int64)
    for number, group in enumerate(groups):
        member[group, number] = 1
    first = member.T @ before @ member
    wins = first > first.T
    place = np.array([positions[group].mean() for group in groups])
    blockers = wins.sum(axis=0)
    left = np.ones(len(groups), np.bool_)
    order: list[tuple[int, ...]] = []
    while left.any():
        chosen = _next(left, blockers, place)
        left[chosen] = False
        blockers = blockers - wins[chosen]
        order.append(tuple(groups[chosen]))
    return tuple(order)


def _next(left: Bools, blockers: Longs, place: Longs) -> int:
    candidates = np.flatnonzero(left)
    return int(candidates[np.lexsort((candidates, place[candidates], blockers[candidates]))[0]])


def _examples(before: Longs, balance: Longs) -> tuple[tuple[int, int, int, int], ...]:
    most = np.argsort(-balance, axis=None, kind="stable")[:_EXAMPLES]
    pairs = [divmod(int(index), len(before)) for index in most if balance.flat[index]]
    return tuple((one, other, int(before[one, other]), int(before[other, one])) for one, other in pairs)


_HEADING = re.compile(r"^\s*(?:#{1,6}\s+\S|<[A-Za-z]|\*\*\S|=+\s*\S)")
_WORDS = re.compile(r"[^\W_]+")
_MOST_WORDS = 4
_MOST_CHARACTERS = 32
_LINES = 4  # lines at the start of a text that may hold a heading


def names_for(texts: Iterable[str]) -> list[str]:
    """Return a unique name for each text, from its first heading or its first words, such as ``company-policy``."""
    taken: set[str] = set(TAGS)
    names = []
    for text in texts:
        wanted = _slug(_title(text))
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name)
        names.append(name)
    return names


def schema_name(stem: str) -> str:
    """Return a name for the schema of a log, from the log's file name without endings."""
    return _slug(stem)


def _title(text: str) -> str:
    lines = [line for line in text[:2000].splitlines() if _WORDS.search(line)][:_LINES]
    return next((line for line in lines if _HEADING.match(line)), lines[0] if lines else "")


def _slug(title: str) -> str:
    words = _WORDS.findall(unicodedata.normalize("NFC", title).lower())[:_MOST_WORDS]
    name = "-".join(words)[:_MOST_CHARACTERS].strip("-")
    if name and not (name[0].isalpha() or name[0] == "_"):
        name = f"text-{name}"
    if not name or objection(name):  # the XML parser refuses some letters in names
        name = re.sub("-+", "-", re.sub("[^a-z0-9-]", "", name)).strip("-")
        name = f"text-{name}".strip("-")
    return name
