"""Output of the bench commands: tables, the machine's peak rates, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def show(result: dict[str, Any], tables: Iterable[tuple[str, Table]], as_json: bool, notes: Iterable[str] = ()) -> None:
    """Print titled tables, notes, and the machine's peak rates if they are known, or with ``as_json`` only JSON."""
    from inlay.cli.output import stdout_console

    if as_json:
        print(json.dumps(result))
        return
    from rich.markup import escape

    console = stdout_console()
    for title, table in tables:
        console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False, soft_wrap=True)
        console.print(table)
    for note in (*notes, *([_ceilings(result)] if "ceilings" in result else [])):
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def make_table(headings: Sequence[str]) -> Table:
    """An empty table of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def number(value: float | None) -> str:
    """A cell: a whole number, three digits of a fraction, or a dash for None."""
    if value is None:
        return "—"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def _ceilings(result: dict[str, Any]) -> str:
    rates, machine = result["ceilings"], result["machine"]
    products = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in rates["gemm_gflops"].items())
    quick = " (a quick run: its figures say little)" if result["quick"] else ""
    return (
        f"\n{machine['threads']} threads of {machine['cpu']}, {machine['cpu_capability']}: matrix products {products}; "
        f"copying {rates['copy_gb_s']:.1f} GB/s, read and written counted{quick}"
    )
