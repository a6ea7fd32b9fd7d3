"""The source of a decorated function: its syntax tree, the names around it, and the grammar of programs.

The grammar lists the statements, expressions and patterns that a program may use, and a remedy for all others. Every
kind of node is in one of its tables. A kind that Python adds later is refused until it is listed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

from inlay.errors import Place, PMLError, Problem
from inlay.pml.problems import Problems
from inlay.wording import shown_path


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """The file of a program. ``lines`` include line breaks."""

    file: str
    lines: tuple[str, ...]

    def place(self, node: ast.AST) -> Place:
        """Return file, line and column of a node. The file is relative to the working folder if inside; columns are
        characters.
        """
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)  # the offset counts bytes
        before = self.lines[line - 1].encode()[:offset] if line <= len(self.lines) else b""
        return Place(self.file, line, len(before.decode(errors="replace")) + 1)


def read_source(function: FunctionType) -> tuple[ProgramSource, ast.FunctionDef]:
    """Find the function's definition in its source. Raises PMLError if the source or the definition cannot be found."""
    file = shown_path(function.__code__.co_filename)
    try:
        lines = tuple(inspect.findsource(function)[0])
        tree = _parsed("".join(lines))
    except (OSError, SyntaxError, ValueError):
        reason = "its source cannot be read, as in an interpreter or in exec; write the program into a file"
        raise _unreadable(function, file, reason) from None
    definition = next(_definitions(tree, function), None)
    if definition is None:
        raise _unreadable(function, file, "its source does not match the running function; reload the file")
    return ProgramSource(file, lines), definition


def _definitions(tree: ast.AST, function: FunctionType) -> Iterator[ast.FunctionDef]:
    code = function.__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if first == code.co_firstlineno and tuple(argument.arg for argument in arguments) == takes:
                yield node


@lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _unreadable(function: FunctionType, file: str, reason: str) -> PMLError:
    place = Place(file, function.__code__.co_firstlineno)
    return PMLError([Problem(place, f"program {function.__name__}: {reason}", code="pml.unreadable_program")])


@dataclass(frozen=True, slots=True)
class Outside:
    """The names that a function sees around it: its closure, its module, the builtins."""

    cells: Mapping[str, Any]
    names: Mapping[str, Any]

    @classmethod
    def of(cls, function: FunctionType) -> Outside:
        """Return the names around the function."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return cls(dict(cells), function.__globals__)

    def find(self, name: str) -> Any:
        """Return the object of that name. Raises NameError if it is not defined yet."""
        if name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:  # an empty cell
                raise NameError(name) from None
        if name in self.names:
            return self.names[name]
        try:
            return getattr(builtins, name)
        except AttributeError:
            raise NameError(name) from None

    def closed(self) -> dict[str, Any]:
        """Return the names of the closure that have a value."""
        found = {}
        for name in self.cells:
            try:
                found[name] = self.find(name)
            except NameError:
                continue
        return found


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
"""By kind of node, the construct that a program cannot have and its remedy."""


def check_grammar(body: list[ast.stmt], source: ProgramSource, problems: Problems) -> frozenset[ast.stmt]:
    """Report constructs that a program cannot have, and return the statements that contain them."""
    checker = _Checker(source, problems)
    for statement in body:
        checker.visit(statement)
    return frozenset(checker.flagged)


class _Checker(ast.NodeVisitor):
    def __init__(self, source: ProgramSource, problems: Problems) -> None:
        self.flagged: set[ast.stmt] = set()
        self._source = source
        self._problems = problems
        self._around: list[ast.AST] = []  # statements, expressions and patterns; operators have no place

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
        self._problems.add(
            self._source.place(self._around[-1]),
            f"a program cannot have {what}; {remedy}",
            code="pml.unsupported_python",
        )
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
    return True  # keywords, cases, comparisons: only their parts are checked


def _inside(node: ast.AST) -> ast.AST:
    """Return the node, or the ``yield`` expression that is the whole statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom):
        return node.value
    return node


def chained(statement: ast.If) -> tuple[list[ast.If], list[ast.stmt]]:
    """Return an ``if`` with all its ``elif``, and the body of ``else``."""
    chain = [statement]
    while len(chain[-1].orelse) == 1 and isinstance(following := chain[-1].orelse[0], ast.If):
        chain.append(following)
    return chain, chain[-1].orelse


def is_wildcard(case: ast.match_case) -> bool:
    """Return True for ``case _:``."""
    return isinstance(case.pattern, ast.MatchAs) and case.guard is None


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks directly inside a statement."""
    match statement:
        case ast.If(_, body, orelse) | ast.For(_, _, body, orelse):
            yield body
            yield orelse
        case ast.With(_, body):
            yield body
        case ast.Match(_, cases):
            yield from (case.body for case in cases)


def stored_names(statement: ast.stmt) -> list[str]:
    """Return the names that the statement or its parts assign."""
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return list(dict.fromkeys(node.id for node in nodes))


def unreached(block: Iterable[ast.stmt], reached: Set[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the first statement of every nested block that the translation never reached.

    An unreached return or pass is ignored, because it removes no text.
    """
    for statement in block:
        if statement not in reached and not isinstance(statement, ast.Return | ast.Pass):
            yield statement
            return
        for inner in blocks(statement):
            yield from unreached(inner, reached)
