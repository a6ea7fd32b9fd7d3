"""What a schema's text attends to when it is encoded: the encoding contexts, as specs of segments.

isolated: a module sees itself alone (Prompt Cache, arXiv 2311.04934, section 3.3).
anchored: a module also sees the always-present text before it and its ancestors' text before it.
Modules that a <scaffold> names also see each other's text before them, where a prompt imports all of them.

Text behind a parameter is encoded with the text before the hole and with neither placeholder nor argument, unless
``placeholders`` is "unk": then the hole is filled with <unk> tokens whose states are never spliced (the paper's way).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inlay.cache.segment import KeyMaker, SegmentSpec, specify
from inlay.errors import ParameterError
from inlay.layout import Hole, Owner, SchemaLayout, TextRun

CONTEXTS = ("isolated", "anchored")
PLACEHOLDERS = ("none", "unk")


@dataclass
class SchemaSpecs:
    """The specs of one schema's runs and defaults, under one encoding context and one position policy.

    packed: whether positions are consecutive along a segment's context, instead of those of the schema.
    movable: whether a segment may be encoded at a canonical start and read at a shift.
    salt: whose the schema is; b"" for everybody's.
    """

    layout: SchemaLayout
    context: str
    packed: bool
    movable: bool
    keys: KeyMaker
    unk_id: int | None = None
    salt: bytes = b""
    _memo: dict[tuple[int, frozenset[Owner]], SegmentSpec] = field(default_factory=dict)
    _links: dict[tuple[tuple[int, int], ...], SegmentSpec] = field(default_factory=dict)

    def by_module(self) -> dict[str, list[SegmentSpec]]:
        """Every segment that a prompt without scaffolds can ask for, runs and defaults; "" for text outside modules."""
        found: dict[str, list[SegmentSpec]] = {}
        for entry in self.layout.entries:
            if isinstance(entry, TextRun) or entry.default:
                found.setdefault(entry.owner[-1] if entry.owner else "", []).append(self.spec(entry, frozenset()))
        return found

    def spec(self, entry: TextRun | Hole, imported: frozenset[str]) -> SegmentSpec:
        """The segment of a run, or of a hole's default, for a prompt that imports these modules."""
        owners = self._visible(entry.owner, imported)
        memo = (entry.index, owners)
        if memo not in self._memo:
            ids = entry.ids if isinstance(entry, TextRun) else entry.default or ()
            self._memo[memo] = self._build(ids, entry, self.layout.chain(entry.index, owners))
        return self._memo[memo]

    def _visible(self, owner: Owner, imported: frozenset[str]) -> frozenset[Owner]:
        owners = {owner}
        if self.context == "anchored":
            owners |= {owner[:depth] for depth in range(len(owner))}
        return frozenset(owners | self._companions(owner, imported))

    def _companions(self, owner: Owner, imported: frozenset[str]) -> set[Owner]:
        for scaffold in self.layout.schema.scaffolds:
            if owner and owner[-1] in scaffold.modules and imported.issuperset(scaffold.modules):
                return {(*self.layout.schema.parents[name], name) for name in scaffold.modules}
        return set()

    def _build(self, ids: tuple[int, ...], entry: TextRun | Hole, chain: list[TextRun | Hole]) -> SegmentSpec:
        context: tuple[SegmentSpec, ...] = ()
        starts = self._starts([*chain, entry])
        path: tuple[tuple[int, int], ...] = ()
        for before, start in zip(chain, starts, strict=False):
            tokens = before.ids if isinstance(before, TextRun) else self._placeholder(before)
            if tokens:
                path = (*path, (before.index, start))
                if path not in self._links:  # one spec for all that attend to the same text
                    self._links[path] = specify(tokens, start, context, self.keys, self.salt)
                context = (*context, self._links[path])
        return specify(ids, starts[-1], context, self.keys, self.salt)

    def _starts(self, entries: list[TextRun | Hole]) -> list[int]:
        """Where each entry of a chain is encoded. Canonical starts count from the first token of the chain."""
        if self.packed:
            starts, at = [], 0
            for entry in entries:
                starts.append(at)
                at += len(entry.ids) if isinstance(entry, TextRun) else entry.length
        else:
            starts = [entry.start for entry in entries]
        if not self.movable:
            return starts
        first = next((n for n, e in enumerate(entries) if isinstance(e, TextRun) or self._placeholder(e)), -1)
        return [start - starts[first] for start in starts]

    def _placeholder(self, hole: Hole) -> tuple[int, ...]:
        return () if self.unk_id is None else (self.unk_id,) * hole.length


def placeholder_id(placeholders: str, unk_id: int | None) -> int | None:
    """The token that fills holes during encoding, or None for none. Raises ParameterError."""
    if placeholders not in PLACEHOLDERS:
        raise ParameterError(f"placeholders is '{placeholders}'; use one of {', '.join(PLACEHOLDERS)}")
    if placeholders == "unk" and unk_id is None:
        raise ParameterError("placeholders='unk' needs a tokenizer with an <unk> token; use placeholders='none'")
    return unk_id if placeholders == "unk" else None


def in_encoding_order(specs: Iterable[SegmentSpec]) -> list[SegmentSpec]:
    """These specs and all that they attend to, each once (by key), context first."""
    ordered: dict[bytes, SegmentSpec] = {}
    for spec in specs:
        for needed in (*spec.context, spec):
            ordered.setdefault(needed.key, needed)
    return list(ordered.values())
