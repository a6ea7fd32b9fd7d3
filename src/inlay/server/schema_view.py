"""Schemas as the API shows them: in a line, and with their modules and what is encoded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inlay.layout import SchemaLayout
from inlay.pml import Module, Param, Turn, Union
from inlay.server.shelf import Entry
from inlay.server.warming import Warming

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


def detail(entry: Entry, stored: Stored, warming: Warming | None, bytes_per_token: int) -> dict[str, Any]:
    """A schema with its versions, the tree of its modules, and what is encoded of each now."""
    tree = _Tree(entry.layout, stored, bytes_per_token)
    return {
        **summary(entry),
        "modules": tree.nodes(entry.layout.schema.children),
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
    """The modules of a schema as they nest."""

    def __init__(self, layout: SchemaLayout, stored: Stored, bytes_per_token: int) -> None:
        self._layout = layout
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
                found.append({"union": self.nodes(child.members)})
            elif isinstance(child, Module):
                found.append(self._module(child))
        return found

    def encoded(self, *modules: str) -> dict[str, int]:
        """What of some modules can be encoded ahead, in tokens, and what of that is stored now."""
        counts = [self._stored.get(module, (0, 0)) for module in modules]
        tokens = sum(stored for _, stored in counts)
        return {"tokens": tokens, "of": sum(of for of, _ in counts), "bytes": tokens * self._bytes}

    def _module(self, module: Module) -> dict[str, Any]:
        extent = self._layout.extents[module.name]
        params = [child for child in module.children if isinstance(child, Param)]
        return {
            "module": module.name,
            "tokens": extent.tokens,
            "length": extent.end - extent.start,
            "encoded": self.encoded(module.name),
            "params": [{"param": p.name, "len": p.length, "default": p.default} for p in params],
            "modules": self.nodes(module.children),
        }
