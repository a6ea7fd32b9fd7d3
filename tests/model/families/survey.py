"""Runs the suite over every causal family of transformers: ``python -m tests.model.families.survey``.

Families with reuse have to pass; the others that inlay does not refuse are tried without reuse. Results go to
docs/reference/models.json. The table and the lists in docs/reference/models.md are made from them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inlay.cli.models import family_rows
from inlay.models.families import FAMILIES
from inlay.models.families.recurrent import Recurrent
from inlay.models.multimodal import MULTIMODAL
from inlay.models.unshared import REFUSED, Unshared
from tests.model.families.configs import RECURRENT, ROWS, UNSHARED, model_type, tiny_config
from tests.model.families.recurrent import CHECKS as RECURRENT_CHECKS
from tests.model.families.suite import CHECKS, shifts_are_allowed
from tests.model.families.unshared import CHECKS as UNSHARED_CHECKS

DOCS = Path(__file__).parents[3] / "docs"
RESULTS, PAGE = DOCS / "reference/models.json", DOCS / "reference/models.md"
BEGIN, END = "<!-- made by python -m tests.model.families.survey -->", "<!-- end -->"

#: No tiny configuration has more parameters.
_MOST = 30_000_000


def failures(row: str) -> dict[str, str]:
    """The failed claims of a row, each with the first line of its reason. Shifts are compared where the row claims
    them.
    """
    found = {}
    for check, holds in (RECURRENT_CHECKS if row in RECURRENT else CHECKS).items():
        try:
            if check != "shifts" or shifts_are_allowed(row):
                holds(row)
        except Exception as error:
            found[check] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
    return found


def survey() -> dict[str, Any]:
    """All results, as an object for JSON."""
    rows = {row: failures(row) for row in _timed((*ROWS, *sorted(RECURRENT)))}
    served = [
        each | {"passed": not any(rows[row] for row in rows if model_type(row) == each["family"])}
        for each in family_rows()
    ]
    others = sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in REFUSED and not _is_served(kind))
    return {
        "checks": list(CHECKS),
        "families": served,
        "failures": {row: found for row, found in rows.items() if found},
        "by their text models": list(MULTIMODAL),
        "refused": dict(sorted(REFUSED.items())),
        "without reuse": {kind: _tried(kind) for kind in _timed(others)},
    }


def _is_served(kind: str) -> bool:
    """True if models of a type have reuse, whatever their configuration, or only their text models are served.

    A name of a model may stand for another one's configuration, as gpt-sw3 does for gpt2's.
    """
    return kind in MULTIMODAL or (CONFIG_MAPPING[kind].model_type in FAMILIES and kind not in UNSHARED)


def _timed(names: Any) -> Any:
    for name in names:
        began = time.monotonic()
        yield name
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)


def _tried(kind: str) -> str:
    """The result of a family that is served without reuse: passed, or its first obstacle."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(kind))
        if sum(parameter.numel() for parameter in model.parameters()) > _MOST:
            return "has no tiny configuration yet"
    except Exception as error:
        return f"has no tiny configuration yet ({type(error).__name__})"
    for check, holds in UNSHARED_CHECKS.items():
        try:
            holds(kind)
        except Exception as error:
            return f"{check}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
    return "passes"


def table(results: dict[str, Any]) -> str:
    """The table of docs/reference/models.md."""
    names = "exact", "modular", "shifts", "windows", "sinks", "cached", "weights", "int8", "adapters", "chat tools"
    lines = [f"| family | {' | '.join(names)} |", "|" + "---|" * (1 + len(names))]
    for row in results["families"]:
        mark = "✓" if row["passed"] else "fails"
        shifts = f"{mark} {row['shifts']}" if row["shifts"] else f"no: {row['reason']}"
        modular = mark if row["modular"] else "no"
        cells = [row["family"], mark, modular, shifts, f"{mark} per layer" if row["windows"] else ""]
        cells += [mark if row["sinks"] else "", _cached(row)]
        cells += ["joined" if row["joined"] else "packed", mark, mark, mark]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cached(row: dict[str, Any]) -> str:
    kept = "one latent" if row["latent"] else "keys and values"
    recurrent = isinstance(FAMILIES[row["family"]], Recurrent)
    return f"states; {kept} of layers that attend" if recurrent else kept


def reasons(results: dict[str, Any]) -> str:
    """The lists in docs/reference/models.md: multimodal checkpoints, families without reuse, refused families."""
    parts = [f"Served by their text models: {', '.join(results['by their text models'])}."]
    parts.append("Served without reuse, because")
    for reason, kinds in _by_reason({kind: Unshared(kind).why for kind in results["without reuse"]}).items():
        marked = (kind + ("" if results["without reuse"][kind] == "passes" else "*") for kind in kinds)
        parts.append(f"- {reason}: {', '.join(marked)}.")
    parts.append("\\* not tested yet on a tiny model, or not passed; the probe at load refuses what it finds wrong.")
    parts.append("Not served, because")
    parts += [f"- {reason}: {', '.join(kinds)}." for reason, kinds in _by_reason(results["refused"]).items()]
    return "\n\n".join("\n".join(lines) for lines in _blocks(parts))


def _by_reason(why: dict[str, str]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for kind, reason in why.items():
        kinds.setdefault(reason, []).append(kind)
    return kinds


def _blocks(lines: list[str]) -> list[list[str]]:
    """Lines as paragraphs: those of a list are one."""
    blocks: list[list[str]] = []
    for line in lines:
        if line.startswith("- ") and blocks[-1][-1].startswith("- "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return blocks


def generated(results: dict[str, Any]) -> str:
    """The text between the two marks of docs/reference/models.md."""
    return f"{BEGIN}\n\n{table(results)}\n\n{reasons(results)}\n\n{END}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="make the page again from the existing results")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if not parser.parse_args().table:
        RESULTS.write_text(json.dumps(survey(), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + generated(results) + rest.partition(END)[2], encoding="utf-8")
    if results["failures"]:
        sys.exit(f"not all families hold: {', '.join(results['failures'])}")


if __name__ == "__main__":
    main()
