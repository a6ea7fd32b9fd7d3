"""Translates the statements of a program into a tree of pieces, by partial evaluation.

Constants are evaluated: loops are unrolled, calls of other programs are inlined, and conditions on constants are
decided. Code that depends on arguments becomes a section with its cases. ``if`` becomes a module, a choice among
several a union, and a call a nested module, as in Prompt Cache (arXiv 2311.04934, section 3.2).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from inlay.errors import Place
from inlay.pml.nodes import MAX_ELEMENTS
from inlay.pml.problems import Problems
from inlay.pml.program.cases import (
    MAX_CASES,
    NEVER,
    Case,
    CaseQuestion,
    TooManyCasesError,
    argument_label,
    grouped,
    leaves,
    merged,
)
from inlay.pml.program.inputs import Definition, TextArgument
from inlay.pml.program.paths import (
    Branch,
    Path,
    Piece,
    Said,
    SectionPlan,
    Spoken,
    Where,
    assign,
    assign_annotated,
    assign_augmented,
    assign_value,
    bind_call,
    fork,
    leave_turn,
    refuse,
    says_anything,
)
from inlay.pml.program.runtime import TURNS, Program
from inlay.pml.program.source import blocks, chained, is_wildcard, stored_names, unreached
from inlay.pml.program.values import Evaluator, Frame, Given, Unsettled, UntranslatableError

_T = TypeVar("_T")


def translate(definition: Definition, flagged: frozenset[ast.stmt], problems: Problems) -> list[Piece]:
    """Translate a program into its pieces, and report errors to ``problems``.

    ``flagged`` are the statements that the grammar refuses.
    """
    translator = _Translator(definition, flagged, problems)
    return translator.pieces()


class _TooLargeError(Exception):
    """The program exceeds the size of a schema."""


class _Translator:
    def __init__(self, definition: Definition, flagged: frozenset[ast.stmt], problems: Problems) -> None:
        self._definition = definition
        self._flagged = flagged
        self._problems = problems
        self._reported: set[Place] = set()
        self._reached: set[ast.stmt] = set()
        self._steps = 0
        self._statements: dict[type[ast.stmt], Callable[[Any, Path], None]] = {
            ast.Expr: self._expression,
            ast.If: self._if,
            ast.Match: self._match,
            ast.For: self._for,
            ast.With: self._with,
            ast.Return: self._return,
            ast.Pass: lambda _statement, _path: None,
            ast.Assign: assign,
            ast.AnnAssign: assign_annotated,
            ast.AugAssign: assign_augmented,
        }

    def pieces(self) -> list[Piece]:
        """Translate the program. Call once."""
        definition = self._definition
        taken = {name: definition.inputs.get(name) for name in definition.signature.parameters}
        scope = {name: Unsettled(None) if one is None else Given(one) for name, one in taken.items()}
        pieces: list[Piece] = []
        path = Path(pieces, Frame(definition.source, definition.outside, definition.local_names, scope), {}, Where.TOP)
        try:
            self._block(definition.body, path)
        except _TooLargeError:
            message = f"the program becomes more than {MAX_ELEMENTS:,} pieces; split it, or loop over less"
            self._problems.add(definition.source.place(definition.node), message, code="pml.too_large")
            return pieces
        self._check_turns(pieces)
        if not self._reported and not self._flagged:
            for statement in unreached(definition.body, self._reached):
                message = "this never runs, whatever the arguments are; delete it, or correct the conditions before it"
                self._problems.add(definition.source.place(statement), message, code="pml.unreachable_text")
        return pieces

    def _block(self, statements: Iterable[ast.stmt], path: Path) -> None:
        for statement in statements:
            if not path.alive:
                return
            self._statement(statement, path)

    def _statement(self, statement: ast.stmt, path: Path) -> None:
        self._steps += 1
        if self._steps > MAX_ELEMENTS:
            raise _TooLargeError
        self._reached.add(statement)
        if statement in self._flagged:
            self._skip(statement, path)
            return
        try:
            self._statements[type(statement)](statement, path)
        except UntranslatableError as refused:
            self._report(refused.place, refused.message)
            self._skip(statement, path)
        except TooManyCasesError:
            message = (
                f"this hangs on more than {MAX_CASES:,} combinations of arguments; split it into several statements"
            )
            self._report(path.frame.source.place(statement), message)
            self._skip(statement, path)

    def _report(self, place: Place, message: str | None) -> None:
        if message is not None and place not in self._reported:
            self._problems.add(place, message, code="pml.unsupported_python")
        self._reported.add(place)

    def _skip(self, statement: ast.stmt, path: Path) -> None:
        """Skip a statement that cannot be translated, and report errors in its blocks."""
        for name in stored_names(statement):
            path.frame = path.frame.bound(name, Unsettled(None))
        if type(statement) in self._statements:
            for block in blocks(statement):
                self._block(block, Path([], path.frame, path.known, path.where))

    def _expression(self, statement: ast.Expr, path: Path) -> None:
        value = statement.value
        if isinstance(value, ast.Yield):
            self._yield(value, path)
        elif isinstance(value, ast.YieldFrom):
            self._yield_from(value, path)
        elif isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str)):
            refuse(value, path, "text without yield, which Python drops; write yield before it, or # for a comment")
        else:
            remedy = "write yield or yield from before it if it is text, or pass in place of …"
            refuse(value, path, f"an expression alone, which says nothing; {remedy}")

    def _yield(self, node: ast.Yield, path: Path) -> None:
        value = node.value
        if value is None:
            refuse(node, path, 'a yield without text; write yield "…"')
        found = self._leaves(path, lambda evaluator: evaluator.text(value))[0]
        place = path.frame.source.place(value)
        fork(
            path,
            [Branch(cases, partial(self._say, parts, place), place) for parts, cases in grouped(found, path.known)],
        )

    def _say(self, parts: tuple[str | TextArgument, ...], place: Place, path: Path) -> None:
        said = Said(parts, place)
        arguments = [part.name for part in parts if isinstance(part, TextArgument)]
        if arguments and path.where is not Where.MODULE:
            # only modules hold parameters, so this one is always imported
            section = SectionPlan(argument_label(arguments), place)
            section.body.append(said)
            path.sink.append(section)
        else:
            path.sink.append(said)

    def _yield_from(self, node: ast.YieldFrom, path: Path) -> None:
        found = self._leaves(path, lambda evaluator: evaluator.delegate(node.value))[0]
        place = path.frame.source.place(node)
        branches = []
        for value, cases in grouped(found, path.known, key=id):
            if isinstance(value, Program):
                assert isinstance(node.value, ast.Call)  # delegate returns a program only for its call
                run = partial(self._call, value, node.value)
            else:
                run = partial(self._say_each, value, node.value)
            branches.append(Branch(cases, run, place))
        fork(path, branches)

    def _say_each(self, values: tuple[Any, ...], node: ast.expr, path: Path) -> None:
        for value in values:
            self._say(Evaluator(path.frame, path.known, set()).parts(node, value), path.frame.source.place(node), path)

    def _call(self, program: Program[...], node: ast.Call, path: Path) -> None:
        definition = program.definition
        if definition.home == self._definition.home:
            refuse(node, path, f"program {definition.name} calls itself; write a for loop over a constant")
        if program.schema.has_turns:
            remedy = "write the turns here, and yield from a program without turns in each"
            refuse(node, path, f"program {definition.name} has chat turns, which stand in no module; {remedy}")
        scope = bind_call(program, node, path.frame, path.known)
        section = SectionPlan(argument_label([definition.name]), path.frame.source.place(node), is_call=True)
        inside = path.inside(section)
        inside.frame = Frame(definition.source, definition.outside, definition.local_names, scope)
        self._block(definition.body, inside)
        path.sink.append(section)

    def _if(self, statement: ast.If, path: Path) -> None:
        chain, otherwise = chained(statement)
        self._reached.update(chain)

        def taken(evaluator: Evaluator) -> int:
            return next((number for number, one in enumerate(chain) if evaluator.truth(one.test)), len(chain))

        self._branch(statement, path, taken, [*(one.body for one in chain), otherwise], len(chain))

    def _match(self, statement: ast.Match, path: Path) -> None:
        cases = statement.cases

        def taken(evaluator: Evaluator) -> int:
            fitting = (number for number, case in enumerate(cases) if evaluator.fits(statement.subject, case))
            return next(fitting, len(cases))

        wildcard = len(cases) - 1 if is_wildcard(cases[-1]) else len(cases)
        self._branch(statement, path, taken, [*(case.body for case in cases), []], wildcard)

    def _branch(
        self,
        statement: ast.stmt,
        path: Path,
        taken: Callable[[Evaluator], int],
        bodies: Sequence[list[ast.stmt]],
        otherwise: int,
    ) -> None:
        """Run one of the bodies. ``otherwise`` is the number of the body without a condition."""
        found, asked = self._leaves(path, taken)
        if not asked:
            # constants may exclude branches
            self._reached.update(node for node in ast.walk(statement) if isinstance(node, ast.stmt))
        place = path.frame.source.place
        fork(
            path,
            [
                Branch(cases, partial(self._block, bodies[n]), place((bodies[n] or [statement])[0]), n == otherwise)
                for n, cases in sorted(grouped(found, path.known), key=lambda group: group[0])
            ],
        )

    def _for(self, statement: ast.For, path: Path) -> None:
        if statement.orelse:
            refuse(statement.orelse[0], path, "else of a loop; write what it says behind the loop")
        found, asked = self._leaves(path, lambda evaluator: evaluator.items(statement.iter))
        if not asked and not any(values for _, values in found):
            self._reached.update(node for node in ast.walk(statement) if isinstance(node, ast.stmt))
        place = path.frame.source.place(statement)
        branches = [
            Branch(merged((case,), path.known), partial(self._loop, statement, values), place) for case, values in found
        ]
        fork(path, branches)

    def _loop(self, statement: ast.For, values: tuple[Any, ...], path: Path) -> None:
        for value in values:
            assign_value(statement.target, value, path)
            self._block(statement.body, path)
            if not path.alive:
                return

    def _with(self, statement: ast.With, path: Path) -> None:
        role = self._role(statement, path)
        if path.where is Where.TURN:
            refuse(statement, path, "a chat turn inside another; close the outer one first")
        if path.where is Where.MODULE:
            why = "a chat turn is always there, and this one hangs on an argument, or on a return before it"
            refuse(statement, path, f"{why}; put the condition inside the turn")
        turn = Spoken(role, path.frame.source.place(statement))
        path.sink.append(turn)
        inside = Path(turn.body, path.frame, path.known, Where.TURN)
        self._block(statement.body, inside)
        leave_turn(path, inside, turn.place)

    def _role(self, statement: ast.With, path: Path) -> str:
        item, *more = statement.items
        call = item.context_expr
        functions: list[Any] = []
        if not more and item.optional_vars is None and isinstance(call, ast.Call) and not [*call.args, *call.keywords]:
            functions = [value for _, value in self._leaves(path, lambda evaluator: evaluator.value(call.func))[0]]
        roles = [role for turn, role in TURNS.items() if len(functions) == 1 and functions[0] is turn]
        if not roles:
            remedy = "write with inlay.system():, with inlay.user(): or with inlay.assistant():"
            refuse(call, path, f"this with is no chat turn; {remedy}")
        return roles[0]

    def _return(self, statement: ast.Return, path: Path) -> None:
        if statement.value is not None:
            refuse(statement, path, "a return with a value, which is no text; yield it, and return nothing")
        path.alive = NEVER

    def _leaves(
        self, path: Path, compute: Callable[[Evaluator], _T]
    ) -> tuple[list[tuple[Case, _T]], set[CaseQuestion]]:
        """Compute a result in all cases, and return it with the questions that it depends on."""
        asked: set[CaseQuestion] = set()
        return leaves(lambda known: compute(Evaluator(path.frame, known, asked)), path.known), asked

    def _check_turns(self, pieces: Iterable[Piece]) -> None:
        turns = [piece for piece in pieces if isinstance(piece, Spoken)]
        loose = [piece for piece in pieces if not isinstance(piece, Spoken) and says_anything(piece)]
        if turns and loose:
            message = f"text outside the chat turns of this program; put it into with inlay.{turns[0].role}():"
            self._problems.add(loose[0].place, message, code="pml.text_outside_turns")
