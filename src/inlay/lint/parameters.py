"""Rules about parameters: whether their ``len`` fits what prompts pass, and where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from inlay.layout import Hole
from inlay.lint.checked import WORTH, Checked, Finding, has_parameter
from inlay.pml import Module, Union

_SPARE = 16  # positions


def long_arguments(checked: Checked) -> Iterator[Finding]:
    """``placement.py`` refuses arguments of more tokens than ``len``. A default is checked with the schema."""
    for one in checked.passed:
        if one.tokens > one.param.length:
            yield Finding(
                "long-argument",
                one.place,
                f"the argument '{one.param.name}' is {one.tokens} tokens long and its len is {one.param.length}, so "
                f'this prompt fails; shorten it, or write len="{one.tokens}" in the schema',
            )


def wide_parameters(checked: Checked) -> Iterator[Finding]:
    """A hole takes ``len`` positions, whatever fills it."""
    longest: dict[int, int] = {}
    for one in checked.passed:
        longest[one.param.order] = max(one.tokens, longest.get(one.param.order, 0))
    for entry in checked.layout.entries:
        if not isinstance(entry, Hole) or entry.param.order not in longest:
            continue
        most, length = longest[entry.param.order], entry.length
        if length - most >= _SPARE and length >= 2 * most:
            yield Finding(
                "wide-parameter",
                entry.param.place,
                f"parameter '{entry.param.name}' has len {length} and the prompts given fill at most {most} of it: "
                f"under 'schema' positions {length - most} or more stay unused each time; write "
                f'len="{max(1, most)}", or a little more',
            )


def early_parameters(checked: Checked) -> Iterator[Finding]:
    """What stands behind a hole is encoded without the argument, ``len`` positions from what stands before it.

    (``SchemaSpecs``.) So under ``packed`` positions a shorter argument displaces it: it is read nearer to that text.
    """
    for entry in checked.layout.entries:
        if not isinstance(entry, Hole):
            continue
        name = entry.owner[-1]
        behind = checked.layout.extents[name].end - entry.start - entry.length
        if behind >= WORTH:
            moved = f", and under 'packed' positions one of fewer than {entry.length} tokens displaces them"
            yield Finding(
                "early-parameter",
                entry.param.place,
                f"{behind:,} positions of module '{name}' stand behind its parameter '{entry.param.name}': they are "
                f"encoded without the argument{moved if checked.displaced(entry) else ''}; move the parameter to the "
                "end of the module",
            )


def arguments_before_modules(checked: Checked) -> Iterator[Finding]:
    """Under ``exact``, what stands behind an argument is found again behind the same argument alone."""
    for level in checked.levels:
        pieces = [child for child in level.children if isinstance(child, Module | Union)]
        first = next((number for number, piece in enumerate(pieces) if has_parameter(piece)), None)
        if first is None:
            continue
        later = [piece for piece in pieces[first + 1 :] if not has_parameter(piece)]
        behind = sum(_longest(checked, piece) for piece in later)
        if behind >= WORTH:
            what = next(_parameterised(pieces[first]))
            yield Finding(
                "argument-first",
                what.place,
                f"module '{what.name}' takes an argument and stands before {behind:,} tokens of modules that take "
                "none: under reuse 'exact' all that stands behind an argument is computed anew for every other one; "
                "put it behind them",
            )


def _parameterised(piece: Module | Union) -> Iterator[Module]:
    members = piece.members if isinstance(piece, Union) else (piece,)
    return (member for member in members if has_parameter(member))


def _longest(checked: Checked, piece: Module | Union) -> int:
    members = piece.members if isinstance(piece, Union) else (piece,)
    extents = [checked.layout.extents[member.name] for member in members]
    return max(extent.end - extent.start for extent in extents)
