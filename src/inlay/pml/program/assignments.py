"""Assignments in a program: what names stand for from there on."""

from __future__ import annotations

import ast
from typing import Any

from inlay.pml.program.cases import Case, leaves
from inlay.pml.program.frame import Binding, Deferred, Frame, Settled
from inlay.pml.program.paths import Path, refuse
from inlay.pml.program.values import Evaluator


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
