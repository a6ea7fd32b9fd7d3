"""A schema for a log, and each prompt of the log as a prompt of that schema."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from inlay.authoring.extract.arrange import Arrangement, arrange, names_for
from inlay.authoring.extract.choose import ChosenPieces
from inlay.authoring.extract.corpus import Corpus
from inlay.authoring.extract.find import SchemaFrame
from inlay.errors import Place
from inlay.pml import Import, Module, Prompt, PromptTurn, Schema, Text, Turn, Union, numbered


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
