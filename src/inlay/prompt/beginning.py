"""The beginning of a prompt, up to its last module, as full prefill has it: what may be read in place of modules.

It is the same text in the same places, encoded in one go, so that every module has seen what really stands before it.
What begins it may be modules all the same: those that were encoded behind just what stands before them here. Behind
those it belongs to somebody, also over a public schema: nobody learns what others combine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from inlay.kv.identity import Context, TokenRun
from inlay.prompt.request import EngineRequest, PromptPart
from inlay.prompt.splice import Fresh, InPlace, Splice, splice_parts

#: In front of a salt it names what is made of public text for that salt alone. No salt begins so: they are UTF-8.
_OWN = b"\xff"


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a beginning, which others may share up to here.

    run: its tokens, behind what stands before them. key: the digest behind it; equal keys mean equal beginnings.
    parts: how many of the prompt's parts the beginning has up to here.
    segments: the keys of those that it could be read from where it is a module; none where it is not.
    """

    run: TokenRun
    key: bytes
    parts: int
    segments: tuple[bytes, ...]

    @property
    def module(self) -> bool:
        """Whether it is one."""
        return bool(self.segments)


class Beginning:
    """A prompt's beginning. nodes: its parts behind those modules that are exact where they stand, the last a module's.

    adapter: what computes it; b"" for the model alone.
    Nothing of it changes: any thread may ask.
    """

    __slots__ = ("_parts", "_runs", "_salt", "_whose", "adapter", "nodes")

    def __init__(self, parts: tuple[PromptPart, ...], exact: int, salt: bytes, adapter: bytes = b"") -> None:
        """parts: the prompt's up to its last module. exact: how many of them, from the first on, are as modules."""
        self._parts = parts
        self._salt = salt
        self.adapter = adapter
        # What is the request's own in any case is found as its other text is: it is one history.
        public = any(not part.owned for part in parts)
        starts = frozenset(part.start for part in parts[exact:] if part.ids)
        self._whose = InPlace(starts, _OWN + salt if public else salt)
        self._runs = tuple(part.run for part in self.splice(len(parts)) if isinstance(part, Fresh) and part.run)
        self.nodes = tuple(self._nodes(exact))

    def splice(self, parts: int) -> Splice:
        """What its first parts attend to."""
        return splice_parts(self._parts[:parts], salt=self._salt, in_place=self._whose, adapter=self.adapter)

    @property
    def whose(self) -> bytes:
        """The salt under which what is read in place of modules is kept."""
        return self._whose.salt

    def modules(self, end: int) -> frozenset[bytes]:
        """The keys of the segments that its parts up to position ``end`` may be read from."""
        return frozenset(spec.key for part in self._parts if part.start < end for spec in part.candidates)

    def stored(self, longest: Callable[[TokenRun], int]) -> int:
        """How many nodes are stored, from the first on. longest: how many tokens of a run are."""
        tokens = 0
        for run in self._runs:
            found = longest(run)
            tokens += found
            if found < len(run.ids):
                break
        count = 0
        for node in self.nodes:
            tokens -= len(node.run.ids)
            if tokens < 0:
                break
            count += 1
        return count

    def in_place(self, nodes: int) -> InPlace:
        """What is read so where its first nodes are stored: all up to the last module among these."""
        parts = max((node.parts for node in self.nodes[:nodes] if node.module), default=0)
        starts = (part.start for part in self._parts[:parts] if part.start in self._whose.starts)
        return InPlace(frozenset(starts), self._whose.salt)

    def _nodes(self, exact: int) -> Iterator[Node]:
        runs = iter(self._runs)
        rest: TokenRun | None = None
        for number, part in enumerate(self._parts[exact:], exact + 1):
            if not part.ids:
                continue
            if rest is None or not rest.ids:
                rest = next(runs)
            run, rest = rest.beginning(len(part.ids)), rest.rest(len(part.ids))
            yield Node(run, rest.digest, number, tuple(spec.key for spec in part.candidates))


def beginning_of(request: EngineRequest) -> Beginning | None:
    """A request's, where its policy reads one and it has modules that are not exact where they stand; else None."""
    if not request.policy.heals:
        return None
    parts, salt, adapter = request.parts, request.salt.encode(), request.adapter
    exact = _exact(parts, salt, adapter)
    kept = next((number for number, part in enumerate(parts) if number >= exact and not part.kept), len(parts))
    end = max((number for number, part in enumerate(parts[:kept], 1) if part.candidates and part.ids), default=0)
    return Beginning(parts[:end], exact, salt, adapter) if end > exact else None


@dataclass(frozen=True, slots=True)
class AsModules:
    """A beginning of modules that are exact where they stand. salt, adapter: of the request.

    record: of them, at the positions that they are encoded at; shift: how far from these they stand.
    """

    salt: bytes
    record: Context
    shift: int = 0

    @classmethod
    def none(cls, salt: bytes, adapter: bytes) -> AsModules:
        """That of a prompt of which nothing stands yet."""
        return cls(salt, Context.under(adapter))

    def longer(self, parts: Iterable[PromptPart]) -> tuple[int, AsModules]:
        """How many of the next parts are exact as modules that are encoded wherever they are missing, and with them."""
        record, shift, count = self.record, self.shift, 0
        for part in parts:
            if not part.encode:
                break
            spec = part.candidates[-1]
            here = record.keep_private(self.salt if part.owned else b"")
            if spec.digest != here.digest(part.start - shift):
                break
            record, shift, count = spec.record, part.start - spec.start, count + 1
        return count, AsModules(self.salt, record, shift)


def _exact(parts: tuple[PromptPart, ...], salt: bytes, adapter: bytes) -> int:
    """How many parts, from the first on, are exact as modules that are encoded wherever they are missing."""
    return AsModules.none(salt, adapter).longer(parts)[0]
