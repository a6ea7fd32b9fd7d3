"""Random schemas and prompts, built from nodes; and nodes without their places, to compare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate

from hypothesis import strategies as st

from inlay.errors import Place
from inlay.pml import (
    Argument,
    Import,
    Meta,
    Module,
    Param,
    Prompt,
    PromptTurn,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    numbered,
)
from inlay.pml.nodes import ROLES
from inlay.pml.parser import is_white
from inlay.pml.rules import Exclusions

HERE = Place("here")
NAMES = ("a", "b", "unit.py", "é", "_x-1", "c", "d", "modul", "Schema", "名前")

# runs of white space of every sort, text that XML escapes, and text that resembles markup
PIECES = st.sampled_from(
    ["\n", "\n", "\n\n", " ", "  ", "\t", "\r", "\r\n", "a", "b c", "x\n", "\n  y", "  z\n", "]]>", "]]", ">", "<", "&",
     "&lt;", "&#10;", '"', "'", "<!-- c -->", "<a/>", "\u00a0", "\u2028", "\u0085", "\ufeff", "é", "😀", "{", "\\n"]
)  # fmt: skip
# the characters of XML 1.0
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters=["\ufffe", "\uffff"]).filter(
    lambda c: c >= " " or c in "\t\n\r"
)
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join) | st.text(CHARACTERS, min_size=1, max_size=8)
OUTER = ["text", "text", "module", "union"]
INNER = ["text", "text", "import", "import"]
VALUES = st.just("") | TEXTS
LABELS = TEXTS.filter(str.strip)


Texts = st.SearchStrategy[str]


@st.composite
def schemas(draw: st.DrawFn, texts: Texts = TEXTS, neighbours: bool = False) -> Schema:
    """Any schema. neighbours: whether texts may stand side by side."""

    def scope() -> list[str]:
        return list(draw(st.permutations(NAMES)))

    def metadata(*, apart: bool = True) -> tuple[Meta, ...]:
        spaced = [name for name in ("app:a", "app:é") if draw(st.booleans())]
        plain = [name for name in ("a", "é") if apart and draw(st.booleans())]
        return tuple(Meta(name, draw(VALUES), HERE) for name in [*spaced, *plain])

    def content(depth: int, kinds: list[str], names: list[str], params: Iterator[str]) -> tuple:
        nodes: list = []
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=5 if depth < 3 else 2)):
            if kind == "text" and (neighbours or not (nodes and isinstance(nodes[-1], Text))):
                nodes.append(Text(draw(texts), HERE))
            elif kind == "param":
                fill = draw(st.none() | VALUES)
                length, default = draw(st.integers(1, 10**6)), draw(st.none() | VALUES)
                name = next(params, None)
                nodes += [Param(name, length, default, HERE, scaffold=fill, meta=metadata(apart=False))] if name else []
            elif kind == "module" and names:
                nodes.append(module(depth, names, turns="turn" in kinds))
            elif kind == "union" and names:
                count = draw(st.integers(1, min(3, len(names))))
                members = [module(depth, names, turns="turn" in kinds) for _ in range(count) if names]
                stands_in = draw(st.none() | st.sampled_from([member.name for member in members]))
                nodes.append(Union(tuple(members), HERE, scaffold=stands_in, meta=metadata()))
            elif kind == "turn":
                inner = [one for one in kinds if one != "turn"]
                inside = content(depth + 1, inner, names, params)
                nodes.append(Turn(draw(st.sampled_from(ROLES)), inside, HERE, meta=metadata()))
        return tuple(nodes) if neighbours else tuple(map(_solid, *_shifted(tuple(nodes))))

    def module(depth: int, names: list[str], *, turns: bool) -> Module:
        name, kinds = names.pop(), [*OUTER, "param", "param", *(["turn"] if turns else [])]
        inside = content(depth + 1, kinds, scope(), iter(NAMES))
        return Module(name, inside, HERE, cache=draw(st.booleans()), meta=metadata())

    children = content(0, [*OUTER, "turn", "turn"] if draw(st.booleans()) else OUTER, scope(), iter(()))
    schema = Schema(draw(LABELS), numbered(children), meta=metadata())
    return replace(schema, scaffolds=draw(scaffolds(schema)))


@st.composite
def scaffolds(draw: st.DrawFn, schema: Schema) -> tuple[Scaffold, ...]:
    exclusions, modules = Exclusions(schema.children), schema.modules
    kept = [
        path for path in modules
        if all(modules[around].cache for around in accumulate(path.split("/"), "{}/{}".format))
    ]  # fmt: skip
    pairs = [
        (one, other) for one in kept for other in kept if one != other and exclusions.between((one, other)) is None
    ]
    if not pairs:
        return ()
    return tuple(Scaffold(pair, HERE) for pair in draw(st.lists(st.sampled_from(pairs), max_size=2)))


@st.composite
def prompts(draw: st.DrawFn, texts: Texts = TEXTS, neighbours: bool = False) -> Prompt:
    """Any prompt. neighbours: whether texts may stand side by side, and white space beside turns."""

    def content(depth: int, kinds: list[str]) -> tuple:
        nodes: list = []
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=5 - depth)):
            if kind == "import":
                nodes.append(Import(draw(st.sampled_from(NAMES)), arguments(), content(depth + 1, INNER), HERE))
            elif kind == "turn":
                nodes.append(PromptTurn(draw(st.sampled_from(ROLES)), content(depth + 1, INNER), HERE))
            elif neighbours or not (nodes and isinstance(nodes[-1], Text)):
                nodes.append(Text(draw(texts), HERE))
        return tuple(nodes)

    def arguments() -> tuple[Argument, ...]:
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=2))
        return tuple(Argument(name, draw(VALUES), HERE) for name in names)

    top = content(0, [*INNER, "turn", "turn"])
    return Prompt(draw(LABELS), top if neighbours else tuple(map(_solid, *_shifted(top))))


def _shifted(nodes: tuple) -> tuple[tuple, tuple, tuple]:
    return (None, *nodes[:-1]) if nodes else (), nodes, (*nodes[1:], None) if nodes else ()


def _solid(before: object, node: object, after: object) -> object:
    """White space alone beside a turn becomes a text that is not: PML takes it for layout."""
    beside = isinstance(before, PromptTurn | Turn) or isinstance(after, PromptTurn | Turn)
    return replace(node, text=f"{node.text}x") if isinstance(node, Text) and is_white(node.text) and beside else node


def bare(value: object) -> object:
    """Nodes as nested tuples, without their places and sources."""
    if isinstance(value, tuple | list):
        return tuple(bare(one) for one in value)
    if is_dataclass(value):
        values = [bare(getattr(value, field.name)) for field in fields(value) if field.name not in ("place", "source")]
        return type(value).__name__, *values
    return value
