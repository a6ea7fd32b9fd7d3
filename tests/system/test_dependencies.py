"""Every imported package is declared; the ranges of pyproject.toml and the pins of constraints.txt fit together."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = [
    re.fullmatch(r"([a-zA-Z0-9._-]+)==(\S+)", line).groups()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_every_package_is_pinned_once():
    counts = Counter(canonicalize_name(name) for name, _ in PINS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_pins_are_in_range_and_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {canonicalize_name(name): pinned for name, pinned in PINS}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), text
        assert version(requirement.name).split("+")[0] == pinned, text


def test_every_import_is_of_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    groups = ("otel", "plots", "shared", "structured", "gpu", "gguf", "cluster")
    extras = [text for extra in groups for text in optional[extra]]
    declared = {canonicalize_name(Requirement(text).name) for text in (*project["dependencies"], *extras)}
    homes = packages_distributions() | {
        "gguf": ["gguf"],
        "llama_cpp": ["llama-cpp-python"],
        "ray": ["ray"],
    }  # not installed everywhere
    # a component for a library is imported by those who have the library
    components = ("haystack", "langchain_core", "llama_index")
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "src/inlay").rglob("*.py"))
        for name in _imported(path)
        if name not in components
        if not declared & {canonicalize_name(home) for home in homes.get(name, [name])}
    }
    assert undeclared == set()


def _imported(path: Path) -> set[str]:
    """The packages outside of this one and of Python that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"inlay"}
