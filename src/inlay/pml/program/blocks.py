"""What stands in the statements of a program, by syntax alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set


def chained(statement: ast.If) -> tuple[list[ast.If], list[ast.stmt]]:
    """An ``if`` with all its ``elif``, and the body of ``else``."""
    chain = [statement]
    while len(chain[-1].orelse) == 1 and isinstance(following := chain[-1].orelse[0], ast.If):
        chain.append(following)
    return chain, chain[-1].orelse


def is_wildcard(case: ast.match_case) -> bool:
    """Whether this is ``case _:``."""
    return isinstance(case.pattern, ast.MatchAs) and case.guard is None


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks directly in a statement."""
    match statement:
        case ast.If(_, body, orelse) | ast.For(_, _, body, orelse):
            yield body
            yield orelse
        case ast.With(_, body):
            yield body
        case ast.Match(_, cases):
            yield from (case.body for case in cases)


def stored_names(statement: ast.stmt) -> list[str]:
    """The names that something in the statement assigns."""
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return list(dict.fromkeys(node.id for node in nodes))


def unreached(block: Iterable[ast.stmt], reached: Set[ast.stmt]) -> Iterator[ast.stmt]:
    """The first statement of every block, and block within, that the translation never came to.

    A return or a pass that never runs takes nothing away from the text.
    """
    for statement in block:
        if statement not in reached and not isinstance(statement, ast.Return | ast.Pass):
            yield statement
            return
        for inner in blocks(statement):
            yield from unreached(inner, reached)
