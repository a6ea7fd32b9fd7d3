"""The turns of one prompt, its own and its schema's, with the chat template's pieces and trims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inlay.errors import ModelError, PMLError, Problem
from inlay.pml import Filled, Item, NewText, Resolved, SchemaText, TurnEnd, TurnStart
from inlay.pml.scopes import path_of
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.turns import opening
from inlay.wording import quote


@dataclass(frozen=True)
class PromptTurns:
    """The turns of a prompt with the chat template's text around them.

    ``numbers`` holds the number of each turn in the schema's layout; None for a turn that the prompt adds.
    """

    roles: tuple[str, ...]
    pieces: tuple[str, ...]
    generation: bool
    trims: tuple[Trim, ...]
    numbers: tuple[int | None, ...]

    @classmethod
    def of(cls, resolved: Resolved, layout: SchemaLayout, template: ChatTemplate) -> PromptTurns:
        """Raise PMLError if the template refuses the order of turns from modules, else ModelError."""
        starts = [item for item in resolved.items if isinstance(item, TurnStart)]
        roles = tuple(start.role for start in starts)
        if not roles:
            return cls((), (), False, (), ())
        # A prompt that ends in its own assistant turn continues that turn.
        generation = not (starts[-1].own and roles[-1] == "assistant")
        try:
            pieces = template.pieces(roles, generation=generation)
        except ModelError as error:
            _blame_modules(starts, template, error)
            raise
        trims = template.trims(roles, generation=generation)
        numbers = tuple(None if start.node is None else layout.turn_of[start.node.order] for start in starts)
        return cls(roles, pieces, generation, trims, numbers)


def _blame_modules(starts: Sequence[TurnStart], template: ChatTemplate, error: ModelError) -> None:
    """Raise PMLError at an import if the template refuses turns, some of which come with modules."""
    modules = dict.fromkeys(path_of(start.owner) for start in starts if start.owner)
    if not modules:
        return
    roles = tuple(start.role for start in starts)
    refused = next((n for n in range(1, len(roles)) if opening(template, roles[:n]) is None), len(roles))
    from_modules = [start for start in starts[:refused] if start.owner] or [start for start in starts if start.owner]
    place = from_modules[-1].place
    named = ", ".join(map(quote, modules))
    remedy = "import others, or write the schema's turns in an order that it takes"
    raise PMLError(
        [Problem(place, f"{error}; turns come with {named} here: {remedy}", code="pml.unusable_turns")]
    ) from None


def settle_ends(items: Sequence[Item], layout: SchemaLayout, trims: Sequence[Trim]) -> dict[int, str]:
    """Return the texts at the ends of turns as the template strips them: number of an item → its text.

    Texts of modules and defaults are not stripped, because other prompts share them elsewhere.
    """
    settled: dict[int, str] = {}

    def strip(numbers: Iterable[int], trim: Callable[[str], str]) -> None:
        for number in numbers:
            text = settled.get(number, _loose_text(items[number], layout))
            if text is None:
                return
            settled[number] = trim(text)
            if settled[number]:
                return

    turn = body = -1
    for number, item in enumerate(items):
        if isinstance(item, TurnStart):
            turn, body = turn + 1, number + 1
        elif isinstance(item, TurnEnd):
            strip(range(body, number), trims[turn].start)
            strip(reversed(range(body, number)), trims[turn].end)
    return settled


def _loose_text(item: Item, layout: SchemaLayout) -> str | None:
    """Return the text of an item that is new or always present, else None."""
    if isinstance(item, NewText) or (isinstance(item, Filled) and not item.is_default):
        return item.text
    return layout.text_of(item.node.order) if isinstance(item, SchemaText) and not item.owner else None
