"""Reads the files of schemas and prompts that commands are given."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from inlay.errors import ParameterError, PMLError, Problem
from inlay.pml import Prompt, Schema
from inlay.pml.json_form import parse_json
from inlay.pml.parser import parse
from inlay.pml.problems import Problems
from inlay.pml.sources import document_from_file, is_json
from inlay.wording import clip


def schema_file(path: Path) -> Schema:
    """Read a schema file. Raises PMLError, with advice if it holds a prompt."""
    try:
        return Schema.from_file(path)
    except PMLError as error:
        if _kind(path) != "prompt":
            raise
        of = ""
        with suppress(PMLError):  # the prompt may be wrong, too
            of = f", of schema '{Prompt.from_file(path).schema}'"
        raise _refused(
            error,
            f"this is a prompt{of}; give that schema's file here (inlay run takes both: SCHEMA --prompt PROMPT)",
        ) from None


def prompt_file(path: str, option: str = "--prompt") -> Prompt:
    """Read a prompt from a file, or from standard input for "-". Raises PMLError and ParameterError."""
    if path == "-":
        return Prompt.from_string(standard_input(), source="<stdin>")
    if not os.path.exists(path):
        raise ParameterError(
            f"{clip(path)}: no such file; {option} takes a file that holds a prompt, such as "
            '<prompt schema="…"><module/>Who?</prompt>, or - for standard input'
        )
    try:
        return Prompt.from_file(path)
    except PMLError as error:
        if _kind(Path(path)) != "schema":
            raise
        name, this = "…", "a schema"
        with suppress(PMLError):  # the schema may be wrong, too
            name = Schema.from_file(path).name
            this = f"the schema '{name}'"
        remedy = f'write one, such as <prompt schema="{name}">…</prompt>'
        raise _refused(error, f"this is {this}, and {option} takes a prompt of it; {remedy}") from None


def kind_of(path: Path) -> str:
    """Tell by a file's outermost tag or keys if it is a schema, a prompt or neither. Raises PMLError."""
    data, source = document_from_file(path), str(path)
    if is_json(source):
        root = parse_json(data, source)
        keys = [key for key in ("name", "schema") if isinstance(root, dict) and key in root]
        return {"name": "schema", "schema": "prompt"}[keys[0]] if keys else ""
    element = parse(data, Problems(source), declaration_counts=True)
    return "" if element is None else element.tag


def _kind(path: Path) -> str:
    with suppress(PMLError):
        return kind_of(path)
    return ""


def _refused(error: PMLError, sentence: str) -> PMLError:
    return PMLError([Problem(error.problems[0].place, sentence)])


def standard_input() -> str:
    """Read standard input. Raises ParameterError unless it is UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ParameterError("<stdin>: is not UTF-8; send the prompt as UTF-8") from None
