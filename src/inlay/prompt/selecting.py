"""The pass before a prompt's own that finds out which tokens of its modules are computed anew.

By attention: the prompt as it is read without any repair, of which the new text behind the modules is computed, so that
it says what it attends to. By keys: the modules' tokens as they stand here, through the first layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from inlay.kv.identity import TokenRun
from inlay.prompt.repair import inexact_modules
from inlay.prompt.splice import Cached, Fresh, Splice
from inlay.repair import Repair

#: So many of the last tokens of a prompt say what is looked for in its modules, at most.
MOST_ROWS = 256


def selecting_splice(repair: Repair | None, splice: Splice) -> Splice | None:
    """What that pass attends to and computes; None where the choice needs none. splice: without any repair."""
    if repair is None or not repair.selects or not inexact_modules(splice):
        return None
    return tuple(_checked(splice)) if repair.by_keys else _asking(splice)


def _asking(splice: Splice) -> Splice:
    """The last tokens are computed whether or not they are stored, and kept for nobody."""
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
    """Up to the last module that may move: each of them held, so that it is compared, and computed where it stands.

    The request's own text, too, is computed for this alone: the layers above have nothing of it.
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
