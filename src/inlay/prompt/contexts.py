"""The encoding contexts of a schema's text, as segment specs.

isolated: a module sees only itself (Prompt Cache, arXiv 2311.04934, section 3.3).
anchored: a module also sees the always-present text and its ancestors' text before it.
primed: as anchored, with a primer between the always-present text and the first module. A module that
    would not fit into the model's context behind the primer has none, nor has a module of a system turn.
scaffold: modules named by a <scaffold> also see each other's text before them, if a prompt imports all of them.

Text behind a parameter is encoded with the text before the hole, without placeholder or argument. With
``placeholders="unk"``, <unk> tokens fill the hole, and their states are never read (as in the paper). The parameter's
``scaffold`` text fills the hole instead, if there is one. Positions that it does not fill stay empty.

The primer is sample text in front of a module while it is encoded under ``primed``.

A module that is encoded as the first text of a prompt draws more attention than it does behind other modules, so an
answer overweights it. Behind a primer, its states are those of a later module. No prompt reads the primer.

``KnownSchemas`` holds the schemas that prompts of one model may name, with their layouts and segment specs. An
owner's own schema hides the public one of the same name.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from inlay.errors import ModelError, ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, labels_of, owner_label, specify
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.pml.nodes import Module, Turn, Union
from inlay.pml.rules import names_of, path_of
from inlay.policy import ReusePolicy
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import Hole, Owner, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.placement import PromptLayout
from inlay.prompt.tokens import TextEncoder, beyond_vocabulary
from inlay.prompt.turns import openings
from inlay.types import EVERYONE, Scope

#: Short passages of several kinds: history, science, minutes, advice, biography, instructions.
PASSAGES = (
    "The harbour town of Brannock grew around a shallow bay where fishing boats could be pulled ashore. In 1782 a "
    "stone pier was built with money from the salt trade, and within twenty years the town had three shipyards. Most "
    "families lived from herring, which was smoked and sold inland. When the railway came in 1861, the market moved "
    "to the station, and the old fish hall became a school.",
    "Lichens are made of two partners that live together. A fungus forms the body and holds water, while an alga "
    "inside makes sugar from sunlight. Because neither needs soil, lichens grow on bare rock, roofs and bark. They "
    "grow slowly, often less than a millimetre a year, and some in the Arctic are thought to be more than 4,000 years "
    "old. Many are sensitive to sulphur dioxide, so scientists use them to judge the air.",
    "The board met on Tuesday to review the plan for the new library. Ms Okafor reported that the building will cost "
    "4.2 million, of which the region pays a third. The reading room faces north to keep the light even. Work begins "
    "in May and should end within eighteen months. Two members asked for more bicycle stands; the architect agreed to "
    "add forty near the east door.",
)
PRIMER = "".join(f"{text}\n\n" for text in PASSAGES)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The text that an entry sees before it, up to some entry.

    Args:
        last: its last segment, which names the others as parents. None without one.
        end: the start of the next entry if it is packed behind these.
        origin: the start of the first entry with tokens, from which positions of movable segments count. None without
            such an entry.
        primer: the tokens of the primer in it, which take no room in the schema.
    """

    last: SegmentSpec | None = None
    end: int = 0
    origin: int | None = None
    primer: int = 0


@dataclass(frozen=True, slots=True)
class _View:
    """The modules that an entry of a schema attends to when it is encoded.

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
    _labels: dict[Owner, tuple[bytes, ...]] = field(default_factory=dict)
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
        """Drop owners without an entry up to ``entry``, because views that agree up to there share a chain."""
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
            named = labels_of(self.salt, self.layout.schema.name, path_of(entry.owner))
            labels = self._labels[entry.owner] = owner_label(self.salt), *named
        start, context = self._start(entry, before), _as_context(before)
        return specify(ids, start, context, self.keys, self.salt, self.adapter, labels)

    def _start(self, entry: TextRun | Hole, before: _Chain) -> int:
        """Return the position at which an entry is encoded behind a chain.

        If movable, it counts from the first token.
        """
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


T = TypeVar("T")

PUBLIC = ""  # the owner of public schemas


class SchemaRegistry(Generic[T]):
    """Schemas, or data about them, by name and owner (a cache_salt). Thread-safe.

    A name is unique among the public schemas, and among those of each owner.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()  # for changes

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._known.values()))

    def find(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return the owner's own entry of a name, else the public one."""
        own = self._known.get((owner, name))
        return self._known.get((PUBLIC, name)) if own is None else own

    def get(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return exactly this owner's entry of a name."""
        return self._known.get((owner, name))

    def of(self, owner: str) -> list[T]:
        """Return all entries of an owner."""
        return [known for (whose, _), known in list(self._known.items()) if whose == owner]

    def visible(self, owner: str) -> dict[str, T]:
        """Return name → entry for all names that an owner can use."""
        known = list(self._known.items())
        return {name: one for whose in (PUBLIC, owner) for (of, name), one in known if of == whose}

    def put(self, name: str, owner: str, known: T) -> None:
        """Register an entry, in place of one with the same name and owner."""
        with self._lock:
            self._known[owner, name] = known

    def remove(self, name: str, owner: str = PUBLIC) -> T | None:
        """Remove and return an entry; None without one."""
        with self._lock:
            return self._known.pop((owner, name), None)


_PRIMER_SHARE = 8  # a primer takes at most this part of the context: one eighth
_PRIMER_ROOM = 8  # a pool that holds fewer primers than this encodes without one; a prompt may need several
_COPIED = ReusePolicy.parse("modular")
_MOST_LIKELY = 64  # segments that a request names as likely to be read next


@dataclass(eq=False, slots=True)
class KnownSchema:
    """A schema with its layout, its owner (a cache_salt), and its specs by policy and adapter.

    ``ttl_s`` is the lifetime in seconds of its segments since the last read; None for no limit. Layouts and specs are
    immutable, so they are made without a lock.
    """

    layout: SchemaLayout
    owner: str
    ttl_s: float | None = None
    specs: dict[tuple[ReusePolicy, bytes], SchemaSpecs] = field(default_factory=dict)
    copies: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # by index of the entry


class KnownSchemas(SchemaRegistry[KnownSchema]):
    """All schemas that prompts of one model may name. Thread-safe.

    ``placeholders`` is the filling of holes while modules are encoded, "none" or "unk". Raises ModelError.
    """

    def __init__(self, model: ModelInfo, encoder: TextEncoder, template: ChatTemplate, placeholders: str) -> None:
        super().__init__()
        self._model = model
        self._encoder = encoder
        self._template = template
        self._adding = threading.Lock()
        self._primer = encoder.text(PRIMER)[: model.max_positions // _PRIMER_SHARE]
        self._placeholder = placeholder_id(placeholders, encoder.unk_id)
        if self._placeholder is not None:
            unknown = beyond_vocabulary((self._placeholder,), model.vocab_size, encoder.name)
            if unknown:
                raise ModelError(f"placeholders='unk' fills holes with {unknown}", code="model.unknown_token")

    def lay_out(self, schema: Schema, owner: str = PUBLIC) -> SchemaLayout:
        """Return a schema's layout, the registered one if there is one. Registers nothing. Raises PMLError."""
        known = self.get(schema.name, owner)
        if known is not None and known.layout.schema is schema:
            return known.layout
        return lay_out_schema(schema, self._encoder, self._template, vocabulary=self._model.vocab_size)

    def add(self, layout: SchemaLayout, owner: str = PUBLIC, ttl_s: float | None = None) -> None:
        """Register a schema, in place of one with the same name. For ``ttl_s`` see KnownSchema."""
        name = layout.schema.name
        with self._adding:
            known = self.get(name, owner)
            if known is None or known.layout is not layout:
                self.put(name, owner, KnownSchema(layout, owner, ttl_s))
            else:
                known.ttl_s = ttl_s
        if self._template.tells_time and layout.schema.has_turns:
            self._template.warn_once(
                "the chat template writes today's date in front of a schema's text, so that text and the modules that "
                "were encoded behind it are recomputed on the next day: set template_date, or use reuse='isolated'"
            )

    def layout(self, name: str, salt: str = "") -> SchemaLayout | None:
        """Return the layout of the schema that this name means for requests with this salt."""
        known = self.find(name, salt)
        return None if known is None else known.layout

    def schema_of(self, prompt: Any, salt: str = "") -> tuple[str, str]:
        """Return the name of a prompt's schema, and its digest for this salt; "" for none."""
        if not isinstance(prompt, (Prompt, PromptBuilder)):
            return "", ""
        layout = self.layout(prompt.schema, salt)
        return prompt.schema, "" if layout is None else layout.digest

    def module_specs(self, name: str, policy: ReusePolicy, scope: Scope = EVERYONE) -> dict[str, list[SegmentSpec]]:
        """Return all segments of a schema that can be encoded ahead, by module; "" stands for text outside modules.

        Empty under a policy without modules. Raises ParameterError for an unknown schema.
        """
        known = self._named(name, scope)
        return self._encoded(known, policy, self._model.adapter(scope.adapter)).by_module() if policy.modular else {}

    def every_spec(
        self, known: KnownSchema, policy: ReusePolicy, adapter: str | None = None, modules: Sequence[str] = ()
    ) -> list[SegmentSpec]:
        """Return the segments of some modules of a schema, or of all, under this policy and all policies used so far.

        With the text outside modules, named "", come the primers that modules are encoded behind. A policy without
        modules gives the segments whose keys its text has (``copies``).

        Raises ParameterError for an unknown adapter or module.
        """
        check_modules(known.layout, modules)
        if policy.modular:
            self._encoded(known, policy, self._model.adapter(adapter))
        else:
            self._copied(known)
        used = list(known.specs.values())
        found = {
            spec.key: spec
            for each in used
            for module, specs in each.every().items()
            if not modules or module in modules
            for spec in specs
        }
        if not modules or "" in modules:
            found |= {spec.key: spec for specs in used for spec in specs.primers()}
        return list(found.values())

    def all_specs(self, layout: SchemaLayout, policy: ReusePolicy, scope: Scope = EVERYONE) -> list[SegmentSpec]:
        """Return all segments of a schema that is, or just was, registered for a salt."""
        made_with, known = self._model.adapter(scope.adapter), self.known(layout, scope.cache_salt)
        modules = self._encoded(known, policy, made_with).by_module() if policy.modular else {}
        return [spec for specs in modules.values() for spec in specs]

    def siblings(self, layout: PromptLayout, policy: ReusePolicy, salt: str, adapter: bytes) -> tuple[SegmentSpec, ...]:
        """Return the segments of the unions' other members, which a prompt could have imported instead."""
        if not policy.modular or layout.schema is None or not layout.imported:
            return ()
        known = self.known(layout.schema, salt if not layout.public else PUBLIC)
        beside = _siblings(layout.schema.schema, layout.imported)
        if not beside:
            return ()
        modules = self._encoded(known, policy, adapter).by_module()
        return tuple(spec for module in beside for spec in modules.get(module, ()))[:_MOST_LIKELY]

    def current(self, name: str, salt: str = "") -> KnownSchema | None:
        """Return a schema. It is laid out again if its chat template writes the date, and the text has changed."""
        known = self.find(name, salt)
        if known is None or openings(self._template, known.layout.schema) == known.layout.openings:
            return known
        fresh = lay_out_schema(known.layout.schema, self._encoder, self._template, vocabulary=self._model.vocab_size)
        with self._adding:
            if self.get(fresh.schema.name, known.owner) is known:
                known = KnownSchema(fresh, known.owner, known.ttl_s)
                self.put(fresh.schema.name, known.owner, known)
        return known

    def known(self, layout: SchemaLayout, owner: str) -> KnownSchema:
        """Return the entry of a schema. If it was removed meanwhile, return an entry for this request alone."""
        known = self.get(layout.schema.name, owner)
        return known if known is not None and known.layout is layout else KnownSchema(layout, owner)

    def primer(self, policy: ReusePolicy) -> tuple[int, ...]:
        """Return the primer's tokens under a policy; empty for none.

        A primer needs segments that are read shifted, and a pool with room for it beside the modules.
        """
        pool = self._model.pool_tokens
        fits = pool is None or len(self._primer) * _PRIMER_ROOM <= pool
        return self._primer if policy.primed and fits and self._model.why_not_shift is None else ()

    def is_primer(self, spec: SegmentSpec) -> bool:
        """True if a segment holds the primer. Modules are encoded behind it, and no prompt reads it."""
        return spec.ids == self._primer

    def copies(self, known: KnownSchema, entry: TextRun | Hole) -> tuple[bytes, ...]:
        """Return the names of a schema's text for prompts that read it from no segment; see ``PromptPart.copies``.

        These are the names of its segment under the default policy, without an adapter.
        """
        found = known.copies.get(entry.index)
        if found is None:
            found = known.copies[entry.index] = self._copied(known).spec(entry, frozenset()).names
        return found

    def _copied(self, known: KnownSchema) -> SchemaSpecs:
        return self.specs(known, _COPIED, b"")

    def _named(self, name: str, scope: Scope) -> KnownSchema:
        known = self.find(name, scope.cache_salt)
        if known is None:
            raise ParameterError(f"schema '{name}' is not known; add it with add_schema first", code="schema.unknown")
        return known

    def _encoded(self, known: KnownSchema, policy: ReusePolicy, adapter: bytes) -> SchemaSpecs:
        """Return the specs that are encoded if nothing of a schema is stored."""
        return self.specs(known, policy, readable_adapters(policy, adapter)[-1])

    def specs(self, known: KnownSchema, policy: ReusePolicy, adapter: bytes) -> SchemaSpecs:
        """Return the specs of a schema under a modular policy and an adapter."""
        policy = policy.without_recompute()
        made = known.specs.get((policy, adapter))
        if made is not None:
            return made
        made = SchemaSpecs(
            known.layout,
            anchored=policy.anchored,
            packed=policy.packed,
            movable=self._model.why_not_shift is None,
            keys=self._model.keys,
            unk_id=self._placeholder,
            salt=known.owner.encode(),
            adapter=adapter,
            primer=self.primer(policy),
            longest=self._model.max_positions,
        )
        return known.specs.setdefault((policy, adapter), made)


def labels_of_schema(owner: str, name: str, modules: Sequence[str] = ()) -> frozenset[bytes]:
    """Return the labels of an owner's schema, registered or not, or those of some of its modules."""
    if not modules:
        return frozenset(labels_of(owner.encode(), name)[:1])
    return frozenset(labels_of(owner.encode(), name, module)[1] for module in modules)


def check_modules(layout: SchemaLayout, modules: Iterable[str]) -> None:
    """Raise ParameterError for a module that a schema does not have. "" stands for its text outside modules."""
    for module in modules:
        if module and module not in layout.schema.modules:
            raise ParameterError(
                f"schema '{layout.schema.name}' has no module '{module}'; give the path of one, like 'plan/miami'",
                code="schema.unknown_module",
            )


def readable_adapters(policy: ReusePolicy, adapter: bytes) -> tuple[bytes, ...]:
    """Return the adapters of segments that a request may read, most exact first."""
    return (adapter, b"") if adapter and policy.across_adapters else (adapter,)


def _siblings(schema: Schema, imported: Container[str]) -> list[str]:
    """Return the paths of modules that share a union with an imported one and are not imported."""
    found: list[str] = []
    todo: list[Any] = list(schema.children)
    while todo:
        node = todo.pop()
        if isinstance(node, Union):
            paths = [schema.paths[member.order] for member in node.members]
            if any(path in imported for path in paths):
                found += [path for path in paths if path not in imported]
        todo += node.members if isinstance(node, Union) else getattr(node, "children", ())
    return found
