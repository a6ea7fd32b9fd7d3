"""``inlay convert``: converts schemas and prompts between PML and JSON, and prints the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.output import check_outputs, output_file
from inlay.cli.pml_files import kind_of
from inlay.errors import ParameterError
from inlay.pml import Prompt, Schema
from inlay.pml.sources import is_json

_FORMS = ("json", "pml")


def convert(
    file: Annotated[Path, typer.Argument(help="A schema or a prompt: JSON if its name ends in .json, else PML.")],
    to: Annotated[
        str | None, typer.Option(help="json or pml; that of --output, or else the other one, if not given.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write it; standard output, if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Write a schema or a prompt in the other form: PML as JSON, JSON as PML. Text from src files goes in."""
    form = _form(file, to, output)
    check_outputs((output,), force)
    document = _read(file)
    text = document.to_json() if form == "json" else document.to_pml()
    if output is None:
        print(text, end="")
    else:
        with output_file(output) as write:
            write(text)


def print_json_schema() -> None:
    """Print the JSON Schema (draft 2020-12) of schemas and prompts in their JSON form."""
    from inlay.pml.json_form import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _form(file: Path, to: str | None, output: Path | None) -> str:
    if to is None:
        wants_json = not is_json(str(file)) if output is None else is_json(str(output))
        return "json" if wants_json else "pml"
    if to not in _FORMS:
        raise ParameterError(f"--to is '{to}'; use one of {', '.join(_FORMS)}")
    if output is not None and is_json(str(output)) is not (to == "json"):
        remedy = "JSON is read from files whose names end in .json alone, and PML from others"
        raise ParameterError(f"--to is {to} and --output {output}; {remedy}: change one of them")
    return to


def _read(file: Path) -> Schema | Prompt:
    """Parse a schema or a prompt. Errors of other documents are those of a schema."""
    return Prompt.from_file(file) if kind_of(file) == "prompt" else Schema.from_file(file)
