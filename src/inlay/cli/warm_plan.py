"""Reads the plan of ``inlay cache warm --plan``, and shows its outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from inlay.cli.pml_files import schema_file
from inlay.errors import ParameterError
from inlay.pml import Schema
from inlay.strict_json import JSONError, read_json
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.client.warm_plan import PlanEntry, PlannedText

_FORM = 'write {"text": …} or {"schema": FILE, "module": PATH}, with "expected" as a number above 0'
_MOST_BYTES = 128 << 20


def read_plan(path: Path) -> tuple[list[PlanEntry], dict[str, Schema]]:
    """Read a plan, JSON lines, with the schemas that it names, by name.

    Raises:
        ParameterError: for a wrong line, with its number.
        PMLError: for a wrong schema.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ParameterError(f"{path}: the plan is larger than 128 MiB; give it in parts")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); give a plan of JSON lines") from None
    schemas: dict[Path, Schema] = {}
    plan = [
        _entry(line, f"{path}:{number}", path.parent, schemas) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not plan:
        raise ParameterError(f"{path} holds no entries; {_FORM} on each line")
    return plan, {schema.name: schema for schema in schemas.values()}


def _entry(line: bytes, where: str, folder: Path, schemas: dict[Path, Schema]) -> PlanEntry:
    from inlay.client.warm_plan import PlanEntry

    try:
        value = read_json(line)
    except JSONError as error:
        raise ParameterError(f"{where}: {error.fault.value}; {_FORM}") from None
    if not isinstance(value, dict):
        raise ParameterError(f"{where}: this is no object; {_FORM}")
    expected = value.pop("expected", 1)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not 0 < expected < math.inf:
        raise ParameterError(f"{where}: expected is {clip(repr(expected))}; {_FORM}")
    text, messages = value.get("text"), value.get("messages", [])
    if isinstance(text, str) and isinstance(messages, list) and value.keys() <= {"text", "messages"}:
        return PlanEntry(float(expected), text=text, messages=messages)
    schema, module = value.get("schema"), value.get("module")
    if isinstance(schema, str) and isinstance(module, str) and value.keys() == {"schema", "module"}:
        file = folder / schema
        if file not in schemas:
            if not file.is_file():
                raise ParameterError(f"{where}: {clip(schema)}: no such file; give a schema's, relative to the plan")
            parsed = schema_file(file)
            if any(other.name == parsed.name for other in schemas.values()):
                raise ParameterError(f"{where}: another file has the schema '{parsed.name}', too; give one of them")
            schemas[file] = parsed
        return PlanEntry(float(expected), schema=schemas[file].name, module=module)
    raise ParameterError(f"{where}: the entry has wrong fields; {_FORM}")


def as_rows(planned: Sequence[PlannedText]) -> list[dict[str, Any]]:
    """Return the outcome as JSON values, the best first."""
    ranked = sorted(planned, key=lambda one: -one.entry.expected)
    return [
        {
            **(
                {"text": one.entry.text}
                if one.entry.text is not None
                else {"schema": one.entry.schema, "module": one.entry.module}
            ),
            "expected": one.entry.expected,
            "tokens": one.tokens,
            "bytes": one.bytes,
            "state": one.state,
            "saved_s_per_byte": one.saved_s_per_byte,
        }
        for one in ranked
    ]


def show_plan(planned: Sequence[PlannedText]) -> None:
    """Print a table of the outcome, the best first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("text", max_width=40, no_wrap=True)
    for name in ("expected", "tokens", "MiB", "s/MiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in as_rows(planned):
        rate = row["saved_s_per_byte"]
        name = row["text"].strip() if "text" in row else f"{row['schema']}/{row['module']}"
        table.add_row(
            clip(name).replace("[", "\\["),
            f"{row['expected']:,g}",
            f"{row['tokens']:,}",
            f"{row['bytes'] / 2**20:,.1f}",
            "-" if rate is None else f"{rate * 2**20:,.3g}",
            row["state"],
        )
    Console(soft_wrap=True).print(table)
