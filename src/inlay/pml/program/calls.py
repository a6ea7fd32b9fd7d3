"""A program that calls another one: what the other one's arguments stand for."""

from __future__ import annotations

import ast

from inlay.pml.program.assignments import bind_value
from inlay.pml.program.cases import Case
from inlay.pml.program.constants import is_symbolic, kind
from inlay.pml.program.frame import Binding, Frame, Refused, Settled
from inlay.pml.program.inputs import Input, Selected, Selection, Template, Words, position, shown
from inlay.pml.program.object import Program
from inlay.pml.program.values import direct


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
