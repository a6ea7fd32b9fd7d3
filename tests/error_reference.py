"""Generates docs/errors.md, the list of all error codes, from the sources.

Run it from the checkout: ``python -m tests.error_reference``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
SOURCES = ROOT / "src" / "inlay"

_HELPERS = {"Problem", "add", "stop", "refused", "refusal"}  # they take the code of a problem in PML
_SERVER = {"BodyError", "StatusError"}  # their codes are those of the server's APIs, in docs/reference/http.md
_HEADER = """\
# Error codes

Every error that Inlay raises on purpose has a `code`. Programs compare the code, because the wording of a message may
change. In Python it is `error.code`; each problem of a `PMLError` has a code of its own. The server and `--json` show
it as `code`.

The page is generated. After a change to a message or a code, run `python -m tests.error_reference`. Words in braces
stand for values.
"""


@dataclass
class Entry:
    """One code: the classes, messages and files that have it."""

    classes: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)


class _Sources:
    """The parsed sources, with the error classes and the functions that return messages."""

    def __init__(self) -> None:
        paths = sorted(SOURCES.rglob("*.py"))
        self.trees = {path.relative_to(SOURCES).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}
        self.functions: dict[str, list[ast.expr]] = {}
        self.defaults: dict[str, str | None] = {"InlayError": None}
        classes = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes.append(node)
                elif isinstance(node, ast.FunctionDef) and name.startswith("pml/") and not node.name.startswith("_"):
                    returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                    self.functions.setdefault(node.name, returned)
        for _ in range(4):  # as deep as the tree of classes
            for cls in classes:
                for base in cls.bases:
                    if isinstance(base, ast.Name) and base.id in self.defaults and cls.name.lstrip("_") not in _SERVER:
                        self.defaults[cls.name] = _own_code(cls) or self.defaults[base.id]
        self.defaults["InlayError"] = "error"


def _own_code(cls: ast.ClassDef) -> str | None:
    for node in cls.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == "code" and isinstance(value, ast.Constant):
            return str(value.value)
    return None


@cache
def entries() -> dict[str, Entry]:
    """Return all codes with their classes, messages and files."""
    sources = _Sources()
    found: dict[str, Entry] = defaultdict(Entry)
    for name, tree in sources.trees.items():
        for call, scope in _calls(tree, tree):
            kind = _name(call.func)
            if kind == "PMLError" or not (kind.lstrip("_") in _HELPERS or kind in sources.defaults):
                continue
            given = next((each.value for each in call.keywords if each.arg == "code"), None)
            codes = _codes(given) if given is not None else []
            if given is None and kind.lstrip("_") not in _HELPERS:
                codes = [sources.defaults[kind] or "error"]
            at = 0 if kind in sources.defaults or kind.lstrip("_") == "refusal" else 1
            for code in codes:
                entry = found[code]
                entry.classes.add(kind if kind in sources.defaults else "PMLError")
                entry.files.add(name)
                if len(call.args) > at:
                    entry.messages += [text for text in _templates(call.args[at], scope, sources) if text]
    return dict(found)


def _codes(given: ast.expr) -> list[str]:
    """Return the constants that a code may be; those of a passed-on code are named where they are made."""
    if isinstance(given, ast.IfExp):
        return _codes(given.body) + _codes(given.orelse)
    return [given.value] if isinstance(given, ast.Constant) and isinstance(given.value, str) else []


def _calls(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        if isinstance(child, ast.Call):
            yield child, scope
        yield from _calls(child, inner)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _templates(node: ast.expr, scope: ast.AST, sources: _Sources, depth: int = 0) -> list[str]:
    """Return the texts that an expression may become, with placeholders."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(_part(value) for value in node.values)]
    if isinstance(node, ast.IfExp):
        return [text for each in (node.body, node.orelse) for text in _templates(each, scope, sources, depth)]
    values: list[ast.expr] = []
    if isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(scope)
            if isinstance(each, ast.Assign) and any(_name(target) == node.id for target in each.targets)
        ]
    elif isinstance(node, ast.Call):
        values = sources.functions.get(_name(node.func), [])
    if depth < 3 and values:
        return [text for each in values for text in _templates(each, scope, sources, depth + 1)]
    return ["{" + _placeholder(node) + "}"]


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    return "{" + _placeholder(value.value if isinstance(value, ast.FormattedValue) else value) + "}"


def _placeholder(node: ast.expr) -> str:
    """Return a short name for a value."""
    if isinstance(node, ast.Call) and node.args and _name(node.func) not in ("next", "type"):
        return _placeholder(node.args[0])
    if isinstance(node, ast.Subscript | ast.Starred):
        return _placeholder(node.value)
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]
    return _name(names[0]).strip("_").lower() if names else "value"


def page() -> str:
    """Return the text of docs/errors.md."""
    areas: dict[str, list[str]] = defaultdict(list)
    for code, entry in sorted(entries().items()):
        classes = ", ".join(f"`{each}`" for each in sorted(entry.classes))
        messages = "<br>".join(f"`` {_cell(each)} ``" for each in dict.fromkeys(entry.messages))
        files = "<br>".join(f"`{each}`" for each in sorted(entry.files))
        areas[code.partition(".")[0]].append(f"| `{code}` | {classes} | {messages} | {files} |")
    tables = [
        f"## {area}\n\n| code | class | message | file |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        for area, rows in areas.items()
    ]
    return "\n".join([_HEADER, *tables])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
