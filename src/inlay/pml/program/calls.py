"""Assignments in a program: what names stand for from there on.

A program that calls another one: what the other one's arguments stand for.
"""

from __future__ import annotations

import ast
from typing import Any

from inlay.pml.program.build import Program
from inlay.pml.program.constants import is_symbolic, kind
from inlay.pml.program.inputs import Case, Input, Selected, Selection, Template, Words, leaves, position, shown
from inlay.pml.program.paths import Binding, Deferred, Frame, Path, Refused, Settled, refuse
from inlay.pml.program.values import Evaluator, direct


def assign(statement: ast.Assign, path: Path) -> None:
    """``title = …``"""
    for target in statement.targets:
        _assign_expression(target, statement.value, path)


def assign_annotated(statement: ast.AnnAssign, path: Path) -> None:
    """``title: str = …``"""
    if statement.value is not None:
        _assign_expression(statement.target, statement.value, path)


def assign_augmented(statement: ast.AugAssign, path: Path) -> None:
    """``title += …``, for what is not changed in place."""
    target = statement.target
    if not isinstance(target, ast.Name):
        refuse(target, path, "an assignment to a part of something; assign to a name")
    before = ast.copy_location(ast.Name(target.id, ast.Load()), target)
    _, values = bind_value(before, path.frame, path.known)
    if any(isinstance(value, list | dict | set) for value in values):
        refuse(statement, path, f"{target.id} is changed in place; write {target.id} = {target.id} + …")
    combined = ast.BinOp(before, statement.op, statement.value)
    _assign_expression(target, ast.copy_location(combined, statement), path)


def assign_value(target: ast.expr, value: Any, path: Path) -> None:
    """Assign a known value to a name, or its elements to several."""
    if isinstance(target, ast.Name):
        path.frame = path.frame.bound(target.id, Settled(value))
        return
    if not isinstance(target, ast.Tuple | ast.List):
        refuse(target, path, "an assignment to a part of something; assign to a name")
    values = value if isinstance(value, tuple | list | str) else ()
    if len(values) != len(target.elts):
        refuse(target, path, f"{len(target.elts)} names for another number of values; write a name for each")
    for part, one in zip(target.elts, values, strict=True):
        assign_value(part, one, path)


def bind_value(node: ast.expr, frame: Frame, known: Case) -> tuple[Binding, list[Any]]:
    """What a name stands for that an expression is assigned to, and all values that it can have."""
    found = leaves(lambda at: Evaluator(frame, at, set()).value(node), known)
    values = [value for _, value in found]
    return (Settled(values[0]) if len(values) == 1 else Deferred(node, frame)), values


def _assign_expression(target: ast.expr, node: ast.expr, path: Path) -> None:
    binding, _ = bind_value(node, path.frame, path.known)
    if isinstance(target, ast.Name):
        path.frame = path.frame.bound(target.id, binding)
    elif isinstance(binding, Settled):
        assign_value(target, binding.value, path)
    else:
        refuse(target, path, "several names are assigned what hangs on an argument; assign them one by one")


def bind_call(program: Program[...], node: ast.Call, frame: Frame, known: Case) -> dict[str, Binding]:
    """What the arguments of the called program stand for. Raises Refused for a call that does not fit."""
    definition = program.definition
    place = frame.source.place(node)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    if len(keywords) < len(node.keywords):
        raise Refused(place, "** in a call; write the arguments one by one")
    try:
        bound = definition.signature.bind(*node.args, **keywords)
    except TypeError as error:
        raise Refused(place, f"{error}; call it as {definition.usage}") from None
    bindings: dict[str, Binding] = {}
    for name, parameter in definition.signature.parameters.items():
        if name in bound.arguments:
            bindings[name] = _binding(definition.inputs[name], bound.arguments[name], frame, known)
        else:
            bindings[name] = Settled(parameter.default)
    return bindings


def _binding(one: Input, node: ast.expr, frame: Frame, known: Case) -> Binding:
    binding, values = bind_value(node, frame, known)
    for value in values:
        if objection := _objection(one, value):
            given = kind(value) if is_symbolic(value) else shown(value)
            raise Refused(frame.source.place(node), f"'{one.name}' is {given}; {objection}")
    return binding


def _objection(one: Input, value: object) -> str | None:
    """Why the called program does not take this value, which may be an argument of the calling one."""
    if isinstance(one, Words) and isinstance(value, Template):
        words = direct(value)
        if words is None:
            return "it must be a constant, or a text argument with nothing around it"
        if words.length > one.length:
            return f"it may have {words.length} tokens, and must be {one.allowed}"
        return None
    if isinstance(one, Selection) and isinstance(value, Selected):
        wrong = [held for held in value.selection.values if position(one.values, held) is None]
        return f"it may hold {shown(wrong[0])}, and must be {one.allowed}" if wrong else None
    if is_symbolic(value):
        return f"it must be {one.allowed}"
    return one.objection(value)
