"""The cost of prompts, queues and pools grows linearly: at these sizes, quadratic work takes a multiple of its
bound.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from inlay.engine.background.promoter import Popularity
from inlay.kv.identity import Context, KeyMaker, SegmentSpec, TokenRun, specify
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.composed import CachedSpan, Node, compose_parts
from inlay.prompt.contexts import SchemaSpecs
from inlay.prompt.layout import TextRun, lay_out_schema
from inlay.prompt.placement import lay_out_ids, lay_out_prompt
from inlay.prompt.request import PromptPart
from inlay.prompt.tokens import TextEncoder
from inlay.slots import SlotRange
from tests.tokenizers_for_tests import family

TOKENIZER = bytes_tokenizer()
ENCODER, TEMPLATE = TextEncoder(TOKENIZER), ChatTemplate(TOKENIZER)
KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)


def seconds(function: Callable[[], Any]) -> float:
    """Of this thread's processor time, which neighbours on the machine do not change."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def test_composing_one_span_from_many_parts():
    ids = tuple(range(20))
    parts = [PromptPart(ids, 20 * n, owned=bool(n % 2)) for n in range(16_000)]
    assert seconds(lambda: compose_parts(parts)) < 2.5  # 0.1; quadratic: 20


def test_every_module_of_a_large_schema_in_one_prompt():
    text = "".join(f'x<module name="m{n}">y{n}</module>' for n in range(4000))
    layout = lay_out_schema(Schema.from_string(f'<schema name="s">{text}</schema>'), ENCODER, TEMPLATE)
    specs = SchemaSpecs(layout, anchored=True, packed=True, movable=True, keys=KEYS)
    parts, at = [], 0
    for run in layout.entries:
        assert isinstance(run, TextRun)
        parts.append((run, at))
        at += len(run.ids)

    def read(runs):
        return [PromptPart(run.ids, at, candidates=(specs.spec(run, frozenset()),), encode=True) for run, at in runs]

    composed: list[CachedSpan] = []
    assert seconds(lambda: composed.extend(compose_parts(read(parts)))) < 6
    # text after the first module is encoded without it, and so it and all that attends to it stand elsewhere
    assert [part.displaced for part in composed] == [False] * 2 + [True] * 7998


def test_many_new_texts_in_one_prompt():
    schema = Schema.from_string('<schema name="s">Hello</schema>')
    layout = lay_out_schema(schema, ENCODER, TEMPLATE)
    prompt = Prompt.from_json({"schema": "s", "content": ["some new words. "] * 40_000})
    resolved = resolve(schema, prompt)
    placed = []
    took = seconds(lambda: placed.append(lay_out_prompt(resolved, layout, ENCODER, TEMPLATE, packed=True)))
    assert took < 5
    assert [len(part.ids) for part in placed[0].parts] == [5, 16 * 40_000]


def test_many_texts_of_one_owner_in_a_schema():
    schema = Schema.from_json({"name": "s", "content": ["some words. "] * 40_000})
    assert seconds(lambda: lay_out_schema(schema, ENCODER, TEMPLATE)) < 5


def test_many_turns():
    tokenizer = family("qwen2.5")
    template = ChatTemplate(tokenizer)
    roles = ["user", "assistant"] * 20_000
    pieces: list[str] = []
    assert seconds(lambda: pieces.extend(template.pieces(roles, generation=True))) < 5
    assert len(pieces) == len(roles) + 1
    assert seconds(lambda: template.verify(roles, ["word"] * len(roles), pieces)) < 5


def test_queued_prompts_share_their_numbers():
    ids = list(range(300, 50_300))
    lay_out_ids(ids, "").positions  # noqa: B018  # what all have in common is there from now on
    tracemalloc.start()
    try:
        layouts = [lay_out_ids([token + 1 - 1 for token in ids], "") for _ in range(4)]
        assert [layout.ids == tuple(ids) and layout.positions == tuple(range(50_000)) for layout in layouts] == [
            True
        ] * 4
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 4 * 50_000 * 20, "two references a token; with integers of its own, each would hold 72 bytes"


def test_freeing_slots_of_a_fragmented_pool():
    pool = KVPool(80_000, 1, 1)
    held = [pool.allocate(1) for _ in range(80_000)]
    assert seconds(lambda: [pool.free(each) for each in held[::2]]) < 5  # 0.1; quadratic: 200
    assert len(pool.free_ranges) == 40_000
    assert seconds(lambda: [pool.free(each) for each in held[1::2]]) < 5
    assert pool.free_ranges == (SlotRange(0, 80_000),)


def test_eviction_among_many_segments():
    pool = KVPool(20_000, 1, 1)
    store = SegmentStore(pool, KEYS)
    for token in range(16_000):
        slots = store.allocate(1)
        store.insert(TokenRun((token,), 0, Context()), slots)
        pool.free(slots)
    assert seconds(lambda: [store.allocate(1) for _ in range(2000)]) < 3  # 0.1; looking through all: 6
    assert len(store) == 20_000 - 2000 - pool.free_chunks


def test_evicting_a_module_with_many_texts_after_it():
    store = SegmentStore(KVPool(10_000, 1, 1), KEYS)

    def put(run):
        slots = store.allocate(len(run.ids))
        store.insert(run, slots)
        store.pool.free(slots)

    module = specify(tuple(range(20)), 0, (), KEYS)
    for end in range(1, 20):  # it lies in 20 pieces, each of which begins another text
        put(TokenRun((*range(end), 99), 0, Context()))
    put(module)
    for token in range(6000):
        put(module_and(module, token))
    ends = []
    assert seconds(lambda: ends.extend(store.own_ends(module))) < 3  # 0.1; quadratic: 20
    assert len(ends) == 6001


def module_and(module: SegmentSpec, token: int) -> TokenRun:
    return TokenRun((*module.ids, token), 0, Context())


def test_prefixes_queued_for_encoding():
    known = Popularity(lambda run: None, lambda run: True)
    runs = [TokenRun((number,), 0, Context()) for number in range(16_000)]
    nodes = [Node(run, bytes(str(run.ids), "ascii"), 1, (b"module",)) for run in runs]
    prefixes: Any = [SimpleNamespace(nodes=(node,)) for node in nodes]

    def ask_twice():
        for each in prefixes * 2:
            known.ask("", each, 0)

    assert seconds(ask_twice) < 4  # 0.2; quadratic: 20
    assert known.next() is not None
