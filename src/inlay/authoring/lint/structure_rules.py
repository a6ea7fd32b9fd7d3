"""Rules about the structure of a schema: the order of text and modules, scaffolds, parameters, and unions."""

from __future__ import annotations

from collections.abc import Iterator

from inlay.authoring.lint.checked import WORTH, Checked, Finding, Neighbours, has_parameter
from inlay.pml import Module, Text, Union
from inlay.pml.scopes import path_of
from inlay.prompt.layout import Hole


def late_text(checked: Checked) -> Iterator[Finding]:
    """Report text after a module, because the module is encoded without it (``SchemaSpecs`` under ``anchored``).

    A module's context is only the always-present text and its ancestors' text *before* it. Text after a module is
    itself
    encoded without the module. A prompt that imports the module reads this text at another distance from its context,
    so
    the text counts as displaced.
    """
    for level in checked.levels:
        for child, first in _texts_behind_modules(level):
            before = checked.schema.paths[first.order]
            tokens = checked.tokens(child.order)
            if tokens < WORTH:
                continue
            run = checked.layout.entries[checked.layout.run_of[child.order]]
            whose = "always-present text" if level.module is None else f"the text of module '{level.module}'"
            moved = ", and under 'packed' positions they are displaced wherever it is imported"
            yield Finding(
                "late-text",
                child.place,
                f"{tokens:,} tokens of {whose} stand behind module '{before}', which is encoded without them"
                f"{moved if checked.displaced(run) else ''}; move them in front of it",
            )


def _texts_behind_modules(level: Neighbours) -> Iterator[tuple[Text, Module]]:
    """Yield the texts after a module of their level, each with the first module of the level."""
    first: Module | None = None
    for child in level.children:
        if isinstance(child, Text) and first is not None:
            yield child, first
        elif isinstance(child, Module | Union) and first is None:
            first = child if isinstance(child, Module) else child.members[0]


def hidden_scaffolds(checked: Checked) -> Iterator[Finding]:
    """Report scaffolds that an earlier one hides.

    A module is encoded in the first scaffold that names it and that the prompt completes (``SchemaSpecs``).
    """
    scaffolds = checked.schema.scaffolds
    for number, scaffold in enumerate(scaffolds):
        names = set(scaffold.modules)
        hiding = [other for other in scaffolds[:number] if names.issuperset(other.modules)]
        hidden = {name for other in hiding for name in other.modules}
        if not hidden:
            continue
        line = hiding[0].place.line
        if hidden == names:
            what = f"the scaffold never applies: whenever it could, the one in line {line} does"
            remedy = "delete one of them"
        else:
            listed = ", ".join(f"'{name}'" for name in scaffold.modules if name in hidden)
            what = f"the scaffold never applies to {listed}: whenever it could, the one in line {line} does"
            remedy = "put the longer scaffold first"
        yield Finding("hidden-scaffold", scaffold.place, f"{what}; {remedy}")


_SPARE = 16  # positions


def long_arguments(checked: Checked) -> Iterator[Finding]:
    """Report arguments of more tokens than ``len``, which ``placement.py`` refuses. Defaults are checked with the
    schema.
    """
    for one in checked.passed:
        if one.tokens > one.param.length:
            yield Finding(
                "long-argument",
                one.place,
                f"the argument '{one.param.name}' is {one.tokens} tokens long and its len is {one.param.length}, so "
                f'this prompt fails; shorten it, or write len="{one.tokens}" in the schema',
            )


def wide_parameters(checked: Checked) -> Iterator[Finding]:
    """Report parameters that are much longer than their arguments, because a hole always takes ``len`` positions."""
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
    """Report text after a parameter of its module.

    It is encoded without the argument, ``len`` positions after the text before the hole (``SchemaSpecs``). Under
    ``packed``
    positions a shorter argument displaces it towards that text.
    """
    for entry in checked.layout.entries:
        if not isinstance(entry, Hole):
            continue
        name = path_of(entry.owner)
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
    """Report arguments before modules, because ``exact`` reuses text after an argument only behind the same
    argument.
    """
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
                f"module '{checked.schema.paths[what.order]}' takes an argument and stands before {behind:,} tokens of "
                "modules that take none: under reuse 'exact' all that stands behind an argument is computed anew for "
                "every other one; put it behind them",
            )


def _parameterised(piece: Module | Union) -> Iterator[Module]:
    members = piece.members if isinstance(piece, Union) else (piece,)
    return (member for member in members if has_parameter(member))


def _longest(checked: Checked, piece: Module | Union) -> int:
    members = piece.members if isinstance(piece, Union) else (piece,)
    return max(_length(checked, member) for member in members)


_SHARE = 0.25


def unions_of_one(checked: Checked) -> Iterator[Finding]:
    """Report unions of one member, because every module is optional."""
    for union in checked.unions:
        if len(union.members) == 1:
            name = checked.schema.paths[union.members[0].order]
            yield Finding(
                "union-of-one",
                union.place,
                f"the union has one member, '{name}', and modules are optional without one; delete <union> around it",
            )


def uneven_unions(checked: Checked) -> Iterator[Finding]:
    """Report unions whose members differ much in length.

    Members start together, and the longest member gives the length of the union (``layout.py``). Shorter ones leave a
    gap.
    """
    for union in checked.unions:
        lengths = {checked.schema.paths[member.order]: _length(checked, member) for member in union.members}
        longest = max(lengths, key=lambda name: lengths[name])
        shortest = min(lengths, key=lambda name: lengths[name])
        wasted = lengths[longest] - lengths[shortest]
        if wasted >= WORTH and wasted > _SHARE * lengths[longest]:
            yield Finding(
                "uneven-union",
                union.place,
                f"the union is {lengths[longest]:,} positions long, as '{longest}' is, and '{shortest}' takes "
                f"{lengths[shortest]:,}: under 'schema' positions {wasted:,} stay unused with it; use positions "
                "'packed', or make the members more alike in length",
            )


def _length(checked: Checked, module: Module) -> int:
    extent = checked.layout.extents[checked.schema.paths[module.order]]
    return extent.end - extent.start


def scaffolds_of_unions(checked: Checked) -> Iterator[Finding]:
    """Report scaffolds of unions. Optional text is never context for other text, so no member must stand in for a
    union.
    """
    for union in checked.unions:
        if union.scaffold is not None:
            yield Finding(
                "union-scaffold",
                union.place,
                f"scaffold='{union.scaffold}' has no effect: no module is encoded behind a member of a union; leave it "
                "out, or name modules that belong together in a <scaffold>",
            )
