"""The pages of docs/ as data, so that tests can run what they show: fenced blocks, and rows of tables."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_FENCED = re.compile(r"^```(\w*)[ ]?(.*)\n((?s:.*?))^```$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the words after the language, its text, and the file and line of its fence."""

    language: str
    note: str
    text: str
    page: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page; a fence that is not closed is an error."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], match[3], page.name, text.count("\n", 0, match.start()) + 1)
        for match in _FENCED.finditer(text)
    ]
    fences = len(re.findall("^```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{page.name} has {fences} fences and {len(found)} blocks"
    return found


def rows(page: Path, *header: str) -> list[tuple[str, ...]]:
    """The cells of all tables of a page that have this header."""
    found: list[tuple[str, ...]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if inside and cells and not set(line) <= set("|-: "):
            found.append(cells)
        inside = cells == header or (inside and bool(cells))
    return found


def curl(line: str) -> str:
    """The output of a page's line that calls curl."""
    command, *rest = shlex.split(line)
    assert command == "curl"
    done = subprocess.run([command, "-sS", *rest], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
