"""Evaluates expressions of a program while it is translated.

Constants have their Python values. A choice, or a condition on arguments, has a value only if the answers of a call
are known. Otherwise the evaluation raises Undecided, and its caller tries the possible answers one by one. Text
arguments are holes in a Template.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from inlay.errors import Place, PortableError
from inlay.pml.program import constants
from inlay.pml.program.cases import Case, CaseQuestion, Undecided, possible
from inlay.pml.program.constants import Unusable, is_symbolic, kind
from inlay.pml.program.inputs import ChoiceArgument, Input, Selected, SetArgument, Template, TextArgument
from inlay.pml.program.runtime import Program
from inlay.pml.program.source import Outside, ProgramSource
from inlay.wording import shown_python


class UntranslatableError(PortableError):  # carries a problem to the statement that it is in
    """An expression cannot be translated. ``message`` is None if the cause is already reported."""

    def __init__(self, place: Place, message: str | None) -> None:
        self.place = place
        self.message = message


@dataclass(frozen=True, slots=True)
class Given:
    """A name that stands for an argument of the program."""

    input: Input


@dataclass(frozen=True, slots=True)
class Settled:
    """A name with a known value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """A name for an expression that depends on answers, with the frame in which it was written."""

    node: ast.expr
    frame: Frame


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A name without a single value. ``message`` is None if the cause is already reported."""

    message: str | None


Binding = Given | Settled | Deferred | Unsettled


@dataclass(frozen=True, slots=True)
class Frame:
    """The bindings of the names at one point of a program."""

    source: ProgramSource
    outside: Outside
    local_names: frozenset[str]
    scope: Mapping[str, Binding]

    def bound(self, name: str, binding: Binding) -> Frame:
        """Return the frame after an assignment."""
        return replace(self, scope={**self.scope, name: binding})


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates expressions in a frame.

    Every method raises Undecided, or Refused if an expression cannot be translated.

    Attributes:
        known: The answers that are known at this point.
        asked: Collects the questions that values depend on, known or not.
    """

    frame: Frame
    known: Case
    asked: set[CaseQuestion]

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        with self._refusing(node):
            return self._value(node)

    def truth(self, node: ast.expr) -> bool:
        """Return the truth value of an expression."""
        value = self.value(node)
        with self._refusing(node):
            return self._truth(value)

    def text(self, node: ast.expr) -> tuple[str | TextArgument, ...]:
        """Return a yielded expression as texts and holes."""
        return self.parts(node, self.value(node))

    def parts(self, node: ast.expr, value: Any) -> tuple[str | TextArgument, ...]:
        """Return the value that ``node`` yields as texts and holes."""
        pieces = value.parts if isinstance(value, Template) else (value,)
        with self._refusing(node):
            return tuple(one if isinstance(one, TextArgument) else constants.text(one) for one in pieces if one != "")

    def items(self, node: ast.expr) -> tuple[Any, ...]:
        """Return the values of a loop over an expression."""
        value = self.value(node)
        with self._refusing(node):
            return constants.items(value)

    def delegate(self, node: ast.expr) -> Program[...] | tuple[Any, ...]:
        """Return the program that ``yield from`` calls, or the texts that it yields."""
        if isinstance(node, ast.Call) and not self._is_method(node.func):
            function = self.value(node.func)
            if isinstance(function, Program):
                return function
        value = self.value(node)
        if isinstance(value, str | Template):
            raise UntranslatableError(
                self.frame.source.place(node), "yield from a text, one character at a time; write yield"
            )
        if isinstance(value, Program):
            name = value.__name__
            raise UntranslatableError(
                self.frame.source.place(node), f"program {name} is not called; write yield from {name}(…)"
            )
        return self.items(node)

    def fits(self, subject: ast.expr, case: ast.match_case) -> bool:
        """Return True if a case of a match fits the subject."""
        return self._matches(subject, case.pattern) and (case.guard is None or self.truth(case.guard))

    def _matches(self, subject: ast.expr, pattern: ast.pattern) -> bool:
        match pattern:
            case ast.MatchOr(patterns):
                return any(self._matches(subject, one) for one in patterns)
            case ast.MatchValue(value):
                comparison = ast.Compare(subject, [ast.Eq()], [value])
            case ast.MatchSingleton(value):
                constant = ast.copy_location(ast.Constant(value), pattern)
                comparison = ast.Compare(subject, [ast.Is()], [constant])
            case _:  # the wildcard; the grammar allows nothing else
                return True
        return self.truth(ast.copy_location(comparison, pattern))

    @contextmanager
    def _refusing(self, node: ast.expr) -> Iterator[None]:
        """Turn Unusable into Refused, with the place of the node."""
        try:
            yield
        except Unusable as reason:
            raise UntranslatableError(self.frame.source.place(node), str(reason)) from None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return self._name(name)
            case ast.Attribute(value, name):
                return constants.attribute(self.value(value), name)
            case ast.Subscript(value, key):
                return constants.item(self.value(value), self._key(key))
            case ast.JoinedStr(pieces):
                return constants.merged_parts(self._piece(piece) for piece in pieces)
            case ast.BinOp(left, operation, right):
                return constants.combined(operation, self.value(left), self.value(right))
            case ast.UnaryOp(ast.Not(), operand):
                return not self.truth(operand)
            case ast.UnaryOp(sign, operand):
                return constants.signed(sign, self.value(operand))
            case ast.BoolOp(operation, operands):
                return self._first(operands, until=isinstance(operation, ast.Or))
            case ast.IfExp(test, then, otherwise):
                return self.value(then if self.truth(test) else otherwise)
            case ast.Compare():
                return self._compare(node)
            case ast.Call():
                return self._call(node)
            case _:
                return self._display(node)

    def _name(self, name: str) -> Any:
        if name not in self.frame.local_names:
            try:
                return self.frame.outside.find(name)
            except NameError:
                raise Unusable(f"{name} is not defined when the program is decorated; define it above") from None
        match self.frame.scope.get(name):
            case Given(ChoiceArgument() as choice):
                return self._answer(choice.question)
            case Given(SetArgument() as selection):
                return Selected(selection)
            case Given(TextArgument() as words):
                return Template((words,))
            case Settled(value):
                return value
            case Deferred(node, frame):
                return Evaluator(frame, self.known, self.asked).value(node)
            case Unsettled(message):
                raise UntranslatableError(Place(self.frame.source.file), None) if message is None else Unusable(message)
            case _:
                raise Unusable(f"{name} has no value here; assign it above")

    def _answer(self, question: CaseQuestion) -> Any:
        self.asked.add(question)
        answers = possible(self.known, question)
        if len(answers) != 1:
            raise Undecided(question)
        return question.answers[min(answers)]

    def _truth(self, value: Any) -> bool:
        match value:
            case Template(parts):
                holes = [part for part in parts if isinstance(part, TextArgument)]
                return len(holes) < len(parts) or any(self._answer(words.question) for words in holes)
            case Selected(selection):
                return bool(self._answer(selection.any))
            case _:
                return constants.truth(value)

    def _first(self, operands: list[ast.expr], *, until: bool) -> Any:
        """Evaluate ``or`` or ``and``: return the first operand whose truth equals ``until``, or the last operand."""
        for operand in operands[:-1]:
            if self.truth(operand) == until:
                return self.value(operand)
        return self.value(operands[-1])

    def _key(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.value(node)
        return slice(*(None if part is None else self.value(part) for part in (node.lower, node.upper, node.step)))

    def _piece(self, node: ast.expr) -> str | Template:
        """Evaluate a piece of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return str(self.value(node))
        value = self.value(node.value)
        spec = "" if node.format_spec is None else self.value(node.format_spec)
        if not isinstance(value, Template):
            if not isinstance(spec, str):
                raise Unusable("a text argument is a format; format constants with constants")
            return constants.formatted(value, node.conversion, spec)
        if spec or node.conversion not in (-1, ord("s")):
            raise Unusable("a text argument is formatted; it goes into the text as it is: write {name} alone")
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left = node.left
        for comparison, right in zip(node.ops, node.comparators, strict=True):
            if not self._compared(left, comparison, right):
                return False
            left = right
        return True

    def _compared(self, left: ast.expr, comparison: ast.cmpop, right: ast.expr) -> bool:
        if isinstance(comparison, ast.In | ast.NotIn):
            self._check_possible(left, right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [])
        elif isinstance(comparison, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            self._check_possible(left, [right])
            self._check_possible(right, [left])
        container = self.value(right)
        if isinstance(comparison, ast.In | ast.NotIn) and isinstance(container, Selected):
            return self._is_in(left, container.selection, self._given(right)) == isinstance(comparison, ast.In)
        return constants.compared(comparison, self.value(left), container)

    def _is_in(self, node: ast.expr, selection: SetArgument, given: Input | None) -> bool:
        value = self.value(node)
        if is_symbolic(value):
            raise Unusable(f"{kind(value)} is looked for in '{selection.name}'; ask for one of its values")
        pairs = zip(selection.values, selection.questions, strict=True)
        questions = [question for one, question in pairs if one == value]
        if not questions and given is not None:
            raise Unusable(f"'{given.name}' never holds {shown_python(value)}; it is {given.allowed}")
        return any(self._answer(question) for question in questions)

    def _given(self, node: ast.expr) -> Input | None:
        """Return the program's argument that an expression names, or None."""
        binding = self.frame.scope.get(node.id) if isinstance(node, ast.Name) else None
        return binding.input if isinstance(binding, Given) else None

    def _check_possible(self, asked: ast.expr, answers: Iterable[ast.expr]) -> None:
        """Refuse a comparison of an argument with a constant that it never equals, because it would hide text for
        ever.
        """
        given = self._given(asked)
        if not isinstance(given, ChoiceArgument):
            return
        for node in answers:
            hangs_on: set[CaseQuestion] = set()
            try:
                value = Evaluator(self.frame, self.known, hangs_on).value(node)
            except Undecided:
                continue
            if not hangs_on and not is_symbolic(value) and not any(one == value for one in given.values):
                never = f"'{given.name}' is never {shown_python(value)}; it is {given.allowed}"
                raise UntranslatableError(self.frame.source.place(node), never)

    def _call(self, node: ast.Call) -> Any:
        if any(keyword.arg is None for keyword in node.keywords):
            raise Unusable("** in a call; write the arguments one by one")
        keywords = {str(keyword.arg): keyword.value for keyword in node.keywords}
        arguments = [self.value(argument) for argument in node.args]
        named = {name: self.value(argument) for name, argument in keywords.items()}
        if isinstance(node.func, ast.Attribute) and self._is_method(node.func):
            return constants.method(self.value(node.func.value), node.func.attr, arguments, named)
        function = self.value(node.func)
        if isinstance(function, Program):
            name = function.__name__
            raise Unusable(f"program {name} is called without yield from; write yield from {name}(…)")
        return constants.called(function, arguments, named)

    def _is_method(self, function: ast.expr) -> bool:
        """Return True if a method of a text or a dict is called."""
        return isinstance(function, ast.Attribute) and isinstance(self.value(function.value), str | dict | Template)

    def _display(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple | ast.List):
            elements = [self.value(element) for element in node.elts]
            return tuple(elements) if isinstance(node, ast.Tuple) else elements
        if isinstance(node, ast.Set):
            return frozenset(map(self._hashed, node.elts))
        assert isinstance(node, ast.Dict)  # the grammar allows nothing else
        if None in node.keys:
            raise Unusable("** in a dict; write its items one by one")
        keys = [self._hashed(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(self.value, node.values), strict=True))

    def _hashed(self, node: ast.expr) -> Any:
        value = self.value(node)
        if is_symbolic(value):
            raise Unusable(f"{kind(value)} is a key; make it a Literal[…], one of a few values")
        constants.attempt(lambda: hash(value))
        return value


def direct(value: object) -> TextArgument | None:
    """Return the text argument if the value is exactly one, without text around it."""
    if isinstance(value, Template) and len(value.parts) == 1 and isinstance(value.parts[0], TextArgument):
        return value.parts[0]
    return None
