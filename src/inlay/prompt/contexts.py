"""The encoding contexts of a schema's text, as segment specs.

isolated: a module sees only itself (Prompt Cache, arXiv 2311.04934, section 3.3).
anchored: a module also sees the always-present text and its ancestors' text before it.
primed: as anchored, with a primer between the always-present text and the first module (primer.py). A module that
    would not fit into the model's context behind the primer has none, nor has a module of a system turn.
scaffold: modules named by a <scaffold> also see each other's text before them, if a prompt imports all of them.

Text behind a parameter is encoded with the text before the hole, without placeholder or argument. With
``placeholders="unk"``, <unk> tokens fill the hole, and their states are never read (as in the paper). The parameter's
``scaffold`` text fills the hole instead, if there is one. Positions that it does not fill stay empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from inlay.errors import ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, labels_of, specify
from inlay.pml.nodes import Module, Turn, Union
from inlay.pml.scopes import names_of, path_of
from inlay.prompt.layout import Hole, Owner, SchemaLayout, TextRun


@dataclass(frozen=True, slots=True)
class _Chain:
    """The text that an entry sees before it, up to some entry.

    Args:
        last: its last segment, which names the others as parents. None without one.
        end: the start of the next entry if it is packed behind these.
        origin: the start of the first entry with tokens, from which canonical starts count. None without one.
        primer: the tokens of the primer in it, which take no room in the schema.
    """

    last: SegmentSpec | None = None
    end: int = 0
    origin: int | None = None
    primer: int = 0


@dataclass(frozen=True, slots=True)
class _View:
    """The owners that an entry sees.

    Args:
        scaffold: the number of its scaffold, with the modules that it sees. None without one.
        owners: itself and its ancestors, without the modules of that scaffold.
    """

    owners: tuple[Owner, ...]
    scaffold: int | None


@dataclass(frozen=True, slots=True)
class _Companions:
    """The modules of one scaffold, as owners, and their entries in document order."""

    owners: frozenset[Owner]
    entries: tuple[TextRun | Hole, ...]


@dataclass
class SchemaSpecs:
    """The segment specs of a schema's runs and defaults, under one encoding context and one position policy.

    Thread-safe: a cached value never changes and does not depend on the thread that made it. Entries that see the same
    text share its record, so the time for all specs is proportional to the schema's text.

    Args:
        anchored: True for the anchored context.
        packed: if True, positions are consecutive along a segment's context, instead of the schema's.
        movable: if True, a segment may be encoded at a canonical start and read at a shift.
        salt: the schema's salt; b"" for a shared one.
        adapter: the adapter's digest; b"" for the model alone.
        primer: the primer's tokens; empty for none. Needs ``movable``.
        longest: the positions of the model. Used with a primer.
    """

    layout: SchemaLayout
    anchored: bool
    packed: bool
    movable: bool
    keys: KeyMaker
    unk_id: int | None = None
    salt: bytes = b""
    adapter: bytes = b""
    primer: tuple[int, ...] = ()
    longest: int = 0
    _chains: dict[tuple[_View, int], _Chain] = field(default_factory=dict)  # the entry of that index is the last
    _defaults: dict[tuple[_View, int], SegmentSpec] = field(default_factory=dict)
    _primers: dict[bytes, SegmentSpec] = field(default_factory=dict)  # by key
    _labels: dict[Owner, tuple[bytes, bytes]] = field(default_factory=dict)
    _active: tuple[frozenset[str], dict[str, int]] = (frozenset(), {})  # of the latest prompt

    def by_module(self) -> dict[str, list[SegmentSpec]]:
        """Return all segments that a prompt without scaffolds can read, runs and defaults, by path of the module.

        "" stands for text outside modules. Modules that are never cached are left out.
        """
        found: dict[str, list[SegmentSpec]] = {}
        for entry in self.layout.entries:
            if entry.owner not in self.layout.uncached and (isinstance(entry, TextRun) or entry.default):
                found.setdefault(path_of(entry.owner), []).append(self.spec(entry, frozenset()))
        return found

    def every(self) -> dict[str, list[SegmentSpec]]:
        """Return the segments of ``by_module``, and those that prompts with one scaffold read in their place."""
        found = self.by_module()
        for scaffold in self.layout.schema.scaffolds:
            imported = frozenset(scaffold.modules)
            for owner in map(names_of, scaffold.modules):
                entries = [] if owner in self.layout.uncached else self.layout.by_owner.get(owner, ())
                found.setdefault(path_of(owner), []).extend(
                    self.spec(entry, imported) for entry in entries if isinstance(entry, TextRun) or entry.default
                )
        return found

    def primers(self) -> list[SegmentSpec]:
        """Return the primers that segments returned so far were specified behind. No prompt reads them."""
        return list(self._primers.values())

    def spec(self, entry: TextRun | Hole, imported: frozenset[str]) -> SegmentSpec:
        """Return the segment of a run, or of a hole's default, for a prompt that imports these module paths."""
        view = self._view(entry.owner, imported)
        if isinstance(entry, TextRun):
            spec = self._up_to(entry, view).last
            assert spec is not None, "a run has tokens"
            return spec
        memo = (view, entry.index)
        if memo not in self._defaults:
            before = self._before(entry, view)
            self._defaults[memo] = self._specify(entry.default or (), entry, before)
        return self._defaults[memo]

    def form(self, entry: TextRun | Hole, imported: frozenset[str]) -> str:
        """Return the encoding form of that segment, a word of ``request.FORMS``."""
        view = self._view(entry.owner, imported)
        if view.scaffold is not None:
            return "scaffold"
        if self.primer and self._up_to(entry, view).primer:
            return "primed"
        return "anchored" if self.anchored else "isolated"

    def _view(self, owner: Owner, imported: frozenset[str]) -> _View:
        scaffold = self._scaffolds_of(imported).get(path_of(owner)) if owner else None
        depths = range(len(owner) + 1) if self.anchored else [len(owner)]
        others = frozenset() if scaffold is None else self._companions[scaffold].owners
        return _View(tuple(owner[:depth] for depth in depths if owner[:depth] not in others), scaffold)

    def _scaffolds_of(self, imported: frozenset[str]) -> dict[str, int]:
        """Return path of a module → number of its scaffold: the first complete one that names it."""
        known, active = self._active
        if known is not imported:
            active = {}
            for number, scaffold in enumerate(self.layout.schema.scaffolds):
                if imported.issuperset(scaffold.modules):
                    for path in scaffold.modules:
                        active.setdefault(path, number)
            self._active = (imported, active)
        return active

    @cached_property
    def _in_system(self) -> frozenset[str]:
        """The names of the outermost modules in system turns. They stand in front of all documents."""
        return frozenset(
            module.name
            for turn in self.layout.schema.children
            if isinstance(turn, Turn) and turn.role == "system"
            for child in turn.children
            for module in (child.members if isinstance(child, Union) else (child,))
            if isinstance(module, Module)
        )

    def _length(self, owner: Owner) -> int:
        """Return the length of the outermost module that holds an owner's text, in positions."""
        extent = self.layout.extents[path_of(owner[:1])]
        return extent.end - extent.start

    @cached_property
    def _longest_scaffold(self) -> int:
        """The length of the modules of the longest scaffold, in positions. 0 without scaffolds."""
        scaffolds = ({path.split("/")[0] for path in each.modules} for each in self.layout.schema.scaffolds)
        return max((sum(self._length((name,)) for name in names) for names in scaffolds), default=0)

    @cached_property
    def _companions(self) -> list[_Companions]:
        """The companions of each scaffold."""
        by_owner = self.layout.by_owner
        found = []
        for scaffold in self.layout.schema.scaffolds:
            owners = frozenset(map(names_of, scaffold.modules))
            entries = [entry for owner in owners for entry in by_owner.get(owner, ())]
            found.append(_Companions(owners, tuple(sorted(entries, key=_index))))
        return found

    def _up_to(self, entry: TextRun | Hole, view: _View) -> _Chain:
        """Return the chain in this view, up to and including an entry."""
        missing = []
        known: _Chain | None = None
        at: TextRun | Hole | None = entry
        while at is not None:
            memo = (self._narrowed(view, at), at.index)
            known = self._chains.get(memo)
            if known is not None:
                break
            missing.append((memo, at))
            at = self._entry_before(at, view)
        chain = known or _Chain()
        for memo, at in reversed(missing):
            chain = self._chains.setdefault(memo, self._longer(self._primed(chain, at), at))
        return chain

    def _before(self, entry: TextRun | Hole, view: _View) -> _Chain:
        """Return the chain in this view before an entry."""
        last = self._entry_before(entry, view)
        return self._primed(_Chain() if last is None else self._up_to(last, view), entry)

    def _narrowed(self, view: _View, entry: TextRun | Hole) -> _View:
        """Drop owners without an entry up to this one, because many views share a prefix."""
        companions = () if view.scaffold is None else self._companions[view.scaffold].entries
        return _View(
            tuple(owner for owner in view.owners if _begins(self.layout.by_owner.get(owner, ()), entry)),
            view.scaffold if _begins(companions, entry) else None,
        )

    def _entry_before(self, entry: TextRun | Hole, view: _View) -> TextRun | Hole | None:
        """Return the last entry of the view before this one."""
        seen = [self.layout.by_owner.get(owner, ()) for owner in view.owners]
        if view.scaffold is not None:
            seen.append(self._companions[view.scaffold].entries)
        before = [(entries, bisect_left(entries, entry.index, key=_index)) for entries in seen]
        return max((entries[number - 1] for entries, number in before if number), key=_index, default=None)

    def _longer(self, chain: _Chain, entry: TextRun | Hole) -> _Chain:
        """Append an entry to a chain. A hole takes room, and has tokens if placeholders fill it."""
        tokens = entry.ids if isinstance(entry, TextRun) else self._placeholder(entry)
        at = chain.end if self.packed else entry.start
        end = at + (len(entry.ids) if isinstance(entry, TextRun) else entry.length)
        if not tokens:
            return replace(chain, end=end)
        spec = self._specify(tokens, entry, chain)
        return _Chain(spec, end, at if chain.origin is None else chain.origin, chain.primer)

    def _primed(self, chain: _Chain, entry: TextRun | Hole) -> _Chain:
        """Append the primer to a chain in front of its first text of a module. Modules of a system turn have none."""
        if not self.primer or chain.primer or not entry.owner or entry.owner[0] in self._in_system:
            return chain
        at = chain.end if self.packed else entry.start
        behind = max(self._length(entry.owner), self._longest_scaffold)
        if at + len(self.primer) + behind > self.longest:
            return chain
        spec = self._specify(self.primer, entry, chain)
        spec = self._primers.setdefault(spec.key, spec)
        return _Chain(spec, chain.end, at if chain.origin is None else chain.origin, len(self.primer))

    def _specify(self, ids: tuple[int, ...], entry: TextRun | Hole, before: _Chain) -> SegmentSpec:
        labels = self._labels.get(entry.owner)
        if labels is None:
            labels = self._labels[entry.owner] = labels_of(self.salt, self.layout.schema.name, path_of(entry.owner))
        start, context = self._start(entry, before), _as_context(before)
        return specify(ids, start, context, self.keys, self.salt, self.adapter, labels)

    def _start(self, entry: TextRun | Hole, before: _Chain) -> int:
        """Return the start at which an entry is encoded behind a chain. Canonical starts count from the first token."""
        at = before.end if self.packed else entry.start
        if not self.movable:
            return at
        return at - (at if before.origin is None else before.origin) + before.primer

    def _placeholder(self, hole: Hole) -> tuple[int, ...]:
        if self.unk_id is None:
            return ()
        return (self.unk_id,) * hole.length if hole.scaffold is None else hole.scaffold


def _as_context(chain: _Chain) -> tuple[SegmentSpec, ...]:
    return () if chain.last is None else (chain.last,)


def _index(entry: TextRun | Hole) -> int:
    return entry.index


def _begins(entries: Sequence[TextRun | Hole], entry: TextRun | Hole) -> bool:
    """True if the first of these stands at or before an entry."""
    return bool(entries) and entries[0].index <= entry.index


def placeholder_id(placeholders: str, unk_id: int | None) -> int | None:
    """Return the token that fills holes during encoding, or None. Raises ParameterError."""
    if placeholders == "unk" and unk_id is None:
        raise ParameterError(
            "placeholders='unk' needs a tokenizer with an <unk> token; use placeholders='none'",
            code="model.no_unknown_token",
        )
    return unk_id if placeholders == "unk" else None


def in_encoding_order(specs: Iterable[SegmentSpec]) -> list[SegmentSpec]:
    """Return these specs and their contexts, each key once, context first."""
    ordered: dict[bytes, SegmentSpec] = {}
    seen: set[SegmentSpec] = set()  # specs, not keys: equal keys may have different parents
    for spec in specs:
        missing: list[SegmentSpec] = []
        needed: SegmentSpec | None = spec
        while needed is not None and needed not in seen:
            missing.append(needed)
            needed = needed.parent
        for needed in reversed(missing):
            seen.add(needed)
            ordered.setdefault(needed.key, needed)
    return list(ordered.values())
