"""Random schemas and prompts, built from nodes; and nodes without their places, to compare them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

from hypothesis import strategies as st

from inlay.errors import Place
from inlay.pml import (
    Argument,
    Import,
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

# runs of white space of every sort, what XML escapes, and what only looks like markup
PIECES = st.sampled_from(
    ["\n", "\n", "\n\n", " ", "  ", "\t", "\r", "\r\n", "a", "b c", "x\n", "\n  y", "  z\n", "]]>", "]]", ">", "<", "&",
     "&lt;", "&#10;", '"', "'", "<!-- c -->", "<a/>", "\u00a0", "\u2028", "\u0085", "\ufeff", "é", "😀", "{", "\\n"]
)  # fmt: skip
# what XML 1.0 can carry
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
    names = list(draw(st.permutations(NAMES)))

    def content(depth: int, kinds: list[str]) -> tuple:
        nodes: list = []
        params = iter(NAMES)
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=5 if depth < 3 else 2)):
            if kind == "text" and (neighbours or not (nodes and isinstance(nodes[-1], Text))):
                nodes.append(Text(draw(texts), HERE))
            elif kind == "param":
                nodes.append(Param(next(params), draw(st.integers(1, 10**6)), draw(st.none() | VALUES), HERE))
            elif kind == "module" and names:
                nodes.append(module(depth))
            elif kind == "union" and names:
                count = draw(st.integers(1, min(3, len(names))))
                members = [module(depth) for _ in range(count) if names]
                nodes.append(Union(tuple(members), HERE))
        return tuple(nodes)

    def module(depth: int) -> Module:
        return Module(names.pop(), content(depth + 1, [*OUTER, "param", "param"]), HERE)

    if draw(st.booleans()):
        roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=3))
        children: tuple = tuple(Turn(role, content(0, OUTER), HERE) for role in roles)
    else:
        children = content(0, OUTER)
    schema = Schema(draw(LABELS), numbered(children))
    return replace(schema, scaffolds=draw(scaffolds(schema)))


@st.composite
def scaffolds(draw: st.DrawFn, schema: Schema) -> tuple[Scaffold, ...]:
    exclusions = Exclusions(schema.children)
    pairs = [
        (one, other) for one in schema.modules for other in schema.modules
        if one != other and exclusions.between((one, other)) is None
    ]  # fmt: skip
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
    beside = isinstance(before, PromptTurn) or isinstance(after, PromptTurn)
    return replace(node, text=f"{node.text}x") if isinstance(node, Text) and is_white(node.text) and beside else node


def bare(value: object) -> object:
    """Nodes as nested tuples, without their places and sources."""
    if isinstance(value, tuple | list):
        return tuple(bare(one) for one in value)
    if is_dataclass(value):
        values = [bare(getattr(value, field.name)) for field in fields(value) if field.name not in ("place", "source")]
        return type(value).__name__, *values
    return value
