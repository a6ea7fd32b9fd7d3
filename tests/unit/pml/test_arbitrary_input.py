"""For any input, the only exception is PMLError."""

from collections.abc import Callable
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import PMLError
from inlay.pml import Prompt, Resolved, Schema, resolve
from inlay.pml.attributes import TAGS
from tests.generated import examples
from tests.unit.pml.helpers import LEVELS, TRAVEL

PROMPTS = (
    '<prompt schema="s">1<a p="v">2<a1/><a3/></a>3<b/><u1/><c/>4</prompt>',
    '<?xml version="1.0"?><prompt schema="travel">\n <travel-plan duration="3"><domestic city="x"/></travel-plan>'
    "<!-- c --><![CDATA[ x ]]>&amp;\n<user>Hi.</user></prompt>",
)
TURNS_ALONE = '<schema name="s"><user><module name="a">A</module></user><assistant/></schema>'
NO_TURNS = '<schema name="s"><module name="a">A<module name="a1"/></module><module name="b"/></schema>'
DOCUMENTS = (LEVELS, TRAVEL, TURNS_ALONE, NO_TURNS, *PROMPTS)
KINDS = (Schema, Prompt)
PIECES = st.sampled_from(
    ["<", ">", "/>", "</", "<!--", "-->", "<![CDATA[", "]]>", "&", "&#10;", "&#0;", "&lt;", "<?", "?>", '"', "'", "=",
     "\n", "\r", "\0", "\ud800", "\ufeff", "\u2028", "é", "😀", "<!DOCTYPE s [", 'xml:space="preserve"', "name",
     ' src="x"', "<user>", "</user>", "<module>", "<union>", "<a/>", "<prompt", "<schema"]
)  # fmt: skip


Made = TypeVar("Made")


def attempt(call: Callable[[], Made]) -> tuple[Made | None, PMLError | None]:
    """The result of the call, or the PMLError that it raises."""
    try:
        return call(), None
    except PMLError as error:
        return None, error


def parsed(kind: type[Schema] | type[Prompt], text: str) -> Schema | Prompt | None:
    """The document, or None for a PMLError, which must be well made."""
    document, error = attempt(lambda: kind.from_string(text, source="x.xml"))
    if error is None:
        return document
    assert 1 <= len(error.problems) <= 21
    for problem in error.problems:
        assert problem.place.source == "x.xml"
        assert "\n" not in problem.message
        assert len(problem.message) < 500
        if "not shown" not in problem.message:
            assert problem.place.line
            assert problem.place.column
            assert problem.place.line <= text.count("\n") + text.count("\r") + 1
    return None


@settings(max_examples=examples(300), deadline=None)
@given(st.text(st.characters()) | st.lists(PIECES | st.text(max_size=3)).map("".join))
def test_text(text: str) -> None:
    for kind in KINDS:
        parsed(kind, text)
    parsed(Schema, f'<schema name="s">{text}</schema>')
    parsed(Prompt, f'<prompt schema="s">{text}</prompt>')
    parsed(Prompt, f'<prompt schema="s"><a b="{text}"/></prompt>')


@settings(max_examples=examples(200), deadline=None)
@given(data=st.binary() | st.text().map(lambda text: text.encode("utf-16")), wrap=st.booleans())
def test_bytes_in_a_file(tmp_path_factory: pytest.TempPathFactory, data: bytes, wrap: bool) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "bytes.xml"
    path.write_bytes(b'<schema name="s">%s</schema>' % data if wrap else data)
    (path.parent / "src.xml").write_text('<schema name="s"><module name="m" src="bytes.xml"/></schema>')
    for kind, name in ((Schema, "bytes.xml"), (Prompt, "bytes.xml"), (Schema, "src.xml")):
        _, error = attempt(partial(kind.from_file, path.parent / name))
        assert error is None or str(error).startswith(str(path.parent / name))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid document, with pieces cut out, put in and moved."""
    text = draw(st.sampled_from(DOCUMENTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 20)))
        middle = draw(PIECES | st.just("") | st.just(text[start:end] * 2))
        text = text[:start] + middle + text[end:]
    return text


@settings(max_examples=examples(400), deadline=None)
@given(mutated(), mutated())
def test_mutated_documents(one: str, other: str) -> None:
    resolve_all([parsed(kind, text) for text in (one, other) for kind in KINDS])


NAMES = st.sampled_from(["a", "b", "c", "s", "unit.py", "é", "user", "", "a b", "x:y"])
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["name", "src", "len", "length", "default", "modules", "schema", "a", "xml:space"]),
    NAMES | st.sampled_from(["1", "0", "preserve", "default", "a b c", "../x", "99999999999"]),
    max_size=4,
)
LEAVES = st.sampled_from(["", " ", "\n ", "text", "\n  a\n    b\n"])
NO_TAGS = ("a", "b", "c", "unit.py", "modul", "x:y")


def tag(name: str, attributes: dict[str, str], children: list[str]) -> str:
    written = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{name}{written}>{''.join(children)}</{name}>"


TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(tag, st.sampled_from((*TAGS, *NO_TAGS)), ATTRIBUTES, st.lists(inner, max_size=4)),
    max_leaves=15,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(TREES, max_size=4), st.lists(TREES, max_size=4), st.booleans())
def test_trees_of_tags(one: list[str], other: list[str], moves: bool) -> None:
    schema = parsed(Schema, tag("schema", {"name": "s"}, one))
    prompt = parsed(Prompt, tag("prompt", {"schema": "s"}, other))
    resolve_all([schema, prompt], moves)


@cache
def known() -> list[Schema | Prompt | None]:
    """The documents above. Parsed once, as they are the same in every example."""
    return [parsed(kind, text) for text in DOCUMENTS for kind in KINDS]


def resolve_all(documents: list[Schema | Prompt | None], moves: bool = False) -> None:
    """Every prompt against every schema, with known ones: a result or a PMLError about the prompt."""
    for schema, prompt in chain(product(documents, [*documents, *known()]), product(known(), documents)):
        if isinstance(schema, Schema) and isinstance(prompt, Prompt):
            result, error = attempt(partial(resolve, schema, prompt, moves=moves))
            assert isinstance(result, Resolved) or {one.place.source for one in error.problems} == {"x.xml"}


# imports by names that exist, in any nesting and order: most of these get as far as the resolver
IMPORTS = st.recursive(
    st.sampled_from(["", " ", "x"]),
    lambda inner: st.builds(
        tag,
        st.sampled_from(["a", "a1", "a2", "a3", "b", "c", "u1", "u2", "zzz"]),
        st.dictionaries(st.sampled_from(["p", "q"]), st.just("v")),
        st.lists(inner, max_size=3),
    ),
    max_leaves=8,
)
TURNS = st.builds(tag, st.sampled_from(["user", "assistant"]), st.just({}), st.lists(IMPORTS, max_size=3))


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(IMPORTS | TURNS, max_size=4), st.booleans())
def test_imports_of_every_kind(parts: list[str], moves: bool) -> None:
    prompt = parsed(Prompt, tag("prompt", {"schema": "s"}, parts))
    assert prompt is not None
    resolve_all([prompt], moves)
