"""The prefix of a prompt up to its last module, as full prefill computes it. It may be read in place of modules.

It is the same text at the same positions, encoded in one pass, so every module has seen the text before it. Its first
parts may still be modules, if they were encoded behind an equal context. The rest belongs to one salt, even over a
public schema, so that no tenant learns which modules others combine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from inlay.kv.identity import Context, TokenRun
from inlay.prompt.composed import ComposedPrompt, InPlace, NewSpan, compose_parts
from inlay.prompt.request import EngineRequest, PromptPart

#: Prefix of a salt for KV made of public text. No salt starts with this byte, because salts are UTF-8.
_OWN = b"\xff"


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a prefix, which other prompts may share up to here.

    Args:
        run: its tokens, behind the text before them.
        key: the digest behind it; equal keys mean equal prefixes.
        parts: how many of the prompt's parts the prefix has up to here.
        segments: the keys and labels of the segments that a module could be read from; () for other text.
    """

    run: TokenRun
    key: bytes
    parts: int
    segments: tuple[bytes, ...]

    @property
    def module(self) -> bool:
        """True if this part is a module."""
        return bool(self.segments)


class Prefix:
    """The prefix of a prompt, immutable and so thread-safe.

    Attributes:
        nodes: its parts behind the leading exact modules; the last one is a module.
        adapter: the digest of the adapter that computes it; b"" for the model alone.
    """

    __slots__ = ("_parts", "_runs", "_salt", "_whose", "adapter", "nodes")

    def __init__(self, parts: tuple[PromptPart, ...], exact: int, salt: bytes, adapter: bytes = b"") -> None:
        """Take the prompt's parts up to its last module. The first ``exact`` of them are read as modules."""
        self._parts = parts
        self._salt = salt
        self.adapter = adapter
        # KV of private parts is found like the request's other text.
        public = any(not part.owned for part in parts)
        starts = frozenset(part.start for part in parts[exact:] if part.ids)
        self._whose = InPlace(starts, _OWN + salt if public else salt)
        self._runs = tuple(part.run for part in self.composed(len(parts)) if isinstance(part, NewSpan) and part.run)
        self.nodes = tuple(self._nodes(exact))

    def composed(self, parts: int) -> ComposedPrompt:
        """Return the composed prompt of the first ``parts`` parts."""
        return compose_parts(self._parts[:parts], salt=self._salt, in_place=self._whose, adapter=self.adapter)

    @property
    def whose(self) -> bytes:
        """The salt of the KV that is read in place of modules."""
        return self._whose.salt

    def modules(self, end: int) -> frozenset[bytes]:
        """The keys and labels of the segments that its parts up to position ``end`` may be read from."""
        return frozenset(name for part in self._parts if part.start < end for name in _names(part))

    def stored(self, longest: Callable[[TokenRun], int]) -> int:
        """Return how many leading nodes are stored. ``longest`` returns the stored tokens of a run."""
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
        """Return the parts to read in place of modules if the first ``nodes`` nodes are stored."""
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
            run, rest = rest.prefix(len(part.ids)), rest.rest(len(part.ids))
            yield Node(run, rest.digest, number, _names(part))


def _names(part: PromptPart) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(name for spec in part.candidates for name in spec.names))


def prefix_of(request: EngineRequest) -> Prefix | None:
    """Return the prefix of a request; None if the policy has no promotion or all modules are exact."""
    if not request.policy.reads_promoted:
        return None
    parts, salt, adapter = request.parts, request.salt.encode(), request.adapter
    exact = _exact(parts, salt, adapter)
    kept = next((number for number, part in enumerate(parts) if number >= exact and not part.kept), len(parts))
    end = max((number for number, part in enumerate(parts[:kept], 1) if part.candidates and part.ids), default=0)
    return Prefix(parts[:end], exact, salt, adapter) if end > exact else None


@dataclass(frozen=True, slots=True)
class AsModules:
    """A prefix of exact modules.

    Args:
        salt: of the request.
        record: the modules' record, at the positions of their encoding.
        shift: the distance from these positions to those in the prompt.
    """

    salt: bytes
    record: Context
    shift: int = 0

    @classmethod
    def none(cls, salt: bytes, adapter: bytes) -> AsModules:
        """Return the empty prefix."""
        return cls(salt, Context.under(adapter))

    def longer(self, parts: Iterable[PromptPart]) -> tuple[int, AsModules]:
        """Return how many of the next parts are exact modules in every form, and the prefix with them."""
        record, shift, count = self.record, self.shift, 0
        for part in parts:
            if not part.encode:
                break
            spec = part.candidates[-1]
            here = record.keep_private(self.salt if part.owned else b"").digest(part.start - shift)
            if any(each.digest != here for each in part.candidates):
                break
            record, shift, count = spec.record, part.start - spec.start, count + 1
        return count, AsModules(self.salt, record, shift)


def _exact(parts: tuple[PromptPart, ...], salt: bytes, adapter: bytes) -> int:
    """Return how many leading parts are exact modules that are always encoded."""
    return AsModules.none(salt, adapter).longer(parts)[0]
