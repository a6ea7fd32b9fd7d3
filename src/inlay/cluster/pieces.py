"""The pieces of a request that a replica may hold. A router looks them up, each with its tokens.

Pieces are made once, while the prompt is prepared. A module is one piece. A run of the request's own text has one piece
for each border of its record (kv/changes.py), because a replica may hold any prefix of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inlay.kv.changes import border_keys, end_key, short_key
from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.prompt.composed import CachedSpan, NewSpan, compose
from inlay.prompt.request import EncodeRequest, EngineRequest


@dataclass(frozen=True, slots=True)
class WantedPiece:
    """Tokens that are found together.

    Args:
        keys: Keys of the segments that they may be read from, best first. Any of them is enough.
        tokens: Number of tokens.
        below: The same keys in the naming of tiers.
        chained: True if they count only when the piece before them is found.
    """

    keys: tuple[int, ...]
    tokens: int
    below: tuple[int, ...] = ()
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pieces that a request reads.

    Args:
        tokens: Tokens of the whole prompt.
        answer: Upper bound of the generated tokens. None: unknown.
    """

    pieces: tuple[WantedPiece, ...]
    tokens: int
    answer: int | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys that will be in the pool of the replica that answers."""
        return tuple(piece.keys[-1] for piece in self.pieces)


def wanted_by(request: EngineRequest, keys: KeyMaker) -> Wanted:
    """Return the pieces of a request. keys: the key maker of the model."""
    params = request.params
    answer = None if params.max_tokens is None else params.max_tokens * params.n
    if request.policy.reads_nothing:
        return Wanted((), len(request.ids), answer)
    candidates = {part.start: part.candidates for part in request.parts}
    pieces: list[WantedPiece] = []
    for part in compose(request):
        if isinstance(part, CachedSpan):
            pieces.append(_module((*candidates.get(part.start, ()), part.spec), part.length, keys))
        elif isinstance(part, NewSpan) and part.run is not None:
            pieces += _open_parts(part, request, keys)
    return Wanted(tuple(pieces), len(request.ids), answer)


def wanted_to_encode(request: EncodeRequest, keys: KeyMaker) -> list[WantedPiece]:
    """Return one piece for each segment to be encoded."""
    return [_module((spec,), len(spec.ids), keys) for spec in request.specs]


def _open_parts(part: NewSpan, request: EngineRequest, keys: KeyMaker) -> Iterator[WantedPiece]:
    """The pieces of a run of text that the request computes, or of the open parts in it that may be stored as
    segments.
    """
    assert part.run is not None
    end = part.start + len(part.ids)
    modules = [each for each in request.parts if each.open and not each.encode and part.start <= each.start < end]
    for each in modules:
        yield _module(each.candidates, len(each.ids), keys)
    if not modules:
        yield from _run(part.run, keys)


def _module(specs: tuple[SegmentSpec, ...], tokens: int, keys: KeyMaker) -> WantedPiece:
    unique = tuple(dict.fromkeys(specs))
    ends = tuple(end_key(spec, keys) for spec in unique)
    return WantedPiece(ends, tokens, tuple(short_key(spec.key) for spec in unique))


def _run(run: TokenRun, keys: KeyMaker) -> Iterator[WantedPiece]:
    before, chained = 0, False
    for tokens, key in border_keys(run, keys):
        yield WantedPiece((key,), tokens - before, chained=chained)
        before, chained = tokens, True
    if before < len(run.ids):
        yield WantedPiece((end_key(run, keys),), len(run.ids) - before, chained=chained)
