"""The layers of the package: the allowed imports, and no import cycles.

Every import counts: those inside functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import inlay

SOURCE = Path(inlay.__file__).parent

#: From the ground up: a module imports from rows below its own, and from its own part; parts of one row leave each
#: other alone. A part is a module or a package; the longest name counts, so ``kv.identity`` is not ``kv``.
LAYERS = (
    ("errors", "slots", "wording", "distribution", "logprobs", "diagnostics"),
    ("tolerance", "retrieval", "settings", "workpool"),
    ("types", "sampling.params", "policy", "strict_json", "whole_file", "kv.identity", "kv.choices"),
    ("pml", "kv", "events"),
    ("prompt", "attention"),
    ("models", "config", "output"),
    ("sampling",),
    ("engine",),
    ("measured",),
    ("client",),
    ("__init__",),
    ("api", "authoring"),
    ("server", "batch", "check"),
    ("cluster",),
    ("cli",),
    ("__main__",),
)
ROWS = {part: row for row, parts in enumerate(LAYERS) for part in parts}

#: Rules beyond the rows: the model's side imports nothing of prompts, and prompts import only the store's identities.
APART = {
    **dict.fromkeys(("kv", "kv.identity", "kv.choices", "attention", "models"), ("pml", "prompt")),
    "engine": ("output",),
    "output": ("pml", "kv", "kv.identity", "kv.choices", "attention"),
    "prompt": ("kv", "attention"),
}

#: These come without torch.
LIGHT = (
    "errors",
    "slots",
    "wording",
    "types",
    "sampling.params",
    "events",
    "strict_json",
    "whole_file",
    "kv.identity",
    "kv.choices",
    "pml",
    "pml.json_readers",
    "pml.json_writer",
    "pml.program",
)

Imports = Mapping[str, Mapping[str, int]]
"""By module, the modules of inlay that it imports and the line where it does; names without "inlay." in front."""


def read(files: Mapping[str, str]) -> Imports:
    """The imports of a package, given as the text of each of its modules."""
    modules = frozenset(files)
    return {module: dict(_imported(module, text, modules)) for module, text in files.items()}


@cache
def _import_statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imported(module: str, text: str, modules: frozenset[str]) -> Iterator[tuple[str, int]]:
    for node in _import_statements(text):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: line {node.lineno} is a relative import; write the whole name"
            names = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
        else:
            names = [(alias.name, alias.name) for alias in node.names]
        for candidates in names:
            known = [_short(name) for name in candidates if name.split(".")[0] == "inlay" and _short(name) in modules]
            if known:
                yield known[0], node.lineno


def _short(name: str) -> str:
    return name.partition(".")[2] or "__init__"


def part_of(module: str) -> str:
    """The part of LAYERS that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in ROWS), parts[0])


def problems(imports: Imports) -> Iterator[str]:
    """Yield each forbidden import of a package with the rule that it breaks."""
    for module, targets in imports.items():
        part = part_of(module)
        if part not in ROWS:
            yield f"{module} belongs to no layer; add {part} to LAYERS"
            continue
        for target, line in targets.items():
            if rule := _broken(part, part_of(target)):
                yield f"{module}, line {line}, imports {target}; {rule}"
    yield from (f"{' → '.join(circle)} is a circle" for circle in circles(imports))


def _broken(part: str, target: str) -> str | None:
    if part == target or target not in ROWS:
        return None
    if target in APART.get(part, ()):
        return f"{part} knows nothing of {target}"
    if ROWS[target] == ROWS[part]:
        return f"{part} and {target} are beside each other"
    return f"{target} is above {part}" if ROWS[target] > ROWS[part] else None


def circles(imports: Imports) -> Iterator[list[str]]:
    """One circle of imports through each module that is the first of one, from it back to it."""
    done: set[str] = set()
    for start in imports:
        path = _way(start, start, imports, done)
        if path:
            yield path
        done.add(start)


def _way(start: str, end: str, imports: Imports, without: set[str]) -> list[str] | None:
    """The shortest way along imports, of at least one; through modules that are not left out."""
    before: dict[str, str] = {}
    waiting = [start]
    for module in waiting:
        for target in imports.get(module, {}):
            if target in without or target in before:
                continue
            before[target] = module
            if target == end:
                way = [end, module]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            waiting.append(target)
    return None


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_imports_respect_the_layers(files: dict[str, str]) -> None:
    assert list(problems(read(files))) == []


def test_the_tour_draws_these_layers() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
    drawn = page.partition("## Who imports whom")[2].split("```")[1].strip().splitlines()
    rows = [row for row in LAYERS if not row[0].startswith("__")]
    assert [set(line.split()) for line in drawn] == [set(row) for row in reversed(rows)]


def test_base_layer_imports_no_torch() -> None:
    code = f"import sys, {', '.join(f'inlay.{module}' for module in LIGHT)}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("module", "line", "sentence"),
    [
        ("errors", "from inlay.types import RequestOutput", "imports types; types is above errors"),
        ("errors", "if TYPE_CHECKING:\n    import inlay.types", "imports types; types is above errors"),
        ("kv.store", "from inlay.prompt import composed", "imports prompt.composed; kv knows nothing of prompt"),
        ("prompt.composed", "import inlay.kv.pool", "imports kv.pool; prompt knows nothing of kv"),
        ("models.load", "from inlay.pml.schema import Schema", "imports pml.schema; models knows nothing of pml"),
        ("engine.core", "def f():\n    from inlay.client.llm import LLM", "imports client.llm; client is above engine"),
        ("batch.run", "from inlay.server import app", "imports server.app; batch and server are beside each other"),
        ("engine.core", "import inlay.output", "imports output; engine knows nothing of"),
        ("pml.nodes", "import inlay", "imports __init__; __init__ is above pml"),
    ],
)
def test_an_import_that_breaks_a_rule_is_named(files: dict[str, str], module: str, line: str, sentence: str) -> None:
    planted = {**files, module: f"{files[module]}\n{line}\n"}
    assert any(problem.startswith(f"{module}, line ") and sentence in problem for problem in problems(read(planted)))


def test_import_cycle_is_named() -> None:
    imports = read(
        {
            "pml.a": "from inlay.pml import b",
            "pml.b": "def f():\n    from inlay.pml.c import g",
            "pml.c": "from inlay.pml import a",
            "pml.d": "from inlay.pml import a",
        }
    )
    assert list(problems(imports)) == ["pml.a → pml.b → pml.c → pml.a is a circle"]


def test_module_without_a_layer_is_named() -> None:
    assert list(problems(read({"extras.a": ""}))) == ["extras.a belongs to no layer; add extras to LAYERS"]
