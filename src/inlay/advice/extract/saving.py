"""What a schema saves on its log, counted request by request, beside what a cache of exact prefixes saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inlay.advice.extract.choose import Encode
from inlay.advice.extract.proposal import Proposal
from inlay.errors import Place
from inlay.pml import Item, NewText, SchemaText, TurnStart, resolve
from inlay.pml.nodes import ROLES

_BATCH_CHARACTERS = 4_000_000  # of new text that is tokenized at a time
_BORDERS = 2**32 - len(ROLES)  # from here on an element is the start of a turn, not a token

_Ids = npt.NDArray[np.uint32]

ELEMENT = np.dtype(">u4")
"""An element of a sequence, in bytes: the highest byte first, so that bytes sort as elements do."""


@dataclass(frozen=True)
class Saving:
    """Tokens of a log's text. What a chat template adds is not counted; each run of text is tokenized alone.

    tokens: of all prompts.
    by_schema: of those, read from the cache: modules and always-present text, from the second time on. The last token
        of a request is always computed.
    by_prefix: what a prefix cache would have read, over the same tokens in the same order; but the last ones.
    always: saved by the text that is always present. always_tokens: how long that is.
    by_module: saved by each module.
    fitting: prompts that can be written as prompts of the schema. helped: those that import a module.
    """

    tokens: int
    by_schema: int
    by_prefix: int
    always: int
    always_tokens: int
    by_module: dict[str, int]
    fitting: int
    helped: int


def measure(proposal: Proposal, encode: Encode, progress: Callable[[int, int], None] | None = None) -> Saving:
    """Write each prompt of the log as a prompt of the schema, resolve it, and count its tokens."""
    known = _Known(encode)
    saved = _Saved()
    sequences: list[bytes] = []
    total = len(proposal.corpus)
    for batch in _batches(proposal):
        known.learn(batch)
        for items in batch:
            runs = [(item, known.ids(item)) for item in items]
            sequences.append(b"".join(ids.tobytes() for _, ids in runs))
            saved.add([(item, len(ids)) for item, ids in runs if not isinstance(item, TurnStart)])
        if progress is not None:
            progress(len(sequences), total)
    fitting = sum(proposal.fits(prompt) for prompt in range(total))
    return Saving(
        tokens=saved.tokens,
        by_schema=saved.always + sum(saved.by_module.values()),
        by_prefix=sum(map(_tokens_in_prefix, sequences, shared_prefixes(sequences))),
        always=saved.always,
        always_tokens=saved.always_tokens,
        by_module={name: saved.by_module.get(name, 0) for name in proposal.names},
        fitting=fitting,
        helped=int(np.count_nonzero(np.diff(proposal.choice.cover.bounds))),
    )


def _batches(proposal: Proposal) -> Iterator[list[list[Item]]]:
    """The items of every prompt of the log, in order, some prompts at a time."""
    batch: list[list[Item]] = []
    characters = 0
    for prompt in range(len(proposal.corpus)):
        batch.append(_items(proposal, prompt))
        characters += sum(len(item.text) for item in batch[-1] if isinstance(item, NewText))
        if characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _items(proposal: Proposal, number: int) -> list[Item]:
    """What a prompt of the log says, as the schema has it; all of it is new text if it does not fit."""
    prompt = proposal.prompt(number)
    if prompt is not None:
        return list(resolve(proposal.schema, prompt, moves=True).items)
    corpus = proposal.corpus
    place = Place(corpus.source, int(corpus.lines[number]))
    items: list[Item] = []
    for turn in corpus.turns(number):
        if role := corpus.roles[turn]:
            items.append(TurnStart(role, True, place))
        items.append(NewText(corpus.text(turn), place))
    return items


class _Known:
    """Token ids of items, encoded many at a time: text of the schema once, new text batch by batch."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._schema: dict[int, _Ids] = {}
        self._new: dict[str, _Ids] = {}

    def learn(self, batch: list[list[Item]]) -> None:
        """Encode what these prompts say."""
        nodes = {item.node.order: item.node for items in batch for item in items if isinstance(item, SchemaText)}
        fresh = [node for order, node in nodes.items() if order not in self._schema]
        self._schema.update(zip((node.order for node in fresh), self._ids([node.text for node in fresh]), strict=True))
        new = list({item.text: None for items in batch for item in items if isinstance(item, NewText)})
        self._new = dict(zip(new, self._ids(new), strict=True))

    def ids(self, item: Item) -> _Ids:
        """The ids of an item that has been learned; one element for the start of a turn."""
        if isinstance(item, SchemaText):
            return self._schema[item.node.order]
        if isinstance(item, NewText):
            return self._new[item.text]
        return np.array([_BORDERS + ROLES.index(item.role)] if isinstance(item, TurnStart) else [], ELEMENT)

    def _ids(self, texts: list[str]) -> list[_Ids]:
        return [np.array(ids, ELEMENT) for ids in self._encode(texts)]


class _Saved:
    """Counts what is read from the cache, prompt by prompt."""

    def __init__(self) -> None:
        self.tokens = 0
        self.always = self.always_tokens = 0
        self.by_module: dict[str, int] = {}
        self._encoded: set[int] = set()

    def add(self, runs: list[tuple[Item, int]]) -> None:
        """Count a prompt. runs: its items with their tokens."""
        total = sum(tokens for _, tokens in runs)
        left = total - 1  # the last token is always computed
        self.tokens += total
        for item, tokens in runs:
            if isinstance(item, SchemaText):
                if item.node.order in self._encoded:
                    self._count(item, min(tokens, left))
                    left -= min(tokens, left)
                elif not item.owner:
                    self.always_tokens += tokens
                self._encoded.add(item.node.order)

    def _count(self, item: SchemaText, tokens: int) -> None:
        if item.owner:
            self.by_module[item.owner[-1]] = self.by_module.get(item.owner[-1], 0) + tokens
        else:
            self.always += tokens


def _tokens_in_prefix(sequence: bytes, elements: int) -> int:
    """The tokens that a prefix cache reads, of a sequence that shares so many elements with an earlier one."""
    tokens = np.frombuffer(sequence, ELEMENT) < _BORDERS
    return min(int(tokens[:elements].sum()), max(int(tokens.sum()) - 1, 0))


def shared_prefixes(sequences: Sequence[bytes]) -> list[int]:
    """For each sequence, how many elements it has in common, from its start, with the best of those before it.

    This is a prefix cache that is never full and finds every single element (those of real servers work in blocks).
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    left: dict[int, int | None] = dict(zip(order, [None, *order], strict=False))
    right: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=False))
    common = {one: _common(sequences[other], sequences[one]) for one, other in zip(order[1:], order, strict=False)}
    shared = [0] * len(sequences)
    # taken out from the last to the first, each finds only earlier ones beside it; the nearest has most in common
    for one in reversed(range(len(sequences))):
        lower, upper = left[one], right[one]
        to_lower = common.get(one, 0) if lower is not None else 0
        to_upper = common.get(upper, 0) if upper is not None else 0
        shared[one] = max(to_lower, to_upper)
        if upper is not None:
            left[upper] = lower
            common[upper] = min(to_lower, to_upper)
        if lower is not None:
            right[lower] = upper
    return shared


def _common(one: bytes, other: bytes) -> int:
    """How many elements two sequences begin with in common."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], ELEMENT) != np.frombuffer(other[:size], ELEMENT)
    return int(differ.argmax()) if differ.any() else size // ELEMENT.itemsize
