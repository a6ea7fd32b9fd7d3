"""Looks up a composed prompt in the store: the stored parts, the missing parts, and the room these need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.offload.residency import Residency
from inlay.kv.pool import KVPool, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, RecomputedSpan
from inlay.prompt.contexts import in_encoding_order


@dataclass(frozen=True)
class Lookup:
    """The stored parts of a composed prompt.

    Attributes:
        modules: by key, every module that it reads or needs as context, with the stored prefix.
        prefixes: per part, the stored prefix of the request's own run. None for modules. For a model with recurrent
            layers they end where a state is stored, unless a module follows.
        beyond: for such a model, where stored KV ends behind the last stored state, in tokens of the prompt.
    """

    modules: dict[bytes, tuple[SegmentSpec, PrefixMatch]]
    prefixes: tuple[PrefixMatch | None, ...]
    beyond: tuple[int, ...] = ()

    @property
    def found(self) -> list[PrefixMatch]:
        modules = [found for _, found in self.modules.values()]
        return modules + [found for found in self.prefixes if found is not None]

    @cached_property
    def missing(self) -> list[tuple[SegmentSpec, PrefixMatch]]:
        """Modules that are not wholly stored, each with its stored prefix."""
        return [(spec, found) for spec, found in self.modules.values() if found.tokens < len(spec.ids)]

    @property
    def missing_tokens(self) -> int:
        return sum(len(spec.ids) - found.tokens for spec, found in self.missing)


def look_up(store: SegmentStore, composed: ComposedPrompt, *, find: bool = True) -> Lookup:
    """Look up a composed prompt; finds nothing if ``find`` is False."""
    lookup = _look_up(store, composed, find)
    if find and _opened(store, composed, lookup):
        lookup = _look_up(store, composed, find)  # matches may be longer now
    return lookup if store.states is None else _up_to_states(composed, lookup)


def _look_up(store: SegmentStore, composed: ComposedPrompt, find: bool) -> Lookup:
    specs = [part.spec for part in composed if isinstance(part, CachedSpan)]
    prefixes = [
        store.longest(part.run, most=most) if find and not isinstance(part, CachedSpan) and part.run else None
        for part, most in zip(composed, readable_tokens(composed), strict=True)
    ]
    return Lookup(look_up_modules(store, specs, find=find).modules, tuple(prefixes))


def _opened(store: SegmentStore, composed: ComposedPrompt, lookup: Lookup) -> bool:
    """Cut segments at the ends of modules where they go on with text that was not found. Returns True if any was cut.

    An exact prompt stores a module and the text behind it as one segment, within which no text is found.
    """
    behind = [
        (spec.parent, spec.ids[0])
        for spec, found in lookup.modules.values()
        if spec.parent is not None and not found.ranges
    ]
    for before, part, found in zip(composed, composed[1:], lookup.prefixes[1:], strict=False):
        if isinstance(part, CachedSpan) or not isinstance(before, CachedSpan) or not before.exact:
            continue
        if found is not None and not found.ranges:
            behind.append((before.spec, part.ids[0]))
    cuts = [store.opened_behind(spec, token) for spec, token in behind]
    return any(cuts)


def _up_to_states(composed: ComposedPrompt, lookup: Lookup) -> Lookup:
    """Shorten each prefix match to its last stored state, if the first token behind the match needs a state."""
    at = sum(part.length for part in composed)
    prefixes: list[PrefixMatch | None] = []
    beyond: list[int] = []
    needed = True  # a token behind this part needs the state behind it
    for part, found in zip(reversed(composed), reversed(lookup.prefixes), strict=True):
        at -= part.length
        if isinstance(part, CachedSpan):
            needed = False  # a module has a state of its own
        elif needed or found is None or found.tokens < len(part.ids):
            short = None if found is None else found.to_state()
            if found is not None and short is not None and short.tokens < found.tokens:
                beyond.append(at + found.tokens)
            found, needed = short, short is None or not short.tokens
        prefixes.append(found)
    return Lookup(lookup.modules, tuple(reversed(prefixes)), tuple(reversed(beyond)))


def look_up_modules(store: SegmentStore, specs: Sequence[SegmentSpec], *, find: bool = True) -> Lookup:
    """Look up modules, and the context of those that are missing."""
    wanted = {spec.key for spec in specs}
    ordered = in_encoding_order(specs)
    lookup = Lookup({spec.key: (spec, begun(store, spec) if find else PrefixMatch(())) for spec in ordered}, ())
    needed = {spec.key for spec in in_encoding_order(spec for spec, _ in lookup.missing if spec.key in wanted)}
    return Lookup({key: entry for key, entry in lookup.modules.items() if key in wanted | needed}, ())


def begun(store: SegmentStore, spec: SegmentSpec) -> PrefixMatch:
    """Return the stored prefix of a module.

    A partial match shorter than a chunk is ignored. It would reference a chunk that other segments share. For a model
    with recurrent layers the prefix ends where a state is stored.
    """
    found = store.longest(spec) if store.states is None else store.longest(spec).to_state()
    return found if found.tokens >= min(store.pool.chunk_size, len(spec.ids)) else PrefixMatch(())


def knows_last(store: SegmentStore, composed: ComposedPrompt, lookup: Lookup) -> bool:
    """True if the KV of a prompt's last token is stored, so that the token is recomputed only for its logits."""
    last, found = composed[-1], lookup.prefixes[-1]
    if isinstance(last, NewSpan) and last.run is not None:
        almost = found is not None and found.tokens == len(last.ids) - 1
        return almost and store.longest(last.run).tokens == len(last.ids)
    rest = [part for part in composed[-3:-1] if not isinstance(part, RecomputedSpan)]
    before = rest[-1] if rest else None  # open_end took the last token of this module
    return isinstance(before, CachedSpan) and lookup.modules[before.spec.key][1].tokens == len(before.spec.ids)


def chunks_needed(pool: KVPool, composed: ComposedPrompt, lookup: Lookup) -> int:
    """The chunks that the prompt needs at admission: those it finds and its own."""
    held = {chunk for found in lookup.found for chunk in pool.chunks_of(found.slots)}
    return len(held) + pool.chunks_for(lookup.missing_tokens) + pool.chunks_for(tail_tokens(composed, lookup))


def check_capacity(pool: KVPool, chunks: int, who: str, most: int) -> None:
    """Raise CapacityError if ``chunks`` exceeds ``most``. ``who`` names the request in the message."""
    if chunks > most:
        pinned = pool.chunks - most
        beside = f", {pinned * pool.chunk_size} of them pinned; unpin some, or" if pinned else ";"
        raise CapacityError(
            f"{who} needs {chunks * pool.chunk_size} tokens of KV and the pool holds "
            f"{pool.chunks * pool.chunk_size}{beside} give kv_memory at least "
            f"{pool.mib_for((chunks + pinned) * pool.chunk_size)} MiB"
        )


def tail_tokens(composed: ComposedPrompt, lookup: Lookup) -> int:
    """The tokens that a request computes of its own text, plus its next token; 0 for an encoding."""
    found = zip(composed, lookup.prefixes, strict=True)
    own = [len(part.ids) - (begun.tokens if begun else 0) for part, begun in found if not isinstance(part, CachedSpan)]
    return sum(own) + 1 if own else 0


def wanted_runs(composed: ComposedPrompt, lookup: Lookup) -> Iterator[tuple[TokenRun, int, int]]:
    """The runs that are read but not wholly stored, each with its stored tokens and the tokens it reads."""
    for spec, found in lookup.missing:
        yield spec, found.tokens, len(spec.ids)
    for part, begun, most in zip(composed, lookup.prefixes, readable_tokens(composed), strict=True):
        if not isinstance(part, CachedSpan) and part.run is not None and begun is not None:
            yield part.run, begun.tokens, most


def readable_tokens(composed: ComposedPrompt) -> list[int]:
    """How many own tokens of each part may come from the store. The last one must be computed for its logits."""
    lengths = [0 if isinstance(part, CachedSpan) else len(part.ids) for part in composed]
    return [*lengths[:-1], lengths[-1] - 1] if lengths else []


def miss_reasons(residency: Residency, lookup: Lookup) -> dict[bytes, str]:
    """Return the reason for each missing module, by key."""
    return {spec.key: residency.why_missing(spec) for spec, _ in lookup.missing}


def count_misses(residency: Residency, composed: ComposedPrompt, lookup: Lookup) -> dict[str, int]:
    """Return the number of module tokens to compute, by the reason why they are missing."""
    missing = {spec.key: (spec, found.tokens) for spec, found in lookup.missing}
    counts: dict[str, int] = {}
    for part in composed:
        if isinstance(part, CachedSpan) and part.spec.key in missing:
            spec, done = missing[part.spec.key]
            reason = residency.why_missing(spec)
            counts[reason] = counts.get(reason, 0) + max(0, part.length - done)
    return counts
