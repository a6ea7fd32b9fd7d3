"""Which of Python's statements, expressions and patterns a program may use, and what to write in place of the others.

Every kind of node is in one of these tables; a kind that Python adds later is refused until somebody decides.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from inlay.pml.problems import Problems
from inlay.pml.program.source import Source

STATEMENTS: frozenset[type[ast.AST]] = frozenset(
    (ast.Expr, ast.If, ast.Match, ast.For, ast.With, ast.Return, ast.Pass, ast.Assign, ast.AnnAssign, ast.AugAssign)
)
EXPRESSIONS: frozenset[type[ast.AST]] = frozenset(
    (
        *(ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Name, ast.Attribute, ast.Subscript, ast.Slice),
        *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call),
        *(ast.Tuple, ast.List, ast.Set, ast.Dict),
    )
)
PATTERNS: frozenset[type[ast.AST]] = frozenset((ast.MatchValue, ast.MatchSingleton, ast.MatchOr))
OPERATORS: frozenset[type[ast.AST]] = frozenset(
    (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Not, ast.UAdd, ast.USub)
)

_OUTSIDE = "do it outside, before the program is decorated"
_COMPUTE = "compute it outside the program and use the result in it"
_ONE = "match one argument against its values"

REFUSED: Mapping[str, tuple[str, str]] = {
    "FunctionDef": ("a function inside it", "define it outside, as a program if it yields text"),
    "AsyncFunctionDef": ("a function inside it", "define it outside"),
    "ClassDef": ("a class inside it", "define it outside"),
    "Delete": ("del", "leave it out"),
    "AsyncFor": ("async for", "write for … in over a constant"),
    "While": ("while, which runs nobody knows how often", "write for … in over a constant"),
    "AsyncWith": ("async with", "write with inlay.user():"),
    "Raise": ("raise", "leave it out: arguments are checked by their types"),
    "Try": ("try", "leave it out: what can fail fails when the program is decorated"),
    "TryStar": ("try", "leave it out: what can fail fails when the program is decorated"),
    "Assert": ("assert", "leave it out: arguments are checked by their types"),
    "Import": ("an import inside it", _OUTSIDE),
    "ImportFrom": ("an import inside it", _OUTSIDE),
    "Global": ("global", _OUTSIDE),
    "Nonlocal": ("nonlocal", _OUTSIDE),
    "Break": ("break", "loop over what is meant alone, or put the rest of the loop under an if"),
    "Continue": ("continue", "put the rest of the loop under an if"),
    "TypeAlias": ("a type inside it", _OUTSIDE),
    "NamedExpr": (":=", "write the assignment as a statement of its own"),
    "Lambda": ("lambda", _COMPUTE),
    "ListComp": ("a comprehension", f"{_COMPUTE}, or write a for loop that yields"),
    "SetComp": ("a comprehension", _COMPUTE),
    "DictComp": ("a comprehension", _COMPUTE),
    "GeneratorExp": ("a comprehension", f"{_COMPUTE}, or write a for loop that yields"),
    "Await": ("await", "have the text ready, or take it as an argument"),
    "Yield": ("the value of a yield", "write yield as a statement of its own"),
    "YieldFrom": ("the value of a yield from", "write yield from as a statement of its own"),
    "Starred": ("a star in it", "write the values one by one"),
    "TemplateStr": ('t"…"', 'write f"…"'),
    "Interpolation": ('t"…"', 'write f"…"'),
    "MatchSequence": ("a pattern of several values", f"{_ONE}, and nest matches"),
    "MatchMapping": ("a pattern of a mapping", _ONE),
    "MatchClass": ("a pattern of a class", _ONE),
    "MatchStar": ("a star in a pattern", _ONE),
    "MatchAs": ("a name in a pattern", "write case _ for all other values"),
    "Pow": ("**", _COMPUTE),
    "MatMult": ("@", _COMPUTE),
    "LShift": ("<<", _COMPUTE),
    "RShift": (">>", _COMPUTE),
    "BitOr": ("|", f"write or between conditions, or {_COMPUTE}"),
    "BitXor": ("^", _COMPUTE),
    "BitAnd": ("&", f"write and between conditions, or {_COMPUTE}"),
    "Invert": ("~", f"write not before a condition, or {_COMPUTE}"),
}
"""By kind of node: what a program cannot have, and what to write instead."""


def check_grammar(body: list[ast.stmt], source: Source, problems: Problems) -> frozenset[ast.stmt]:
    """Report what a program cannot have; returns the statements that it stands in."""
    checker = _Checker(source, problems)
    for statement in body:
        checker.visit(statement)
    return frozenset(checker.flagged)


class _Checker(ast.NodeVisitor):
    def __init__(self, source: Source, problems: Problems) -> None:
        self.flagged: set[ast.stmt] = set()
        self._source = source
        self._problems = problems
        self._around: list[ast.AST] = []  # statements and expressions; operators have no place of their own

    def visit(self, node: ast.AST) -> None:
        placed = isinstance(node, ast.stmt | ast.expr | ast.pattern)
        if placed:
            self._around.append(node)
        if _takes(node):
            self.generic_visit(_inside(node))
        else:
            self._refuse(type(node).__name__)
        if placed:
            self._around.pop()

    def _refuse(self, kind: str) -> None:
        what, remedy = REFUSED.get(kind, (kind, _COMPUTE))
        self._problems.add(self._source.place(self._around[-1]), f"a program cannot have {what}; {remedy}")
        self.flagged.add(next(node for node in reversed(self._around) if isinstance(node, ast.stmt)))


def _takes(node: ast.AST) -> bool:
    kind = type(node)
    if isinstance(node, ast.stmt):
        return kind in STATEMENTS
    if isinstance(node, ast.expr):
        return kind in EXPRESSIONS
    if isinstance(node, ast.pattern):
        return kind in PATTERNS or (isinstance(node, ast.MatchAs) and node.name is None)
    if isinstance(node, ast.operator | ast.unaryop):
        return kind in OPERATORS
    return True  # keywords, cases, comparisons: their parts are looked at


def _inside(node: ast.AST) -> ast.AST:
    """The node; or the yield that it is, which is an expression like no other."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom):
        return node.value
    return node
