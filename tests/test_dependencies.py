"""The ranges that pyproject.toml states and the versions that constraints.txt pins belong together."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = [
    re.fullmatch(r"([a-zA-Z0-9._-]+)==(\S+)", line).groups()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_every_package_is_pinned_once():
    counts = Counter(canonicalize_name(name) for name, _ in PINS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_pins_lie_in_the_ranges_and_are_what_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {canonicalize_name(name): pinned for name, pinned in PINS}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), text
        assert version(requirement.name).split("+")[0] == pinned, text
