"""Advice on schemas: findings about memory, positions and reuse, each with a remedy.

Rules look at structure (order, scaffolds, parameters, unions) and at text (repetition, size, context).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from inlay.errors import ParameterError, Place
from inlay.kv.identity import KeyMaker
from inlay.pml import Filled, Module, Param, Prompt, Schema, Text, Turn, Union, resolve
from inlay.pml.rules import names_of, path_of
from inlay.pml.variables import template_variables
from inlay.prompt.contexts import SchemaSpecs
from inlay.prompt.layout import Hole, Owner, SchemaLayout, TextRun
from inlay.prompt.tokens import TextEncoder, common_length
from inlay.prompt.turns import has_turns, speaks
from inlay.wording import counted

#: Smaller savings, in tokens or positions, get no advice.
WORTH = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """A piece of advice. Its text is ``file:line:column: rule: fault; remedy``."""

    rule: str
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Passed:
    """The text that a prompt puts into a parameter, by its number of tokens. ``is_default``: it is the schema's
    default.
    """

    param: Param
    tokens: int
    is_default: bool
    place: Place


@dataclass(frozen=True)
class Checked:
    """A schema laid out for one model, with its use by prompts.

    Attributes:
        passed: The arguments and defaults of the given prompts.
        max_positions: The model's context, or None if unknown.
        small: A module of fewer tokens is too small.
    """

    layout: SchemaLayout
    passed: Sequence[Passed] = ()
    max_positions: int | None = None
    small: int = 16

    @property
    def schema(self) -> Schema:
        return self.layout.schema

    @cached_property
    def texts(self) -> dict[int, Text]:
        """The text nodes by their order."""
        return {node.order: node for node in _nodes(self.schema.children) if isinstance(node, Text)}

    @cached_property
    def unions(self) -> list[Union]:
        return [node for node in _nodes(self.schema.children) if isinstance(node, Union)]

    @cached_property
    def levels(self) -> list[Neighbours]:
        """The groups of neighbours: the content of each turn, the top level outside of turns, and the content of
        each module.
        """
        levels = _levels((), None, self.schema.children)
        for path, module in self.schema.modules.items():
            levels += _levels(names_of(path), path, module.children)
        return levels

    def tokens(self, order: int) -> int:
        """Return the number of tokens of a text node."""
        run = self.layout.entries[self.layout.run_of[order]] if order in self.layout.run_of else None
        return sum(len(part.ids) for part in run.parts if part.node == order) if isinstance(run, TextRun) else 0

    def displaced(self, entry: TextRun | Hole) -> bool:
        """Return True if an entry is encoded after other text and can move away from it under ``packed`` positions."""
        owners = frozenset(entry.owner[:depth] for depth in range(len(entry.owner) + 1))
        return any(isinstance(before, TextRun) for before in self.layout.chain(entry.index, owners))

    @cached_property
    def specs(self) -> SchemaSpecs:
        """The segments under ``anchored`` and ``packed``. A primer changes no advice. Keys lack the model's part."""
        keys = KeyMaker(b"", "", "", b"", positioned=False)
        return SchemaSpecs(self.layout, anchored=True, packed=True, movable=True, keys=keys)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours in a schema. ``module`` is the path of their module, or None outside of modules."""

    owner: Owner
    module: str | None
    children: tuple[Text | Param | Module | Union, ...]


def _levels(
    owner: Owner, module: str | None, children: Sequence[Text | Param | Module | Union | Turn]
) -> list[Neighbours]:
    """Return the groups of neighbours: the content of each turn, and the children outside of turns."""
    levels = [Neighbours(owner, module, child.children) for child in children if isinstance(child, Turn)]
    beside = tuple(child for child in children if not isinstance(child, Turn))
    return [*levels, Neighbours(owner, module, beside)] if beside or not levels else levels


_Node = Text | Param | Module | Union | Turn


def _nodes(children: Sequence[_Node]) -> Iterator[_Node]:
    for child in children:
        yield child
        yield from _nodes(inside(child))


def inside(node: _Node) -> Sequence[_Node]:
    """Return the nodes directly inside this one."""
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Turn) else ()


def has_parameter(node: _Node) -> bool:
    """Return True if this is a parameter or holds one, at any depth."""
    return isinstance(node, Param) or any(map(has_parameter, inside(node)))


def _passed(layout: SchemaLayout, encoder: TextEncoder, prompt: Prompt) -> list[Passed]:
    items = resolve(layout.schema, prompt, moves=True).items
    return [
        Passed(item.param, len(encoder.text(item.text)), item.is_default, item.place)
        for item in items
        if isinstance(item, Filled)
    ]


def _position(finding: Finding) -> tuple[str, int, int, str]:
    return finding.place.source, finding.place.line or 0, finding.place.column or 0, finding.rule


def late_text(checked: Checked) -> Iterator[Finding]:
    """Report text after a module, because the module is encoded without it (``SchemaSpecs`` under ``anchored``).

    A module's context is only the always-present text and its ancestors' text *before* it. Text after a module is
    itself encoded without the module. A prompt that imports the module reads this text at another distance from its
    context, so the text counts as displaced.
    """
    for level in checked.levels:
        for child, first in _texts_behind_modules(level):
            before = checked.schema.paths[first.order]
            tokens = checked.tokens(child.order)
            if tokens < WORTH:
                continue
            run = checked.layout.entries[checked.layout.run_of[child.order]]
            whose = "always-present text" if level.module is None else f"the text of module '{level.module}'"
            moved = ". Under 'packed' positions each import of the module also shifts them"
            yield Finding(
                "late-text",
                child.place,
                f"{tokens:,} tokens of {whose} stand behind module '{before}', so it is encoded without them"
                f"{moved if checked.displaced(run) else ''}; move them in front of the module",
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
            what = f"the scaffold is never used, because the one in line {line} comes first in every prompt"
            remedy = "delete one of the two"
        else:
            listed = ", ".join(f"'{name}'" for name in scaffold.modules if name in hidden)
            what = f"the scaffold is never used for {listed}, because the one in line {line} comes first"
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
    """Report parameters whose ``len`` is much more than the arguments need: every prompt loses the other positions."""
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
                f"parameter '{entry.param.name}' has len {length}, and the given prompts use at most {most}. Under "
                f"'schema' positions, each prompt wastes {length - most} positions or more; write "
                f'len="{max(1, most)}", or a little more',
            )


def early_parameters(checked: Checked) -> Iterator[Finding]:
    """Report text after a parameter of its module.

    Such text is encoded without the argument, ``len`` positions after the text before the parameter (``SchemaSpecs``).
    Under ``packed`` positions a shorter argument moves it closer to that text.
    """
    for entry in checked.layout.entries:
        if not isinstance(entry, Hole):
            continue
        name = path_of(entry.owner)
        behind = checked.layout.extents[name].end - entry.start - entry.length
        if behind >= WORTH:
            moved = f". Under 'packed' positions, an argument of fewer than {entry.length} tokens also shifts them"
            yield Finding(
                "early-parameter",
                entry.param.place,
                f"{behind:,} positions of module '{name}' stand behind its parameter '{entry.param.name}', so they are "
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
                f"module '{checked.schema.paths[what.order]}' takes an argument, and {behind:,} tokens of modules "
                "without arguments stand behind it. Under reuse 'exact', another argument means that all of them are "
                "computed again; move this module behind them",
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
                f"the union has one member, '{name}', and every module is optional without a union; delete the <union> "
                "around it",
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
                f"the union takes {lengths[longest]:,} positions, because '{longest}' does, and '{shortest}' needs "
                f"{lengths[shortest]:,}. Under 'schema' positions, a prompt with '{shortest}' wastes {wasted:,}; use "
                "positions 'packed', or make the members more alike in length",
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


_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Repeat:
    """``length`` tokens of ``run`` from ``at`` on that repeat an earlier run from ``first_at`` on."""

    first: TextRun
    first_at: int
    run: TextRun
    at: int
    length: int


def repeated_text(checked: Checked) -> Iterator[Finding]:
    """Report repeated text. Equal tokens share storage only if both runs begin with them after the same context."""
    told: set[tuple[Owner, Owner]] = set()
    for repeat in sorted(_repeats(list(checked.layout.runs)), key=lambda repeat: -repeat.length):
        pair = (repeat.first.owner, repeat.run.owner)
        if pair in told or _stored_once(checked, repeat):
            continue
        told.add(pair)
        yield Finding("repeated-text", _place(checked, repeat.run, repeat.at), _message(checked, repeat))


def _message(checked: Checked, repeat: _Repeat) -> str:
    first, run = repeat.first, repeat.run
    line = _place(checked, first, repeat.first_at).line
    where = f"in module '{path_of(first.owner)}'" if first.owner else "in the always-present text"
    what = f"{repeat.length:,} tokens of this text also stand {where} (line {line}), so they are stored twice"
    if first.owner == run.owner[: len(first.owner)]:
        remedy = "delete them here, because every prompt with this text has them already"
    else:
        remedy = "write them into a new module, and import it beside both"
    return f"{what}; {remedy}"


def _repeats(runs: list[TextRun]) -> Iterator[_Repeat]:
    """Yield maximal stretches of at least ``WORTH`` tokens that repeat an earlier run of another owner."""
    data = [np.asarray(run.ids, "<u4").tobytes() for run in runs]
    seen: dict[bytes, tuple[int, int]] = {}  # window of tokens → run and place of its first occurrence
    for number, run in enumerate(runs):
        at = 0
        while at + WORTH <= len(run.ids):
            first, first_at = seen.setdefault(_window(data[number], at), (number, at))
            length = 0
            if runs[first].owner != run.owner:
                length = common_length(runs[first].ids[first_at:], run.ids[at:])
                yield _Repeat(runs[first], first_at, run, at, length)
            at += max(1, length)


def _window(data: bytes, at: int) -> bytes:
    return data[at * _ID_BYTES : (at + WORTH) * _ID_BYTES]


def _stored_once(checked: Checked, repeat: _Repeat) -> bool:
    first, run = (checked.specs.spec(each, frozenset()) for each in (repeat.first, repeat.run))
    return repeat.first_at == repeat.at == 0 and first.digest == run.digest


def _place(checked: Checked, run: TextRun, at: int) -> Place:
    """Return the place of the text node with this token of a run."""
    for part in run.parts:
        if at < len(part.ids) and part.node is not None:
            return checked.texts[part.node].place
        at -= len(part.ids)
    return Place(checked.schema.source)


def small_modules(checked: Checked) -> Iterator[Finding]:
    """Report small modules: each is looked up and attended to separately, and saves only a few rows of a forward
    pass.
    """
    for name, module in checked.schema.modules.items():
        tokens = checked.layout.extents[name].tokens
        if 0 < tokens < checked.small and not _has_modules(module):
            yield Finding(
                "small-module",
                module.place,
                f"module '{name}' has {counted(tokens, 'token')}, too few to save time, because each prompt looks it "
                "up and reads it on its own; join it with the text beside it, or write its text into the prompts",
            )


def modules_without_text(checked: Checked) -> Iterator[Finding]:
    """Report modules without text, because only text is cached and arguments are computed for each request."""
    for name, module in checked.schema.modules.items():
        entries = checked.layout.by_owner.get(names_of(name), ())
        if _has_modules(module) or any(isinstance(entry, TextRun) for entry in entries):
            continue
        what = "holds parameters alone" if entries else "is empty"
        yield Finding(
            "no-text",
            module.place,
            f"module '{name}' {what}, so nothing of it can be reused; give it text, or delete it",
        )


def text_without_a_role(checked: Checked) -> Iterator[Finding]:
    """Report text outside of turns, if its schema or module has turns. It stands between the turns without a role."""
    beside = [checked.schema.children, *(module.children for module in checked.schema.modules.values())]
    for children in filter(has_turns, beside):
        loose = next((child for child in children if speaks(child) and not has_turns([child])), None)
        if loose is not None:
            what = "this text stands" if isinstance(loose, Text) else "this can stand"
            yield Finding(
                "no-role",
                loose.place,
                f"{what} between chat turns without a role, and most chat templates support no such text; put it into "
                "<system>, <user> or <assistant>",
            )


def variables_of_other_languages(checked: Checked) -> Iterator[Finding]:
    """Report variables of other template languages, like ``{{ name }}``, because PML does not replace them."""
    for variable in template_variables(checked.schema):
        yield Finding("template-variable", variable.place, variable.advice)


def beyond_the_context(checked: Checked) -> Iterator[Finding]:
    """Report modules that no prompt can import, because ``LLM`` refuses a prompt beyond the model's positions."""
    layout, longest = checked.layout, checked.max_positions
    if longest is None:
        return
    tokens = Counter[Owner]()
    for run in layout.runs:
        tokens[run.owner] += len(run.ids)
    for name, module in checked.schema.modules.items():
        owner = names_of(name)
        needed = sum(tokens[owner[:depth]] for depth in range(len(owner) + 1))
        if needed > longest:
            yield Finding(
                "beyond-context",
                module.place,
                f"module '{name}' has {needed:,} tokens with the text around it, and the model's context has "
                f"{longest:,}, so no prompt can import it; split it",
            )
    if layout.length > longest and checked.schema.modules:
        first = next(iter(checked.schema.modules.values()))
        yield Finding(
            "beyond-context",
            first.place,
            f"the schema takes {layout.length:,} positions and the model's context is {longest:,}, so under 'schema' "
            "positions prompts with modules beyond it fail; use positions 'packed', or put modules that exclude each "
            "other into unions",
        )


def _has_modules(module: Module) -> bool:
    return any(isinstance(child, Module | Union) for child in module.children)


RULES: tuple[Callable[[Checked], Iterable[Finding]], ...] = (
    small_modules,
    modules_without_text,
    beyond_the_context,
    unions_of_one,
    uneven_unions,
    scaffolds_of_unions,
    long_arguments,
    wide_parameters,
    early_parameters,
    arguments_before_modules,
    late_text,
    hidden_scaffolds,
    text_without_a_role,
    variables_of_other_languages,
    repeated_text,
)


def lint_schema(
    layout: SchemaLayout,
    encoder: TextEncoder,
    prompts: Sequence[Prompt] = (),
    *,
    max_positions: int | None = None,
    small: int = 16,
) -> list[Finding]:
    """Return advice on a schema, in the order of places. A finding is an error only if its message says that a prompt
    fails.

    Args:
        layout: The schema, laid out with a model's tokenizer.
        encoder: The same tokenizer, for arguments.
        prompts: Prompts of this schema. The rules examine their arguments.
        max_positions: The model's context, or None if unknown.
        small: A module of fewer tokens is too small to pay.

    Raises:
        PMLError: A prompt does not fit the schema.
        ParameterError: ``small`` is negative.
    """
    if small < 0:
        raise ParameterError(
            f"small is {small}; it must be a number of tokens, or 0 for no advice on small modules",
            code="parameter.out_of_range",
        )
    passed = [one for prompt in prompts for one in _passed(layout, encoder, prompt)]
    checked = Checked(layout, passed, max_positions, small)
    return sorted((finding for rule in RULES for finding in rule(checked)), key=_position)
