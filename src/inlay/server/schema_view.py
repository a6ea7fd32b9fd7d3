"""Schemas as the API shows them: in a line, and with their modules and what is encoded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.api.failures import BodyError
from inlay.pml import Module, Param, Turn, Union
from inlay.prompt.layout import SchemaLayout
from inlay.server.prewarm import Warming
from inlay.server.schema_registry import Entry

#: The most modules that are shown at once.
MODULES = 1000

Stored = Mapping[str, tuple[int, int]]  # module → tokens that can be encoded ahead, and how many of them are stored


def summary(entry: Entry) -> dict[str, Any]:
    """A schema in a line of a list."""
    return {
        "object": "schema",
        "name": entry.name,
        "public": entry.public,
        "version": entry.version,
        "etag": entry.etag,
        "created": int(entry.versions[-1].created),
        "reuse": entry.reuse,
        "positions": entry.positions,
        "modules": len(entry.layout.schema.modules),
        "tokens": entry.tokens,
        "length": entry.layout.length,
    }


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a schema's modules, in the order of the document.

    after: the module behind which they begin; "" for the first one. limit: how many at most.
    """

    after: str = ""
    limit: int = MODULES

    def check(self, entry: Entry) -> None:
        """Raises BodyError where the schema has no such module."""
        if self.after and self.after not in entry.layout.schema.modules:
            raise BodyError(
                f"after is {self.after!r:.100}, and the schema has no such module; leave it out to begin with the "
                "first one, or take the last_id of a page",
                param="after",
            )

    def of(self, names: Sequence[str]) -> tuple[Sequence[str], bool]:
        """The names on this page, and whether there are others behind it."""
        start = names.index(self.after) + 1 if self.after else 0
        end = start + self.limit
        return names[start:end], end < len(names)


def detail(entry: Entry, stored: Stored, warming: Warming | None, bytes_per_token: int, page: Page) -> dict[str, Any]:
    """A schema with its versions, the tree of the modules on a page, and what is encoded of each now."""
    schema = entry.layout.schema
    shown, has_more = page.of(list(schema.modules))
    tree = _Tree(entry.layout, stored, bytes_per_token, frozenset(shown))
    return {
        **summary(entry),
        "modules": tree.nodes(schema.children),
        "last_id": shown[-1] if shown else None,
        "has_more": has_more,
        "always": {"tokens": tree.always, "encoded": tree.encoded("")},
        "encoded": tree.encoded(*stored),
        "encoding": encoding(warming),
        "versions": [
            {"version": one.version, "created": int(one.created), "sha256": one.sha256} for one in entry.versions
        ],
    }


def encoding(warming: Warming | None) -> dict[str, Any]:
    """How far the encoding ahead of this version is, in tokens.

    state: "none" where it was never begun, "running", "done" or "failed", with the error.
    """
    if warming is None:
        return {"state": "none", "done": 0, "total": 0}
    state = "running" if not warming.over else "done" if warming.failure is None else "failed"
    failed = {} if warming.failure is None else warming.failure.body()
    return {"state": state, "done": warming.done, "total": warming.total, **failed}


class _Tree:
    """The modules of a schema as they nest: those that are shown, and those around them."""

    def __init__(self, layout: SchemaLayout, stored: Stored, bytes_per_token: int, shown: frozenset[str]) -> None:
        self._layout = layout
        self._shown = shown
        self._stored = stored
        self._bytes = bytes_per_token
        self.always = sum(len(run.ids) for run in layout.runs if not run.owner)

    def nodes(self, children: Iterable[object]) -> list[dict[str, Any]]:
        """Modules and unions among the children of a schema, a turn or a module."""
        found: list[dict[str, Any]] = []
        for child in children:
            if isinstance(child, Turn):
                found += self.nodes(child.children)
            elif isinstance(child, Union):
                members = self.nodes(child.members)
                found += [{"union": members}] if members else []
            elif isinstance(child, Module):
                inside = self.nodes(child.children)
                found += [self._module(child, inside)] if inside or child.name in self._shown else []
        return found

    def encoded(self, *modules: str) -> dict[str, int]:
        """What of some modules can be encoded ahead, in tokens, and what of that is stored now."""
        counts = [self._stored.get(module, (0, 0)) for module in modules]
        tokens = sum(stored for _, stored in counts)
        return {"tokens": tokens, "of": sum(of for of, _ in counts), "bytes": tokens * self._bytes}

    def _module(self, module: Module, inside: list[dict[str, Any]]) -> dict[str, Any]:
        extent = self._layout.extents[module.name]
        params = [child for child in module.children if isinstance(child, Param)]
        return {
            "module": module.name,
            "tokens": extent.tokens,
            "length": extent.end - extent.start,
            "encoded": self.encoded(module.name),
            "params": [{"param": p.name, "len": p.length, "default": p.default} for p in params],
            "modules": inside,
        }
