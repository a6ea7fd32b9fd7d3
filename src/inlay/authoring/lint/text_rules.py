"""Rules about text: repeated text, modules that are too small or empty, and text beyond the model's context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from inlay.authoring.lint.checked import WORTH, Checked, Finding
from inlay.errors import Place
from inlay.pml import Module, Text, Union
from inlay.pml.scopes import names_of, path_of
from inlay.pml.variables import template_variables
from inlay.prompt.layout import Owner, TextRun
from inlay.prompt.turns import has_turns, speaks

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
    what = f"{repeat.length:,} tokens of this text stand {where} as well (line {line}) and are stored twice"
    if first.owner == run.owner[: len(first.owner)]:
        remedy = "leave them out here: whoever imports this has them already"
    else:
        remedy = "make them a module of their own, which prompts import beside both"
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
                length = _alike(runs[first].ids[first_at:], run.ids[at:])
                yield _Repeat(runs[first], first_at, run, at, length)
            at += max(1, length)


def _window(data: bytes, at: int) -> bytes:
    return data[at * _ID_BYTES : (at + WORTH) * _ID_BYTES]


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    differ = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


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
                f"module '{name}' has {_many(tokens, 'token')}, and is one more piece to find and to attend to for "
                "every prompt that imports it; write it into the text beside it, or as new text in the prompts that "
                "want it",
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
                f"{what} between chat turns, without a role, and most chat templates know no such text; put it into "
                "<system>, <user> or <assistant>",
            )


def variables_of_other_languages(checked: Checked) -> Iterator[Finding]:
    """Text is taken as it is: nothing is filled into braces."""
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
                f"module '{name}' and the text that it comes with are {needed:,} tokens and the model's context is "
                f"{longest:,}, so no prompt can import it; split it",
            )
    if layout.length > longest and checked.schema.modules:
        first = next(iter(checked.schema.modules.values()))
        yield Finding(
            "beyond-context",
            first.place,
            f"the schema takes {layout.length:,} positions and the model's context is {longest:,}, so under 'schema' "
            "positions prompts that reach behind that fail; use positions 'packed', or put modules that exclude each "
            "other into unions",
        )


def _has_modules(module: Module) -> bool:
    return any(isinstance(child, Module | Union) for child in module.children)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
