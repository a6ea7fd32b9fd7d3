"""The contexts of a schema's text equal contexts built from scratch, at a cost that grows linearly."""

from __future__ import annotations

import sys
import threading

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.kv.identity import KeyMaker, SegmentSpec, specify
from inlay.models.shapes import bytes_tokenizer
from inlay.policy import CONTEXTS
from inlay.prompt import contexts
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.contexts import SchemaSpecs, in_encoding_order
from inlay.prompt.layout import Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.tokens import TextEncoder
from tests.conftest import tiny
from tests.counting import calls_of

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=True)
UNK = 5
SCHEMA = """<schema name="s">Always. <module name="a">A <param name="p" len="4" default="x"/> and
<module name="i">inner <param name="q" len="2" default="y"/></module> later</module> between
<union><module name="u">U</module><module name="v">V, longer</module></union>
<module name="b"><param name="r" len="3" default="z"/>B</module>
end<module name="c">C <module name="d">D</module> c</module><scaffold modules="a b c"/><scaffold modules="i d"/>
<scaffold modules="b u"/></schema>"""
IMPORTS = [set(), {"a", "b", "c"}, {"a", "a/i", "c", "c/d"}, {"a", "a/i", "b", "c", "c/d", "u"}, {"b", "u"}]


def laid_out(text: str) -> SchemaLayout:
    tokenizer = bytes_tokenizer()
    return lay_out_schema(Schema.from_string(text), TextEncoder(tokenizer), ChatTemplate(tokenizer))


def many(modules: int) -> SchemaLayout:
    return laid_out(
        '<schema name="s">' + "".join(f'x<module name="m{n}">y{n}</module>' for n in range(modules)) + "</schema>"
    )


def put_together(specs: SchemaSpecs, entry: TextRun | Hole, imported: frozenset[str]) -> SegmentSpec:
    """The spec of an entry, from the definition: all that its owners may see before it, one after the other."""
    owners = {entry.owner}
    if specs.anchored:
        owners |= {entry.owner[:depth] for depth in range(len(entry.owner))}
    schema = specs.layout.schema
    complete = [
        s for s in schema.scaffolds if entry.owner and "/".join(entry.owner) in s.modules and imported >= {*s.modules}
    ]
    if complete:
        owners |= {tuple(path.split("/")) for path in complete[0].modules}
    at, origin, context = 0, None, ()
    left = specs.primer
    for seen in [*specs.layout.chain(entry.index, frozenset(owners)), entry]:
        ids = seen.ids if isinstance(seen, TextRun) else (UNK,) * seen.length if specs.unk_id else ()
        if seen is entry:
            ids = entry.ids if isinstance(entry, TextRun) else entry.default
        start = at if specs.packed else seen.start
        at += len(seen.ids) if isinstance(seen, TextRun) else seen.length
        if seen.owner and left:
            origin = start if origin is None else origin
            context, left = (*context, specify(left, start - origin, context, KEYS)), ()
        start += 0 if left else len(specs.primer)
        if ids:
            origin = start if origin is None else origin
            context = (*context, specify(ids, start - origin if specs.movable else start, context, KEYS))
    return context[-1]


def test_module_too_long_for_the_primer_is_encoded_without_it():
    layout = laid_out(
        "<schema name='s'>Go. <module name='a'>Short.</module><module name='b'>Much longer.</module></schema>"
    )
    fits = len("Go. ") + 3 + len("Short.")
    specs = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS, primer=(70, 71, 72), longest=fits)
    _, short, long = layout.entries
    assert specs.form(short, frozenset()) == "primed"
    assert specs.spec(short, frozenset()).start == len("Go. ") + 3
    assert specs.form(long, frozenset()) == "anchored"
    assert specs.spec(long, frozenset()).start == len("Go. ")


@pytest.mark.parametrize("imported", IMPORTS, ids=lambda names: "+".join(sorted(names)) or "none")
@pytest.mark.parametrize("unk_id", [None, UNK])
@pytest.mark.parametrize(("packed", "movable"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_equal_their_definition(context, packed, movable, unk_id, imported):
    layout = laid_out(SCHEMA)
    primer = (70, 71, 72) if context == "primed" and movable else ()
    specs = SchemaSpecs(
        layout,
        anchored=context != "isolated",
        packed=packed,
        movable=movable,
        keys=KEYS,
        unk_id=unk_id,
        primer=primer,
        longest=4096,
    )
    for entry in reversed(layout.entries):  # the last first, so that its context recurs in other views
        spec, expected = specs.spec(entry, frozenset(imported)), put_together(specs, entry, frozenset(imported))
        assert (spec.ids, spec.start, spec.digest, spec.key) == (
            expected.ids,
            expected.start,
            expected.digest,
            expected.key,
        )
        assert [(s.key, s.start) for s in spec.context] == [(s.key, s.start) for s in expected.context]


@pytest.mark.parametrize("reuse", CONTEXTS)
def test_cost_of_all_specs_grows_linearly(reuse, monkeypatch):
    made = calls_of(monkeypatch, contexts, "specify")
    for modules in (20, 400):
        layout = many(modules)
        made.clear()
        specs = SchemaSpecs(layout, anchored=reuse == "anchored", packed=True, movable=True, keys=KEYS)
        found = [spec for module in specs.by_module().values() for spec in module]
        assert len(made) == len(layout.entries), "each run once, however many attend to it"
        assert len(found[-1].context) == (modules if reuse == "anchored" else 0)
        assert sum(len(context) for _, _, context, *_ in made) < len(made), "none is put together of its parts"


def test_members_of_a_scaffold_share_their_context(monkeypatch):
    modules = [f"m{n}" for n in range(200)]
    text = "".join(f'x<module name="{name}">y</module>' for name in modules)
    layout = laid_out(f'<schema name="s">{text}<scaffold modules="{" ".join(modules)}"/></schema>')
    made = calls_of(monkeypatch, contexts, "specify")
    specs = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)
    last = [specs.spec(entry, frozenset(modules)) for entry in layout.entries][-1]
    assert len(last.context) == 399
    assert len(made) <= 2 * len(layout.entries), "text outside also stands for itself"


def test_encoding_order_takes_one_pass(monkeypatch):
    layout = many(3000)
    specs = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)
    found = [spec for module in specs.by_module().values() for spec in module]
    whole = property(lambda spec: pytest.fail("a context was put together"))
    monkeypatch.setattr(SegmentSpec, "context", whole)
    ordered = in_encoding_order(reversed(found))
    place = {spec.key: number for number, spec in enumerate(ordered)}
    assert len(ordered) == len({spec.key for spec in found})
    assert all(spec.parent is None or place[spec.parent.key] < place[spec.key] for spec in found)


def test_encoding_order_includes_contexts_of_equal_segments():
    whole = specify((1, 2, 3), 0, (), KEYS)
    first = specify((1,), 0, (), KEYS)
    second = specify((2, 3), 1, (first,), KEYS)
    one, other = specify((4,), 3, (first, second), KEYS), specify((4,), 3, (whole,), KEYS)
    assert one.key == other.key
    behind = specify((5,), 4, (whole, other), KEYS)
    assert {s.key for s in in_encoding_order([one, behind])} == {s.key for s in (first, second, one, whole, behind)}


def test_concurrent_callers_get_the_same_specs():
    layout = many(300)
    specs = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)
    answers: list[list[bytes]] = []
    begin = threading.Barrier(4)

    def ask() -> None:
        begin.wait()
        answers.append([specs.spec(entry, frozenset()).key for entry in layout.entries])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    alone = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)
    assert answers == [[alone.spec(entry, frozenset()).key for entry in layout.entries]] * 4


@pytest.mark.parametrize(("tokens", "primed"), [(400, False), (2400, True)])
def test_pool_too_small_for_the_primer_encodes_without_it(tokens, primed):
    """With the default policy, small pools still serve requests for which the primer leaves no room."""
    llm = LLM(tiny("llama"), kv_memory=tokens * 384, chunk_size=16, seed=0)
    text = "This is a module of a small pool. " * 3
    schema = Schema.from_string(f'<schema name="small"><module name="one">{text}</module></schema>')
    llm.add_schema(schema)
    (answer,) = llm.generate([schema.prompt().use("one").text("?")], SamplingParams(max_tokens=1), reuse="modular")
    assert answer.usage.cached_tokens == answer.usage.prompt_tokens - 1
    assert (answer.usage.primed_tokens > 0) is primed
