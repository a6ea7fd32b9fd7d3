"""Deviation profiles of modules, and modules of text found a second time, computed in idle time.

Each module is computed once more behind a sample of other modules, which are read as stored, at a shift. So a profile
costs as many tokens as its module has. It holds the deviation of each token's values from those of its segment: the
mean over the later half of the layers, relative to the size of the values in each layer. Keys, which are rotated by
their positions, add nothing to values. Earlier layers and further samples add little.

No request waits for a profile: when a request arrives, the current profile is dropped and restarted later. Profiles
that a request would have used continue beside requests, in a bounded share of the engine's time (idle.py). In a full
pool, a profile evicts the least recently used segments, up to an eighth of the pool. A longer module waits until there
is room. A missing module, and the text that it attends to, is encoded first if requests have asked for it twice, or if
it is a piece of text that a prompt has repeated (prompt/seen_pieces.py).
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inlay.attention.plan import Item, Part
from inlay.attention.storage import KVStorage
from inlay.engine.allocation import Work, pieces
from inlay.engine.background.idle import IdleWorker
from inlay.engine.runner import Runner
from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.residency import Residency
from inlay.kv.pool import Hold, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange, cut

#: Limit in tokens, 2 bytes each; the least recently used profiles go first.
_MOST_TOKENS = 2**22
#: The deviation of each token of one segment, (tokens,), relative to the size of its values.
Profile = npt.NDArray[np.float16]


class KnownProfiles(Mapping[bytes, Profile]):
    """Profiles, (tokens,), by segment key. ``version`` changes with them; ``tokens`` counts all of them."""

    def __init__(self, most: int = _MOST_TOKENS) -> None:
        self._by_key: dict[bytes, Profile] = {}
        self._most = most
        self.version = self.tokens = 0

    @classmethod
    def of(cls, stored: Iterable[tuple[bytes, bytes]]) -> KnownProfiles:
        """Return profiles that were read from disk.

        Args:
            stored: key and fp16 bytes of each profile. If they exceed the limit, the last ones are kept.
        """
        known = cls()
        for key, deviations in stored:
            profile = np.frombuffer(deviations, "<f2").astype(np.float16)
            if np.isfinite(profile).all():
                known.add(key, profile)
        return known

    def __getitem__(self, key: bytes) -> Profile:
        found = self._by_key.pop(key)
        self._by_key[key] = found  # moves it to the most recent end
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[bytes]:
        return iter(tuple(self._by_key))  # a copy, because lookups reorder the dict

    def __len__(self) -> int:
        return len(self._by_key)

    def forget_modules(self, keys: Iterable[bytes]) -> None:
        """Forget the profiles of these segments."""
        gone = [self._by_key.pop(key) for key in keys if key in self._by_key]
        self.tokens -= sum(profile.size for profile in gone)
        self.version += bool(gone)

    def forget_salt(self, salt: str) -> None:
        """Do nothing: profiles belong to modules."""

    def add(self, key: bytes, profile: Profile) -> None:
        """Store a profile, and drop the least recently used ones above the limit."""
        before = self._by_key.pop(key, None)
        self._by_key[key] = profile
        self.tokens += profile.size - (0 if before is None else before.size)
        while self.tokens > self._most:
            self.tokens -= self._by_key.pop(next(iter(self._by_key))).size
        self.version += 1


#: Samples are as large as typical prompts: their most tokens and modules.
_SAMPLE_TOKENS, _SAMPLE_MODULES = 1024, 64
#: The most segments that wait for their profile, and the most tokens of them and their samples. The oldest go first.
_MOST_WAITING, MOST_WAITING_TOKENS = 2**14, 2**20
MOST_FOUND_TOKENS = 2**16  # of these, of found text of one salt; further text of it is not encoded in idle time
_MOST_TURNED_AWAY = 16  # modules without room per step; each needs a lookup of its context
#: The divisor of the pool's size: in a full pool, profiles may evict that share.
POOL_SHARE = 8


@dataclass(eq=False, slots=True)
class _Group:
    """Segments to draw samples from.

    Attributes:
        tokens: of all segments that are kept for the waiting modules.
        salt: of found text that is to be encoded. None for modules.
        waiting: how many modules wait with it.
    """

    specs: Sequence[SegmentSpec]
    tokens: int
    salt: str | None = None
    waiting: int = 0


@dataclass(eq=False, slots=True)
class _ProfiledModule:
    """A module that is partly computed: behind its sample for a profile, or alone to be stored.

    Attributes:
        stored: the slots of the stored segment, which may be cut in two meanwhile. None if it is to be stored.
        slots: the new slots.
    """

    spec: SegmentSpec
    stored: tuple[SlotRange, ...] | None
    hold: Hold
    slots: tuple[SlotRange, ...]
    left: Work | None


class Profiler(IdleWorker):
    """Makes profiles of one store's segments, and keeps them in ``profiles``.

    Args:
        residency: keeps profiles on disk, with their segments. None to keep them in memory alone.
        movable: if True, segments may be read at a shift. Otherwise a sample has only modules that precede the module.
        longest: the number of positions that the model has.
    """

    failure = "a profile could not be made: modules without one are repaired from their beginnings"

    def __init__(
        self,
        store: SegmentStore,
        runner: Runner,
        profiles: KnownProfiles,
        *,
        residency: Residency | None = None,
        movable: bool,
        longest: int,
    ) -> None:
        super().__init__(store, runner)
        self.profiles = profiles
        self._residency = residency
        self._movable = movable
        self._longest = longest
        self._waiting: OrderedDict[bytes, tuple[SegmentSpec, _Group]] = OrderedDict()
        self._waiting_tokens = 0
        self._begun: _ProfiledModule | None = None
        self._wanted: set[bytes] = set()  # the waiting ones that requests would have used
        self._asked: OrderedDict[bytes, None] = OrderedDict()  # the keys of segments that requests missed
        self._found_tokens: Counter[str] = Counter()  # the waiting tokens of found text, by salt

    @property
    def wanted(self) -> bool:
        return bool(self._wanted)

    def miss(self, specs: Sequence[SegmentSpec], others: Sequence[SegmentSpec]) -> None:
        """Note that a request would have used profiles of ``specs``, which it read together with ``others``.

        A segment that is not stored is encoded from the second time on.
        """
        again = [spec for spec in specs if spec.key in self._asked or self._store.get(spec) is not None]
        for spec in specs:
            self._asked[spec.key] = None
            self._asked.move_to_end(spec.key)
        while len(self._asked) > _MOST_WAITING:
            self._asked.popitem(last=False)
        self.add(again, others)
        self._want(again)

    def encode(self, specs: Sequence[SegmentSpec], others: Sequence[SegmentSpec], salt: str) -> None:
        """Store found text that a request has computed in place, with profiles behind some of the ``others``.

        Does nothing if too much text of this salt waits. The next request with it then encodes it.
        """
        tokens = {spec.key: len(spec.ids) for spec in (*specs, *others)}
        if specs and self._found_tokens[salt] + sum(tokens.values()) <= MOST_FOUND_TOKENS:
            self.add(specs, others, salt)
            self._want(specs[::-1])  # the first one goes first

    def _want(self, specs: Sequence[SegmentSpec]) -> None:
        for spec in specs:
            if spec.key in self._waiting:
                self._wanted.add(spec.key)
                self._waiting.move_to_end(spec.key, last=False)

    def add(
        self, specs: Sequence[SegmentSpec], others: Sequence[SegmentSpec] | None = None, salt: str | None = None
    ) -> None:
        """Queue segments for a profile.

        Args:
            specs: the segments.
            others: the segments to draw each sample from. None to draw it from ``specs``.
            salt: the cache salt of found text. None for modules.
        """
        new = [spec for spec in specs if spec.key not in self.profiles and spec.key not in self._waiting]
        kept = {id(spec): len(spec.ids) for spec in (*new, *(specs if others is None else others))}
        group = _Group(specs if others is None else others, sum(kept.values()), salt)
        for spec in new:
            if spec.key not in self._waiting:
                self._waiting[spec.key] = spec, group
                group.waiting += 1
        self._count(group, group.tokens if group.waiting else 0)
        while len(self._waiting) > _MOST_WAITING or self._waiting_tokens > MOST_WAITING_TOKENS:
            key, (_, of) = next(iter(self._waiting.items()))
            if of is group and len(self._waiting) <= _MOST_WAITING:  # one schema may exceed the limit
                break
            self._stop_waiting(key)

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Make no profiles of these segments. The current profile may use one of them, so it restarts later."""
        self.give_up()
        for key in keys:
            self._asked.pop(key, None)
        for key in [key for key, (spec, _) in self._waiting.items() if not keys.isdisjoint(spec.names)]:
            self._stop_waiting(key)

    def forget_salt(self, salt: str) -> None:
        """Drop the found text of a salt that waits."""
        self.give_up()
        for key in [key for key, (_, group) in self._waiting.items() if group.salt == salt]:
            self._stop_waiting(key)

    def give_up(self) -> None:
        """Return the slots that the pool has lent, because requests need the time. The current profile restarts later.

        The module goes to the end of the queue. Otherwise a long module that never finishes would block the others.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            if begun.spec.key in self._waiting:
                self._waiting.move_to_end(begun.spec.key)
            begun.hold.release()
            self._store.pool.free(begun.slots)
            self._store.lent -= len(begun.spec.ids)

    def _stop_waiting(self, key: bytes) -> None:
        self._wanted.discard(key)
        _, group = self._waiting.pop(key)
        group.waiting -= 1
        self._count(group, 0 if group.waiting else -group.tokens)

    def _count(self, group: _Group, tokens: int) -> None:
        self._waiting_tokens += tokens
        if group.salt is not None:
            self._found_tokens[group.salt] += tokens
            if not self._found_tokens[group.salt]:
                del self._found_tokens[group.salt]

    def _begin(self) -> bool:
        """Find room and a sample for the next module. Modules that are no longer stored are skipped."""
        if self._begun is not None:
            return True
        turned_away = 0
        while self._waiting and turned_away < min(len(self._waiting), _MOST_TURNED_AWAY):
            key, (spec, group) = next(iter(self._waiting.items()))
            spec, found = self._stored_before(spec)
            own = self._store.get(spec)
            sample = [] if own is None else self._sample(spec, group.specs)
            if own is not None and not sample and self._are_encoded_soon(group.specs):
                self._waiting.move_to_end(key)
                turned_away += 1
                continue
            # Without a sample there is nothing to measure.
            useless = key not in self._wanted if own is None else not sample
            if key in self.profiles or useless:
                self._stop_waiting(key)
                continue
            found = found if own is None else [*found, own]
            context = self._context(spec, found, sample)
            start = spec.start + (sum(each.tokens for _, each in sample) if self._movable else 0)
            with ExitStack() as undo:
                hold = undo.enter_context(self._store.hold(*found, *(each for _, each in sample)))
                slots = self._room(len(spec.ids))
                if slots is None:
                    self._waiting.move_to_end(key)  # a shorter one may fit
                    turned_away += 1
                    continue
                undo.callback(self._store.pool.free, slots)
                part = Part.of(start, len(spec.ids), context, slots)
                work = Work(spec.ids, part, adapter=spec.before.adapter)
                self._begun = _ProfiledModule(spec, None if own is None else own.slots, hold, slots, work)
                self._store.lent += len(spec.ids)
                undo.pop_all()
            return True
        return False

    def _are_encoded_soon(self, specs: Sequence[SegmentSpec]) -> bool:
        """True if some of these segments are not stored and wait for their encoding."""
        return any(spec.key in self._wanted and self._store.get(spec) is None for spec in specs)

    def _room(self, tokens: int) -> tuple[SlotRange, ...] | None:
        """Slots for a module; None if there is no room now."""
        pool = self._store.pool
        if tokens * POOL_SHARE > pool.chunks * pool.chunk_size:
            return pool.allocate(tokens)
        try:
            return self._store.allocate(tokens)
        except CapacityError:
            return None

    def _stored_before(self, spec: SegmentSpec) -> tuple[SegmentSpec, list[PrefixMatch]]:
        """Return a segment with the matches of its context. If some of that is missing, the first missing segment."""
        found: list[PrefixMatch] = []
        for each in spec.context:
            match = self._store.get(each)
            if match is None:
                return each, found
            found.append(match)
        return spec, found

    def _sample(self, spec: SegmentSpec, others: Sequence[SegmentSpec]) -> list[tuple[SegmentSpec, PrefixMatch]]:
        """Draw the sample of a segment: other segments that could stand before it in a prompt. Seeded with its key."""
        seen = {each.key for each in (*spec.context, spec)}
        room = min(_SAMPLE_TOKENS, self._longest - spec.end)
        draw = random.Random(spec.key)
        chosen: list[tuple[int, SegmentSpec, PrefixMatch]] = []
        for number in draw.sample(range(len(others)), min(len(others), 2 * _SAMPLE_MODULES)):
            other = others[number]
            apart = other.key not in seen and all(each.key != spec.key for each in other.context)
            alike = other.before.adapter == spec.before.adapter
            if not apart or not alike or len(other.ids) > room or (not self._movable and other.end > spec.start):
                continue
            found = self._store.get(other)
            if found is None:
                continue
            chosen.append((number, other, found))
            room -= len(other.ids)
            if len(chosen) == _SAMPLE_MODULES:
                break
        return [(other, found) for _, other, found in sorted(chosen, key=lambda each: each[0])]

    def _context(
        self, spec: SegmentSpec, found: Sequence[PrefixMatch], sample: Sequence[tuple[SegmentSpec, PrefixMatch]]
    ) -> tuple[Item, ...]:
        """The text that the module attends to: its own context, and behind that the sample."""
        items: tuple[Item, ...] = ()
        for each, lies in zip(spec.context, found, strict=False):
            items += pieces(lies, each.start, len(each.ids))
        at = spec.start
        for other, lies in sample:
            items += pieces(lies, at if self._movable else other.start, len(other.ids))
            at += len(other.ids)
        return items

    def _compute(self, tokens: int) -> None:
        begun = self._begun
        assert begun is not None, "a module is begun"
        assert begun.left is not None, "some of it is left"
        rows = begun.left.part.rows
        work, begun.left = (begun.left, None) if rows <= tokens else begun.left.split(tokens)
        self._run([work])
        if begun.left is None:
            new = cut(begun.slots, 0, len(begun.spec.ids))
            if begun.stored is None:
                self._store.insert(begun.spec, new)
                self.give_up()
                return
            found = deviation(self._runner.storage, begun.stored, new)
            self.profiles.add(begun.spec.key, found)
            if self._residency is not None:
                self._residency.add_profile(begun.spec, found.astype("<f2").tobytes())
            if begun.spec.key in self._waiting:  # it may have been dropped meanwhile
                self._stop_waiting(begun.spec.key)
            self.give_up()

    def _drop(self) -> None:
        key = next(iter(self._waiting), None)  # the work is for this one, or for the text before it
        if self._begun is not None and self._begun.spec.key in self._waiting:
            key = self._begun.spec.key
        self.give_up()
        if key is not None:
            self._stop_waiting(key)


def deviation(
    storage: KVStorage, one: Sequence[SlotRange], other: Sequence[SlotRange]
) -> npt.NDArray[np.float16]:  # (tokens,)
    """Return the deviation of each token's values between two copies, as a mean over the later half of the layers.

    In each layer, the deviation is relative to the size of the values of ``one``.

    Args:
        one, other: the slots of the copies, of equal length.
    """
    here, there = _numbers(one), _numbers(other)
    layers = range(len(storage.values) // 2, len(storage.values))
    moved = torch.zeros(len(here), device=storage.values[0].device)
    for layer in layers:
        expected, found = (storage.read_values(layer, slots).float() for slots in (here, there))
        size = expected.pow(2).sum((0, 2)).sqrt().mean().clamp_min(1e-9)
        moved += (found - expected).pow(2).sum((0, 2)).sqrt() / size
    return (moved / len(layers)).numpy(force=True).astype(np.float16)


def _numbers(ranges: Sequence[SlotRange]) -> torch.Tensor:
    return torch.cat([torch.arange(each.first, each.end) for each in ranges])
