"""``inlay schema lint``: gives advice on schema files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import Profile, Tokenizer, deviations_of
from inlay.cli.pml_files import prompt_file, schema_file
from inlay.errors import ModelError, Place, PMLError, Problem
from inlay.pml import Prompt, Schema
from inlay.pml.problems import JSONPlace

if TYPE_CHECKING:
    from inlay.authoring.lint import Finding


@dataclass
class _Report:
    """The findings for one file."""

    file: Path
    schema: str | None = None
    problems: tuple[Problem, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    deviations: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        # "sensitivity" is the former name, kept for one release
        depends = {} if self.deviations is None else dict.fromkeys(("deviation", "sensitivity"), self.deviations)
        return {
            "file": str(self.file),
            "schema": self.schema,
            "problems": [
                _place(problem.place) | {"message": problem.message, "code": problem.code} for problem in self.problems
            ],
            "findings": [
                {"rule": finding.rule} | _place(finding.place) | {"message": finding.message}
                for finding in self.findings
            ],
            **depends,
        }


def lint(
    files: Annotated[list[Path], typer.Argument(help="Schema files (PML or JSON).")],
    model: Tokenizer = "demo",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A prompt file whose arguments are looked at; may stand several times.")
    ] = None,
    small: Annotated[int, typer.Option(help="A module of fewer tokens is too small; 0 for no advice on that.")] = 16,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 if there is any advice.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of lines.")] = False,
    profile: Profile = False,
) -> int:
    """Print advice on schemas, as file:line:column: rule: fault; remedy. Exit status 1 for a wrong file."""
    read = [prompt_file(str(prompt), "--prompts") for prompt in prompts or ()]
    reports = _reports(files, model, read, small, profile=profile)
    if as_json:
        print(json.dumps({"model": model, "files": [report.as_json() for report in reports]}, ensure_ascii=False))
    else:
        _print(reports)
    wrong = any(report.problems for report in reports)
    advised = any(report.findings for report in reports)
    return 1 if wrong or (strict and advised) else 0


def _reports(
    files: list[Path], model: str, prompts: list[Prompt], small: int, *, profile: bool = False
) -> list[_Report]:
    reports = [_Report(file) for file in files]
    schemas: list[tuple[_Report, Schema]] = []
    for report in reports:
        try:
            schema = schema_file(report.file)
        except PMLError as error:
            report.problems = error.problems
        else:
            report.schema = schema.name
            schemas.append((report, schema))
    _check_names(prompts, [schema.name for _, schema in schemas], complete=len(schemas) == len(files))
    if schemas:
        _lint_all(schemas, model, prompts, small)
    sound = [(report, schema) for report, schema in schemas if not report.problems]
    if profile and sound:
        for (report, _), found in zip(sound, deviations_of([schema for _, schema in sound], model), strict=True):
            report.deviations = {name: round(moved, 3) for name, moved in found.items()}
    return reports


def _check_names(prompts: list[Prompt], names: list[str], *, complete: bool) -> None:
    """Refuse prompts without a given schema, unless a schema file is wrong."""
    strays = [prompt for prompt in prompts if prompt.schema not in names]
    if complete and strays:
        raise PMLError(
            Problem(
                stray.place or Place(stray.source),
                f"the prompt is of schema '{stray.schema}' and the schemas given are {', '.join(names)}; "
                "give its schema too, or leave it out",
            )
            for stray in strays
        )


def _lint_all(schemas: list[tuple[_Report, Schema]], model: str, prompts: list[Prompt], small: int) -> None:
    from inlay.authoring.lint import lint_schema
    from inlay.models.load import load_tokenizer
    from inlay.prompt.chat import ChatTemplate
    from inlay.prompt.layout import lay_out_schema
    from inlay.prompt.tokens import TextEncoder

    tokenizer = load_tokenizer(model)
    encoder, template = TextEncoder(tokenizer), ChatTemplate(tokenizer)
    longest = _context(model)
    for report, schema in schemas:
        mine = [prompt for prompt in prompts if prompt.schema == schema.name]
        try:
            layout = lay_out_schema(schema, encoder, template)
            report.findings = lint_schema(layout, encoder, mine, max_positions=longest, small=small)
        except PMLError as error:
            report.problems = error.problems


def _context(model: str) -> int | None:
    """Return the model's context; None if unknown, because a folder may hold only a tokenizer."""
    from inlay.authoring.memory import config_named

    try:
        return getattr(config_named(model), "max_position_embeddings", None)
    except ModelError:
        return None


def _print(reports: list[_Report]) -> None:
    for report in reports:
        for problem in report.problems:
            print(problem, file=sys.stderr)
        for finding in report.findings:
            print(finding)
        if not report.problems and not report.findings:
            print(f"{report.file}: no advice")
        for name, moved in (report.deviations or {}).items():
            what = f"module '{name}'" if name else "the text outside modules"
            print(f"{report.file}: {what} depends on others by {moved:.2f}")


def _place(place: Place) -> dict[str, Any]:
    if isinstance(place, JSONPlace):
        return {"file": place.source, "path": place.path}
    return {"file": place.source, "line": place.line, "column": place.column}
