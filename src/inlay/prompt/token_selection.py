"""The token selection pass, which runs before a prompt's own pass.

By attention: the new text behind the modules is computed against the cached prompt, and its attention scores choose
tokens. By keys: the modules' tokens are computed at their places through the first layers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inlay.kv.identity import TokenRun
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan
from inlay.prompt.recompute import inexact_modules
from inlay.recompute import Recompute

#: The most tokens at a prompt's end whose attention chooses tokens.
MOST_ROWS = 256


def selection_prompt(recompute: Recompute | None, composed: ComposedPrompt) -> ComposedPrompt | None:
    """Return the composed prompt of that pass; None if the choice needs none. ``composed`` has no recomputed tokens."""
    if recompute is None or not recompute.selects or not inexact_modules(composed):
        return None
    return tuple(_checked(composed)) if recompute.by_keys else _asking(composed)


def _asking(composed: ComposedPrompt) -> ComposedPrompt:
    """Compute the last tokens even if they are stored, and do not store them."""
    last = composed[-1]
    assert isinstance(last, NewSpan), "somebody computes the last token of a prompt"
    rows = min(len(last.ids), MOST_ROWS)
    before = len(last.ids) - rows
    asking = NewSpan(last.ids[before:], last.start + before)
    if not before:
        return (*composed[:-1], asking)
    run = None if last.run is None else TokenRun(last.ids[:before], last.start, last.run.before, last.run.continues)
    return (*composed[:-1], NewSpan(last.ids[:before], last.start, run), asking)


def _checked(composed: ComposedPrompt) -> Iterator[CachedSpan | NewSpan]:
    """Read each module up to the last inexact one for comparison, and compute it in place.

    The request's own text is not stored either, because the upper layers do not run.
    """
    last = composed.index(inexact_modules(composed)[-1])
    for part in composed[: last + 1]:
        if isinstance(part, NewSpan):
            yield replace(part, run=None)
        elif isinstance(part, CachedSpan) and part.exact:
            yield part
        elif isinstance(part, CachedSpan):
            first, end = part.first, part.first + part.length
            yield replace(part, left_out=tuple(range(first, end)))
            yield NewSpan(part.spec.ids[first:end], part.start)
