"""Rules about what stands behind what: text that would be worth more in front, and scaffolds that others hide."""

from __future__ import annotations

from collections.abc import Iterator

from inlay.lint.checked import WORTH, Checked, Finding, Level
from inlay.pml import Module, Text, Union


def late_text(checked: Checked) -> Iterator[Finding]:
    """Modules are encoded behind the always-present text, and their ancestors' text, that stands *before* them.

    (``SchemaSpecs`` under ``anchored``.) Text behind modules is itself encoded without them, and is read at another
    distance from the text that it was encoded behind, in every prompt that imports one: it counts as displaced.
    """
    for level in checked.levels:
        for child, before in _texts_behind_modules(level):
            tokens = checked.tokens(child.order)
            if tokens < WORTH:
                continue
            run = checked.layout.entries[checked.layout.run_of[child.order]]
            whose = "always-present text" if level.module is None else f"the text of module '{level.module.name}'"
            moved = ", and under 'packed' positions they are displaced wherever it is imported"
            yield Finding(
                "late-text",
                child.place,
                f"{tokens:,} tokens of {whose} stand behind module '{before}', which is encoded without them"
                f"{moved if checked.displaced(run) else ''}; move them in front of it",
            )


def _texts_behind_modules(level: Level) -> Iterator[tuple[Text, str]]:
    """The texts that stand behind a module of their level, with the name of the first one."""
    first: str | None = None
    for child in level.children:
        if isinstance(child, Text) and first is not None:
            yield child, first
        elif isinstance(child, Module | Union) and first is None:
            first = child.name if isinstance(child, Module) else child.members[0].name


def hidden_scaffolds(checked: Checked) -> Iterator[Finding]:
    """Of the scaffolds that a prompt completes, a module is encoded in the first that names it (``SchemaSpecs``)."""
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
