"""White space as in a here-document: layout costs no tokens, text keeps what belongs to it."""

from __future__ import annotations

from itertools import takewhile

WHITE = " \t\r\n"
"""White space in XML's sense. A no-break space, for one, is text."""


def is_white(text: str) -> bool:
    """Whether there is nothing but white space."""
    return not text.strip(WHITE)


def settle(run: str) -> str:
    """The text that a run between two tags stands for; empty where it is layout.

    A run of white space alone is layout if it holds a line break, and text otherwise. In any other run:
    the first line goes, with its line break, if nothing stands on it; lines of white space alone become empty, among
    them the indentation of the tag that follows; and the indentation common to the lines that begin in the run goes.
    """
    if is_white(run):
        return "" if "\n" in run else run
    first, *lines = run.split("\n")
    lines = _without_indentation(lines)
    return "\n".join(lines if lines and is_white(first) else [first, *lines])


def _without_indentation(lines: list[str]) -> list[str]:
    indentations = {line[: len(line) - len(line.lstrip(" \t"))] for line in lines if not is_white(line)}
    common = _common_beginning(min(indentations, default=""), max(indentations, default=""))
    return ["" if is_white(line) else line[common:] for line in lines]


def _common_beginning(first: str, last: str) -> int:
    # of all strings in sorted order, the first and the last have the least in common
    alike = (one == other for one, other in zip(first, last, strict=False))
    return sum(takewhile(bool, alike))
