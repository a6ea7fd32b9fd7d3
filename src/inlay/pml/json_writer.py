"""Writes nodes as readable JSON that reads back to the same nodes.

Strings are written exactly; JSON has no white-space rule. See docs/reference/pml-json.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from inlay.errors import ParameterError, PMLError
from inlay.pml.json_readers import read_prompt_json, read_schema_json
from inlay.pml.nodes import MAX_DEPTH, Import, ImportSet, Meta, Module, Param, PromptTurn, Scaffold, Text, Turn, Union
from inlay.pml.sources import document_from_string
from inlay.wording import quote

_Node = Text | Param | Module | Union | Turn | Import | ImportSet | PromptTurn
_Value = dict[str, Any]

_WIDTH = 100  # characters of a line that holds a whole list or object
_INDENTATION = "  "


def write_schema_json(
    name: str,
    children: Iterable[Text | Module | Union | Turn],
    scaffolds: Iterable[Scaffold],
    meta: Iterable[Meta] = (),
) -> str:
    """Write a schema as JSON that ends in a line break and reads back to the same nodes, except for their places.

    Text from ``src`` files is written inline. Raises ParameterError for nodes that break the rules of PML.
    """
    document: _Value = {"name": name, "content": _content(children, 1)}
    if together := [list(scaffold.modules) for scaffold in scaffolds]:
        document["scaffolds"] = together
    document |= _meta(meta, f"schema {quote(name)}")
    return _checked(document, f"schema {quote(name)}", lambda data, what: read_schema_json(data, what, None))


def write_prompt_json(schema: str, children: Iterable[Text | Import | ImportSet | PromptTurn]) -> str:
    """Write a prompt as JSON that ends in a line break and reads back to the same nodes, except for their places.

    ``schema`` is the name of the prompt's schema. Raises ParameterError for nodes that break the rules of PML.
    """
    document = {"schema": schema, "content": _content(children, 1)}
    return _checked(document, f"the prompt of schema {quote(schema)}", read_prompt_json)


def _checked(document: _Value, what: str, read: Callable[[bytes, str], object]) -> str:
    text = _laid_out(document, 0) + "\n"
    # callers may pass any nodes, and the readers check every rule
    try:
        read(document_from_string(text, what), what)
    except PMLError as error:
        raise ParameterError(f"cannot be written as JSON: {error.problems[0]}", code="pml.not_writable") from None
    return text


def _content(nodes: Iterable[_Node], depth: int) -> str | list[str | _Value]:
    """Return the content of an object at nesting depth ``depth``: a single text, or a list."""
    content = [
        node.text if isinstance(node, Text) else _value(node, depth + 1)
        for node in nodes
        if not isinstance(node, Text) or node.text
    ]
    return content[0] if len(content) == 1 and isinstance(content[0], str) else content


def _value(node: Param | Module | Union | Turn | Import | ImportSet | PromptTurn, depth: int) -> _Value:
    if depth > MAX_DEPTH:
        raise ParameterError(
            f"objects would be nested more than {MAX_DEPTH} deep; nest less deeply", code="pml.too_deep"
        )
    if isinstance(node, Param):
        given = {"default": node.default, "scaffold": node.scaffold}
        told = _meta(node.meta, f"parameter {quote(node.name)}")
        return {"param": node.name, "len": node.length} | _without_none(given) | told
    if isinstance(node, Module):
        told = ({} if node.cache else {"cache": False}) | _meta(node.meta, f"module {quote(node.name)}")
        return {"module": node.name} | told | {"content": _content(node.children, depth)}
    if isinstance(node, Union):
        told = _without_none({"scaffold": node.scaffold}) | _meta(node.meta, "a union")
        return told | {"union": [_value(member, depth + 1) for member in node.members]}
    if isinstance(node, Import):
        return _import(node, depth)
    if isinstance(node, ImportSet):
        return {"set": [_value(each, depth + 1) for each in node.imports]}
    told = _meta(node.meta, "a turn") if isinstance(node, Turn) else {}
    return {"role": node.role} | told | {"content": _content(node.children, depth)}


def _without_none(value: _Value) -> _Value:
    return {key: one for key, one in value.items() if one is not None}


def _meta(meta: Iterable[Meta], what: str) -> _Value:
    told: dict[str, str] = {}
    for one in meta:
        if one.name in told:
            raise ParameterError(
                f"{what} has the metadata {quote(one.name)} twice; keep one of them", code="pml.duplicate_metadata"
            )
        told[one.name] = one.value
    return {"meta": told} if told else {}


def _import(node: Import, depth: int) -> _Value:
    value: _Value = {"import": node.name}
    if node.arguments:
        value["arguments"] = {argument.name: argument.value for argument in node.arguments}
        if len(value["arguments"]) < len(node.arguments):
            raise ParameterError(
                f"module {quote(node.name)} is given the same argument twice; keep one of them",
                code="pml.duplicate_argument",
            )
    if node.children:
        value["content"] = _content(node.children, depth)
    return value


def _laid_out(value: Any, level: int) -> str:
    """Format a value on one line if it is short, otherwise with each member on its own line."""
    if isinstance(value, dict):
        members = [f"{_dumped(key)}: {_laid_out(member, level + 1)}" for key, member in value.items()]
        start, end = "{}"
    elif isinstance(value, list):
        members = [_laid_out(member, level + 1) for member in value]
        start, end = "[]"
    else:
        return _dumped(value)
    indentation = _INDENTATION * level
    width = len(indentation) + sum(len(member) + 2 for member in members)
    if width <= _WIDTH and not any("\n" in member for member in members):
        return f"{start}{', '.join(members)}{end}"
    lines = ",\n".join(f"{indentation}{_INDENTATION}{member}" for member in members)
    return f"{start}\n{lines}\n{indentation}{end}" if members else start + end


def _dumped(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)
