"""Extracts a schema from a log, with the tokens that it saves, and describes the result as plain data.

The savings are counted request by request, and compared with those of an exact prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.authoring.extract.find import Encode, choose, find
from inlay.authoring.extract.proposal import Proposal, propose
from inlay.authoring.extract.runs import Corpus
from inlay.errors import ParameterError, Place
from inlay.pml import Item, NewText, SchemaText, TurnStart, resolve
from inlay.pml.nodes import ROLES
from inlay.wording import counted

_BATCH_CHARACTERS = 4_000_000  # of new text that is tokenized at a time
_BORDERS = 2**32 - len(ROLES)  # elements from here on are starts of turns, not tokens
_Ids = npt.NDArray[np.uint32]
ELEMENT = np.dtype(">u4")
"""An element of a sequence. It is big-endian, so byte strings sort as elements do."""


@dataclass(frozen=True)
class Saving:
    """Counts of tokens in a log's text, without the chat template. Each run of text is tokenized alone.

    Attributes:
        tokens: Tokens of all prompts.
        by_schema: Tokens read from the cache: modules and always-present text, from their second use on. The last token
            of a request is always computed.
        by_prefix: Tokens that a prefix cache would read, for the same tokens in the same order. Here, too, the last
            token of a prompt is always computed.
        always: Tokens of always-present text that are saved.
        always_tokens: The length of the always-present text.
        by_module: Tokens that each module saves.
        fitting: Number of prompts that can be written as prompts of the schema.
        helped: Number of prompts that import a module.
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
    known = _TokenIds(encode)
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
    """Yield the items of every prompt of the log in order, in batches of prompts."""
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
    """Return the items of a prompt of the log. If it does not fit the schema, all of it is new text."""
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


class _TokenIds:
    """Token ids of items. Schema text is encoded once, new text batch by batch."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._schema: dict[int, _Ids] = {}
        self._new: dict[str, _Ids] = {}

    def learn(self, batch: list[list[Item]]) -> None:
        """Encode the texts of these prompts."""
        nodes = {item.node.order: item.node for items in batch for item in items if isinstance(item, SchemaText)}
        fresh = [node for order, node in nodes.items() if order not in self._schema]
        self._schema.update(zip((node.order for node in fresh), self._ids([node.text for node in fresh]), strict=True))
        new = list({item.text: None for items in batch for item in items if isinstance(item, NewText)})
        self._new = dict(zip(new, self._ids(new), strict=True))

    def ids(self, item: Item) -> _Ids:
        """Return the ids of a learned item, and one element for the start of a turn."""
        if isinstance(item, SchemaText):
            return self._schema[item.node.order]
        if isinstance(item, NewText):
            return self._new[item.text]
        return np.array([_BORDERS + ROLES.index(item.role)] if isinstance(item, TurnStart) else [], ELEMENT)

    def _ids(self, texts: list[str]) -> list[_Ids]:
        return [np.array(ids, ELEMENT) for ids in self._encode(texts)]


class _Saved:
    """Counts the tokens that are read from the cache, prompt by prompt."""

    def __init__(self) -> None:
        self.tokens = 0
        self.always = self.always_tokens = 0
        self.by_module: dict[str, int] = {}
        self._encoded: set[int] = set()

    def add(self, runs: list[tuple[Item, int]]) -> None:
        """Count a prompt. ``runs`` are its items with their numbers of tokens."""
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
    """Return the tokens that a prefix cache reads, for a sequence that shares ``elements`` with an earlier one."""
    tokens = np.frombuffer(sequence, ELEMENT) < _BORDERS
    return min(int(tokens[:elements].sum()), max(int(tokens.sum()) - 1, 0))


def shared_prefixes(sequences: Sequence[bytes]) -> list[int]:
    """Return, for each sequence, the length of the longest prefix that it shares with an earlier one.

    This models a prefix cache that never evicts and matches single elements. Real servers match blocks.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    left: dict[int, int | None] = dict(zip(order, [None, *order], strict=False))
    right: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=False))
    common = {one: _common(sequences[other], sequences[one]) for one, other in zip(order[1:], order, strict=False)}
    shared = [0] * len(sequences)
    # Sequences are removed from last to first, so each has only earlier ones beside it. The nearest has the longest
    # prefix.
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
    """Return the length of the common prefix of two sequences, in elements."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], ELEMENT) != np.frombuffer(other[:size], ELEMENT)
    return int(differ.argmax()) if differ.any() else size // ELEMENT.itemsize


MOST_MODULES = 5_000
_FIRST_WORDS = 80  # characters of a module that are shown
Row = dict[str, Any]
Stage = Callable[[str], Callable[[int, int], None]]
"""Begins a stage of the work, by name, and returns a function of (done, total)."""


@dataclass(frozen=True)
class ExtractionSettings:
    """The thresholds for repeated text. Raises ParameterError for values out of range.

    Attributes:
        min_prompts: Number of different prompts that must hold a text, at least 2.
        min_tokens: Tokens of the shortest text, at least 2.
        max_modules: The most modules of a schema, 1 to 5,000. Modules that save most are kept.
    """

    min_prompts: int = 3
    min_tokens: int = 32
    max_modules: int = 100

    def __post_init__(self) -> None:
        for name, least, most in (("min_prompts", 2, None), ("min_tokens", 2, None), ("max_modules", 1, MOST_MODULES)):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"from {least} to {most:,}"
                raise ParameterError(f"{name} is {value}; it must be {allowed}", code="parameter.out_of_range")

    @property
    def size(self) -> int:
        """Words of the shortest run that is surely found. It assumes two tokens a word, which few texts exceed."""
        return max(self.min_tokens // 2, 1)


@dataclass(frozen=True)
class Extraction:
    """A schema for a log, and its savings on the log."""

    proposal: Proposal
    saving: Saving


def extract(
    corpus: Corpus, encode: Encode, *, name: str, settings: ExtractionSettings, stage: Stage | None = None
) -> Extraction:
    """Find repeated text in a log, make a schema of it, and count its savings.

    Args:
        encode: The tokenizer that counts tokens, for many texts at a time.
        name: The name of the schema.
        settings: The thresholds.
        stage: Begins a stage of the work, for progress.
    """
    begin = stage or (lambda name: lambda done, total: None)
    found = find(corpus, size=settings.size, least=settings.min_prompts, progress=begin("finding repeats"))
    choice = choose(corpus, found, encode, min_tokens=settings.min_tokens, max_modules=settings.max_modules)
    proposal = propose(corpus, found.frame, choice, name)
    return Extraction(proposal, measure(proposal, encode, begin("counting tokens")))


def describe(result: Extraction) -> Row:
    """Return the report as plain data. Shares are fractions of 1. ``Saving`` defines the counts of tokens."""
    proposal, saving = result.proposal, result.saving
    names, pieces = proposal.names, proposal.choice.pieces
    return {
        "schema": proposal.schema.name,
        "prompts": len(proposal.corpus),
        "prompts_that_fit": saving.fitting,
        "prompts_with_modules": saving.helped,
        "prompts_out_of_order": proposal.moved,
        "tokens": saving.tokens,
        "saved_by_schema": saving.by_schema,
        "saved_by_schema_share": _share(saving.by_schema, saving.tokens),
        "saved_by_prefix_cache": saving.by_prefix,
        "saved_by_prefix_cache_share": _share(saving.by_prefix, saving.tokens),
        "always_present": {
            "tokens": saving.always_tokens,
            "saved_tokens": saving.always,
            "share_of_saving": _share(saving.always, saving.by_schema),
        },
        "modules": [
            {
                "name": name,
                "tokens": piece.tokens,
                "prompts": piece.prompts,
                "saved_tokens": saving.by_module[name],
                "share_of_saving": _share(saving.by_module[name], saving.by_schema),
                "text": _first_words(piece.text),
            }
            for name, piece in zip(names, pieces, strict=True)
        ],
        "unions": [[names[piece] for piece in group] for group in proposal.arrangement.groups if len(group) > 1],
        "notes": _notes(result),
    }


def _first_words(text: str) -> str:
    """Return the start of a text on one line, without characters that a terminal might interpret."""
    line = " ".join(text[: 4 * _FIRST_WORDS].split())[:_FIRST_WORDS]
    return "".join(character if character.isprintable() else "·" for character in line)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _notes(result: Extraction) -> list[str]:
    """Return remarks on the result, one sentence each."""
    proposal, saving = result.proposal, result.saving
    notes = []
    if not proposal.schema.children:
        notes.append("no text repeats often and long enough for a module; lower --min-tokens or --min-prompts")
    notes += _order(result)
    if left_out := proposal.choice.left_out:
        worth = sum(piece.worth for piece in left_out)
        notes.append(
            f"{counted(len(left_out), 'more text')} would make modules, and save up to {worth:,} more tokens; "
            "they are left out, since a schema is limited by --max-modules and by the size of its file"
        )
    if saving.fitting < len(proposal.corpus):
        notes.append(
            f"{counted(len(proposal.corpus) - saving.fitting, 'prompt')} cannot use the schema, without the text that "
            "is always present; give them a schema of their own"
        )
    if saving.by_prefix > saving.by_schema:
        notes.append(
            "a prefix cache alone saves more on this log; modules pay where the same texts stand in new combinations"
        )
    if proposal.frame is None and any(role is not None for role in proposal.corpus.roles):
        notes.append("the schema holds modules alone, so prompts write their own chat turns around the imports")
    if unusable := _unusable(proposal.corpus):
        holds = "prompt holds" if unusable == 1 else "prompts hold"
        notes.append(f"{unusable:,} {holds} control characters that XML cannot carry; text with them stays new text")
    return notes


def _order(result: Extraction) -> list[str]:
    proposal = result.proposal
    if not proposal.arrangement.swapped:
        return []
    one, other, first, later = proposal.arrangement.examples[0]
    pairs = counted(proposal.arrangement.swapped, "pair")
    return [
        f"{pairs} of modules in both orders, such as {proposal.names[one]} and {proposal.names[other]} "
        f"({first:,} and {later:,} times); {counted(proposal.moved, 'prompt')} in another order than the schema's, "
        "which needs positions 'packed'"
    ]


def _unusable(corpus: Corpus) -> int:
    """Return the number of prompts with characters that no schema can hold."""
    usable = np.concatenate((corpus.usable, [True]))  # the last element is for END
    return len(np.unique(corpus.prompts_of(np.flatnonzero(~usable[corpus.words]))))
