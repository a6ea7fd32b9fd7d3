"""The token selection pass, which runs before a prompt's own pass.

By attention: the new text behind the modules is computed against the cached prompt, and its attention scores choose
tokens. By keys: the modules' tokens are computed at their places through the first layers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inlay.kv.identity import TokenRun
from inlay.prompt.composed import Cached, Fresh, Splice
from inlay.prompt.recompute import inexact_modules
from inlay.recompute import Repair

#: The most tokens at a prompt's end whose attention chooses tokens.
MOST_ROWS = 256


def selecting_splice(repair: Repair | None, splice: Splice) -> Splice | None:
    """Return the composed prompt of that pass; None if the choice needs none. ``splice`` has no recomputed tokens."""
    if repair is None or not repair.selects or not inexact_modules(splice):
        return None
    return tuple(_checked(splice)) if repair.by_keys else _asking(splice)


def _asking(splice: Splice) -> Splice:
    """Compute the last tokens even if they are stored, and do not store them."""
    last = splice[-1]
    assert isinstance(last, Fresh), "somebody computes the last token of a prompt"
    rows = min(len(last.ids), MOST_ROWS)
    before = len(last.ids) - rows
    asking = Fresh(last.ids[before:], last.start + before)
    if not before:
        return (*splice[:-1], asking)
    run = None if last.run is None else TokenRun(last.ids[:before], last.start, last.run.before, last.run.continues)
    return (*splice[:-1], Fresh(last.ids[:before], last.start, run), asking)


def _checked(splice: Splice) -> Iterator[Cached | Fresh]:
    """Read each module up to the last inexact one for comparison, and compute it in place.

    The request's own text is not stored either, because the upper layers do not run.
    """
    last = splice.index(inexact_modules(splice)[-1])
    for part in splice[: last + 1]:
        if isinstance(part, Fresh):
            yield replace(part, run=None)
        elif isinstance(part, Cached) and part.exact:
            yield part
        elif isinstance(part, Cached):
            first, end = part.first, part.first + part.length
            yield replace(part, left_out=tuple(range(first, end)))
            yield Fresh(part.spec.ids[first:end], part.start)
