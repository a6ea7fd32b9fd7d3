"""For ``make test-newest``: the dependencies without their ranges, and a test that every module can be imported.

As a program it prints requirements for pip without versions: the packages that inlay, its extras and its tests import.
torch is the one of constraints.txt, because another torch downloads gigabytes for GPUs.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Extras that the suites of ``make test-newest`` use, besides the dependencies.
EXTRAS = ("gguf", "structured", "plots")
TESTS = ("hypothesis", "jsonschema", "openai", "pytest", "pytest-xdist")


def requirements() -> list[str]:
    """The packages for pip, without versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    names = {re.match(r"[\w.-]+(\[[^]]*\])?", text)[0] for text in ranges} - {"torch"}
    pinned = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None, "constraints.txt pins torch"
    return [pinned[0], *sorted(names.union(TESTS))]


def test_every_module_can_be_imported():
    import inlay

    optional = ("inlay.cluster", "inlay.attention.triton", "inlay.kv.offload.redis")
    for module in pkgutil.walk_packages(inlay.__path__, "inlay."):
        if not module.name.startswith(optional) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements()))
