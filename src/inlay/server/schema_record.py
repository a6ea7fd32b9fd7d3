"""One schema as the server keeps it, and as the API shows it: in a line, or with its modules and what is encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.api.failures import BodyError
from inlay.pml import Module, Turn, Union
from inlay.pml.scopes import ByPath
from inlay.prompt.layout import SchemaLayout
from inlay.server.schema_documents import Source


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of a schema: its number from 1, when it was made (seconds since 1970), and its source's sha256."""

    version: int
    created: float
    sha256: str


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The current version of a schema, and what its past ones were.

    salt: of the tenant who owns it; None for a public one. reuse, positions: what its modules are encoded for; None
    for nothing that can be encoded ahead, and for the engine's default. tokens: of all its text. versions: oldest
    first, the current one last.
    """

    name: str
    salt: str | None
    source: Source
    layout: SchemaLayout
    reuse: str | None
    positions: str | None
    tokens: int
    versions: tuple[SchemaVersion, ...]

    @property
    def version(self) -> int:
        return self.versions[-1].version

    @property
    def etag(self) -> str:
        """What tells this version from all others of this name, also of a schema that was deleted since."""
        now = self.versions[-1]
        return f'"{now.version}-{now.sha256[:16]}-{int(now.created * 1e6):x}"'

    @property
    def public(self) -> bool:
        return self.salt is None


#: The most modules that are shown at once.
MODULES = 1000

Stored = Mapping[str, tuple[int, int]]  # module → tokens that can be encoded ahead, and how many of them are stored


def summary(record: SchemaRecord) -> dict[str, Any]:
    """A schema in a line of a list."""
    return {
        "object": "schema",
        "name": record.name,
        "public": record.public,
        "version": record.version,
        "etag": record.etag,
        "created": int(record.versions[-1].created),
        "reuse": record.reuse,
        "positions": record.positions,
        "modules": len(record.layout.schema.modules),
        "tokens": record.tokens,
        "length": record.layout.length,
    }


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a schema's modules, in the order of the document.

    after: the module behind which they begin; "" for the first one. limit: how many at most.
    """

    after: str = ""
    limit: int = MODULES

    def check(self, record: SchemaRecord) -> None:
        """Raises BodyError where the schema has no such module."""
        if self.after and self.after not in record.layout.schema.modules:
            raise BodyError(
                f"after is {self.after!r:.100}, and the schema has no such module; leave it out to begin with the "
                "first one, or take the last_id of a page",
                param="after",
            )

    def of(self, modules: ByPath[Module]) -> tuple[Sequence[str], bool]:
        """The paths of the modules on this page, and whether there are others behind it."""
        paths = list(modules)
        (last,) = modules.paths(self.after) if self.after else (None,)  # ``check`` has seen to it that there is one
        start = 0 if last is None else paths.index(last) + 1
        end = start + self.limit
        return paths[start:end], end < len(paths)


def detail(
    record: SchemaRecord, stored: Stored, encoding: dict[str, Any], bytes_per_token: int, page: Page
) -> dict[str, Any]:
    """A schema with its versions, the tree of the modules on a page, and what is encoded of each now.

    encoding: how far its encoding ahead of time is; see prewarm.py.
    """
    schema = record.layout.schema
    shown, has_more = page.of(schema.modules)
    tree = _Tree(record.layout, stored, bytes_per_token, frozenset(shown))
    return {
        **summary(record),
        "modules": tree.nodes(schema.children),
        "last_id": shown[-1] if shown else None,
        "has_more": has_more,
        "always": {"tokens": tree.always, "encoded": tree.encoded("")},
        "encoded": tree.encoded(*stored),
        "encoding": encoding,
        "versions": [
            {"version": one.version, "created": int(one.created), "sha256": one.sha256} for one in record.versions
        ],
    }


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
                path, inside = self._layout.schema.paths[child.order], self.nodes(child.children)
                found += [self._module(child, path, inside)] if inside or path in self._shown else []
        return found

    def encoded(self, *modules: str) -> dict[str, int]:
        """What of some modules can be encoded ahead, in tokens, and what of that is stored now."""
        counts = [self._stored.get(module, (0, 0)) for module in modules]
        tokens = sum(stored for _, stored in counts)
        return {"tokens": tokens, "of": sum(of for of, _ in counts), "bytes": tokens * self._bytes}

    def _module(self, module: Module, path: str, inside: list[dict[str, Any]]) -> dict[str, Any]:
        extent = self._layout.extents[path]
        params = self._layout.schema.levels[path].params.values()
        return {
            "module": path,
            "tokens": extent.tokens,
            "length": extent.end - extent.start,
            "encoded": self.encoded(path),
            "params": [{"param": p.name, "len": p.length, "default": p.default} for p in params],
            "modules": inside,
        }
