"""Rules about sizes: modules too small to pay, modules without text, and more than a model's context holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from inlay.layout import Owner, TextRun
from inlay.lint.checked import Checked, Finding
from inlay.pml import Module, Union


def small_modules(checked: Checked) -> Iterator[Finding]:
    """A short module is found, kept and attended to apart, to save a few rows of a pass that runs in any case."""
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
    """Text alone is cached: arguments are computed for each request."""
    for name, module in checked.schema.modules.items():
        entries = checked.layout.by_owner.get(checked.owner(name), ())
        if _has_modules(module) or any(isinstance(entry, TextRun) for entry in entries):
            continue
        what = "holds parameters alone" if entries else "is empty"
        yield Finding(
            "no-text",
            module.place,
            f"module '{name}' {what}, so nothing of it can be reused; give it text, or delete it",
        )


def beyond_the_context(checked: Checked) -> Iterator[Finding]:
    """``LLM`` refuses a prompt that ends beyond the model's positions."""
    layout, longest = checked.layout, checked.max_positions
    if longest is None:
        return
    tokens = Counter[Owner]()
    for run in layout.runs:
        tokens[run.owner] += len(run.ids)
    for name, module in checked.schema.modules.items():
        owner = checked.owner(name)
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
