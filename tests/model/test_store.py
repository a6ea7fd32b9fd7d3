"""The store on disk through the LLM class: its contents, its readers, and its correctness after damage."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from pathlib import Path

import pytest

from inlay import LLM, AsyncLLM, InlayError, ParameterError, Prompt, SamplingParams, Schema
from inlay.events import EncodeEvent
from inlay.kv.offload.disk import DiskTier
from inlay.models.fingerprint import NUMERICS_VERSION
from tests.conftest import tiny
from tests.model.hooks import each_pass
from tests.raising import raises

SCHEMA = Schema.from_string(
    '<schema name="s">Always here. <module name="a">One module, of a few tokens more than a chunk.</module>'
    '<module name="b">And another one, which is of some more tokens than that.</module></schema>'
)
BOTH = Prompt.from_string('<prompt schema="s"><a/><b/>What then?</prompt>')
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make(store: Path | str | None, kind: type = LLM, model: str = "llama", **settings):
    settings = {"kv_memory": "8MiB", "chunk_size": 16, "seed": 0, "reuse": "anchored"} | settings
    return kind(tiny(model), store=store, **settings)


def answer(llm: LLM, prompt=BOTH, **asked):
    (output,) = llm.generate(prompt, GREEDY, **asked)
    return output


def restarted(store: Path | str | None, prompt=BOTH, schema: Schema = SCHEMA, **settings):
    """The first answer of a simulated new process, with its engine's usage; the process has ended afterwards."""
    llm = make(store, **settings)
    llm.add_schema(schema, encode=False)
    output = answer(llm, prompt)
    llm.shutdown()
    return output, llm.stats()


def files(store: Path) -> list[Path]:
    return sorted(store.glob("v1/*.safetensors"))


@pytest.fixture(scope="module")
def expected():
    return restarted(None)[0].outputs[0].token_ids


@pytest.fixture
def store(tmp_path) -> Path:
    """A store that has all of SCHEMA."""
    restarted(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("model", ["gemma4_text", "gpt2", "llama"])
def test_a_restarted_process_computes_no_module(tmp_path, model):
    first, before = restarted(tmp_path, model=model)
    second, after = restarted(tmp_path, model=model)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert (before.encoded_tokens, before.disk_tokens) == (first.usage.prompt_tokens - 10, 0)
    assert (after.encoded_tokens, after.disk_tokens) == (0, before.encoded_tokens)
    assert (first.usage.disk_tokens, first.usage.computed_tokens) == (0, first.usage.prompt_tokens)
    assert second.usage.disk_tokens == second.usage.cached_tokens == before.encoded_tokens
    assert second.metrics.fetch_s > 0
    assert after.disk.hits == 3
    assert after.unwritten_segments == 0


def test_added_schema_is_read_from_disk_and_not_encoded(store):
    llm = make(store)
    llm.add_schema(SCHEMA)
    assert llm.stats().encoded_tokens == 0
    output = answer(llm)
    assert output.usage.disk_tokens == 0, "it was in the pool when the request came"
    assert output.usage.cached_tokens == llm.stats().disk_tokens
    llm.shutdown()


def test_files_of_an_earlier_process_count_as_stored_until_they_are_evicted(store):
    llm = make(store)
    llm.add_schema(SCHEMA, encode=False)
    assert all(tokens == stored > 0 for tokens, stored in llm.stored("s").values())
    llm.evict("s")
    assert all(stored == 0 for _, stored in llm.stored("s").values())
    llm.shutdown()


def test_only_the_missing_module_is_encoded(store, expected):
    """A segment's context needs to be in the pool only if the segment is recomputed."""
    largest = max(files(store), key=lambda path: path.stat().st_size)
    largest.unlink()
    output, stats = restarted(store)
    assert output.outputs[0].token_ids == expected
    assert 0 < stats.encoded_tokens < output.usage.prompt_tokens - 10
    assert stats.encoded_tokens + stats.disk_tokens == output.usage.prompt_tokens - 10
    assert len(files(store)) == 3, "it was written again"


def test_segments_evicted_from_the_pool_are_read_from_disk(tmp_path, expected):
    llm = make(tmp_path)
    llm.add_schema(SCHEMA)
    answer(llm)
    while llm.stats().unwritten_segments:
        answer(llm)
    llm.store.clear()
    encoded = llm.stats().encoded_tokens
    assert answer(llm).outputs[0].token_ids == expected
    assert llm.stats().encoded_tokens == encoded
    llm.shutdown()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another's", "gone"])
def test_damaged_store_costs_time_and_changes_no_answer(store, expected, damage, caplog):
    for path in files(store):
        data = bytearray(path.read_bytes())
        path.unlink()
        if damage == "flipped":
            data[-100] ^= 4
        elif damage != "gone":
            data = {"cut": data[:5000], "empty": b"", "another's": b"no segment at all" * 1000}[damage]
        if damage != "gone":
            path.write_bytes(data)
    output, stats = restarted(store)
    assert output.outputs[0].token_ids == expected
    assert stats.encoded_tokens == output.usage.prompt_tokens - 10
    assert ("is not used" in caplog.text) is (damage != "gone")
    assert restarted(store)[1].encoded_tokens == 0, "and the next one is quick again"


def test_swapped_files_are_detected(store, expected, caplog):
    one, two, three = (path.read_bytes() for path in files(store))
    for path, data in zip(files(store), (two, three, one), strict=True):
        path.unlink()
        path.write_bytes(data)
    output, _ = restarted(store)
    assert output.outputs[0].token_ids == expected
    assert "another segment" in caplog.text


def test_other_salts_and_models_find_nothing(store):
    for other in ({"cache_salt": "mine"}, {"model": "qwen2"}):
        assert restarted(store, **other)[1].disk_tokens == 0


def test_new_version_finds_nothing(store, monkeypatch):
    monkeypatch.setattr("inlay.models.fingerprint.NUMERICS_VERSION", NUMERICS_VERSION + 1)
    assert restarted(store)[1].disk_tokens == 0
    monkeypatch.undo()
    monkeypatch.setattr("inlay.models.fingerprint.transformers.__version__", "99.0")
    assert restarted(store)[1].disk_tokens == 0


def test_text_of_requests_and_private_schemas_stay_in_memory(tmp_path):
    document = [{"type": "text", "text": "A document of some length. " * 5, "cache_control": {"type": "ephemeral"}}]
    for private, written in ((False, 0), (True, 2)):
        llm = LLM("demo", kv_memory="32MiB", store=tmp_path / str(private), store_private=private, seed=0)
        llm.add_schema(SCHEMA, cache_salt="somebody's")
        answer(llm, cache_salt="somebody's")
        answer(llm, [{"role": "user", "content": document}])
        answer(llm, "Plain text of a request, which is long enough to fill more than one chunk of the pool.")
        llm.shutdown()
        assert len(files(tmp_path / str(private))) >= written
        assert (not files(tmp_path / str(private))) is (not private)
    for path in files(tmp_path / "True"):
        assert b"somebody" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


def test_marked_part_is_written_on_its_second_use_in_a_half_full_store(store):
    """Most documents that requests bring are asked about once; a file for each would evict segments in use."""
    document = [{"type": "text", "text": "A document of some length. " * 5, "cache_control": {"type": "ephemeral"}}]
    before = files(store)
    quota = 2 * sum(path.stat().st_size for path in before) - 1
    for uses, written in ((1, False), (2, True)):
        llm = make(store, store_private=True, store_bytes=quota)
        for _ in range(uses):
            answer(llm, [{"role": "user", "content": document}])
        llm.shutdown()
        assert (files(store) != before) is written


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("store_private", "salt", "written"),
    [(None, None, True), (None, "mine", False), (False, None, False), (True, "mine", True)],
)
def test_marked_part_is_written_on_its_first_use_if_there_is_space(tmp_path, kind, store_private, salt, written):
    """By default the folder keeps those of requests without a salt; others need the caller's word."""
    document = [{"type": "text", "text": "A document of some length. " * 5, "cache_control": {"type": "ephemeral"}}]
    chat = [{"role": "user", "content": [*document, {"type": "text", "text": "What?"}]}]
    disk_tokens = []
    for _ in range(2):
        llm = make(tmp_path, kind, store_private=store_private)
        if kind is LLM:
            output = answer(llm, chat, reuse="modular", cache_salt=salt)
        else:
            output = asyncio.run(_last(llm.generate(chat, GREEDY, reuse="modular", cache_salt=salt)))
        disk_tokens.append(output.usage.disk_tokens)
        llm.shutdown()
    assert disk_tokens[0] == 0
    assert (disk_tokens[1] > 0) is written
    assert bool(files(tmp_path)) is written


async def _last(outputs):
    return [output async for output in outputs][-1]


def test_part_of_a_message_has_its_longest_lifetime(tmp_path, clock):
    """Of two requests' claims the one that ends last counts, in the pool and on disk; then it has expired."""
    llm = make(tmp_path, store_private=True)

    def asked(ttl: str | None) -> dict[str, int]:
        mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
        document = [{"type": "text", "text": "A document of some length. " * 5, "cache_control": mark}]
        return dict(answer(llm, [{"role": "user", "content": document}]).usage.misses)

    assert set(asked("5m")) == {"never seen"}
    assert asked("1h") == asked("5m") == asked(None) == {}
    clock.advance(3599)
    assert asked(None) == {}
    clock.advance(2)
    assert set(asked(None)) == {"expired"}
    llm.shutdown()


def test_promoted_text_of_a_part_expires_with_it(clock):
    """After a part that stays, the other is encoded exactly when both are asked for again."""
    llm = make("off")

    def asked(question: str, salt: str | None = None):
        texts = [("A document of some length. " * 3, "1h"), ("One more, of another length. " * 3, "5m")]
        marked = [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}} for text, ttl in texts
        ]
        message = {"role": "user", "content": [*marked, {"type": "text", "text": question}]}
        usage = answer(llm, [message], reuse="modular", cache_salt=salt).usage
        llm.promote()
        return usage

    for salt in (None, "other"):
        asked("What?", salt)
        asked("And?", salt)
    clock.advance(299)
    assert asked("So?", "other").promoted_tokens == (27 + 29) * 3
    clock.advance(2)
    after = asked("What?")
    assert (after.promoted_tokens, after.misses) == (27 * 3, (("expired", 29 * 3),))
    assert asked("And?", "other").promoted_tokens == (27 + 29) * 3  # of another's, nothing is forgotten
    llm.shutdown()


def test_private_segment_is_not_found_by_other_salts(tmp_path):
    llm = make(tmp_path, store_private=True)
    llm.add_schema(SCHEMA, cache_salt="one")
    llm.shutdown()
    llm = make(tmp_path, store_private=True)
    llm.add_schema(SCHEMA, encode=False, cache_salt="other")
    answer(llm, cache_salt="other")
    assert llm.stats().disk_tokens == 0
    llm.shutdown()


def test_store_is_off_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("INLAY_STORE")
    assert restarted(None)[1].disk is None
    monkeypatch.setenv("INLAY_STORE", str(tmp_path / "said"))
    assert restarted(None)[1].disk.segments == 3
    assert restarted("off")[1].disk is None


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"store": 3}, "parameter.invalid_folder"),
        ({"store_bytes": "much"}, "parameter.invalid_size"),
        ({"store_private": 1}, "parameter.wrong_type"),
        ({"store_timeout_s": 0}, "parameter.out_of_range"),
        ({"store_timeout_s": None}, "parameter.out_of_range"),
    ],
)
def test_wrong_settings(settings, code):
    (name,) = settings
    with raises(code, ParameterError, names=name):
        LLM(tiny("llama"), **settings)


def hang(monkeypatch) -> threading.Event:
    """Let every read from a disk wait for this."""
    go_on, get = threading.Event(), DiskTier.get
    monkeypatch.setattr(DiskTier, "get", lambda *asked: (go_on.wait(60), get(*asked))[1])
    return go_on


def test_disk_is_read_for_queued_requests(store, expected, monkeypatch):
    """With one slot, the running request does not continue until the disk is read for the request in the queue."""
    began, get = threading.Event(), DiskTier.get
    monkeypatch.setattr(DiskTier, "get", lambda *asked: (began.set(), get(*asked))[1])
    steps, in_time = [], []

    def slow(tokens):
        steps.append(tokens)
        if len(steps) == 3:
            in_time.append(began.wait(20))

    llm = make(store, max_num_seqs=1)
    llm.add_schema(SCHEMA, encode=False)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with each_pass(llm.loaded, before=slow):
        _, second = llm.generate(["Somebody else's text.", BOTH], params)
    assert in_time == [True]
    assert second.outputs[0].token_ids == expected[:5]
    assert second.usage.disk_tokens > 0
    assert not second.usage.misses
    llm.shutdown()


def test_other_requests_continue_while_segments_load(store, expected, monkeypatch):
    go_on = hang(monkeypatch)

    async def ask():
        llm = make(store, AsyncLLM)
        await llm.add_schema(SCHEMA, encode=False)
        waiting = asyncio.ensure_future(last(llm, BOTH))
        other = await last(llm, "somebody else's text")
        assert len(other.outputs[0].token_ids) == 6
        assert not waiting.done()
        go_on.set()
        output = await waiting
        llm.shutdown()
        return output, llm.stats()

    output, stats = asyncio.run(ask())
    assert output.outputs[0].token_ids == expected
    assert stats.encoded_tokens == 0


async def last(llm: AsyncLLM, prompt):
    return [output async for output in llm.generate(prompt, GREEDY)][-1]


def test_late_segments_are_computed(store, expected, monkeypatch):
    go_on = hang(monkeypatch)
    llm = make(store, store_timeout_s=0.05)
    llm.add_schema(SCHEMA, encode=False)
    output = answer(llm)
    assert output.outputs[0].token_ids == expected
    assert output.usage.cached_tokens == 0
    go_on.set()
    llm.shutdown()


def test_waiting_request_can_be_cancelled(store, monkeypatch):
    go_on = hang(monkeypatch)

    async def ask():
        llm = make(store, AsyncLLM)
        await llm.add_schema(SCHEMA, encode=False)
        waiting = asyncio.ensure_future(last(llm, BOTH))
        await last(llm, "somebody else's text")
        waiting.cancel()
        while llm.stats().waiting:
            await asyncio.sleep(0)
        go_on.set()
        output = await last(llm, BOTH)
        llm.shutdown()
        return output

    assert asyncio.run(ask()).usage.cached_tokens > 0


def test_full_disk_affects_no_answer(tmp_path, expected, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inlay.kv.offload.form.os.fsync", refuse)
    output, stats = restarted(tmp_path)
    assert output.outputs[0].token_ids == expected
    assert (stats.disk.segments, stats.disk.refused) == (0, 1)
    assert "No space left on device" in caplog.text
    assert not files(tmp_path)


@pytest.mark.parametrize("later", [0, 2])
def test_segments_of_an_invalid_request_are_not_stored(tmp_path, later):
    """Logits that are no numbers, in the pass that ends the prompt or in a later one: its modules are suspect."""
    llm = make(tmp_path)
    llm.add_schema(SCHEMA, encode=False)
    passes = itertools.count()

    def damaged(logits):
        return logits * math.nan if next(passes) >= later else None

    with each_pass(llm.loaded, after=damaged), pytest.raises(InlayError):
        answer(llm)
    llm.shutdown()
    assert files(tmp_path) == []


def test_small_pool_reads_segments_that_fit(tmp_path):
    """A schema of more segments than the pool holds at once, asked for one module at a time, over and over."""
    modules = "".join(f'<module name="m{n}">Text of module {n}, which is its own. {n * 7}</module>' for n in range(12))
    schema = Schema.from_string(f'<schema name="s">{modules}</schema>')
    asked = [Prompt.from_string(f'<prompt schema="s"><m{n}/>Say it.</prompt>') for n in range(12)]
    plain = make(None)
    plain.add_schema(schema, encode=False)
    expected = [output.outputs[0].token_ids for output in plain.generate(asked * 2, GREEDY)]
    per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in tiny("llama").spec.layers)
    small = make(tmp_path, kv_memory=per_token * 16 * 14)
    small.add_schema(schema, encode=False)
    assert [output.outputs[0].token_ids for output in small.generate(asked * 2, GREEDY)] == expected
    for prompt, tokens in zip(asked * 2, expected * 2, strict=False):
        assert answer(small, prompt).outputs[0].token_ids == tokens
    stats = small.stats()
    assert stats.disk_tokens > 0
    assert stats.used_chunks <= stats.chunks
    assert stats.held_chunks == 0
    small.shutdown()


def test_encoding_alternates_between_reading_and_computing(store, caplog):
    """One whose segments are in part on disk, in part nowhere."""
    caplog.set_level(logging.ERROR)
    files(store)[0].unlink()
    llm = make(store)
    _, specs = llm.schemas.add(SCHEMA, llm.policy())
    encoding = llm.processor.encoding("a schema", specs)
    news: list[EncodeEvent] = []
    llm.client.encode(encoding, news.extend)
    while not (news and news[-1].finished):
        llm.client.pump()
    assert news[-1].error is None
    stats = llm.stats()
    assert stats.encoded_tokens > 0
    assert stats.disk_tokens > 0
    assert stats.encoded_tokens + stats.disk_tokens == encoding.tokens
    llm.shutdown()
    assert not caplog.records


def test_misses_are_explained(tmp_path):
    """Each as its own request sees it."""

    def misses(llm: LLM, **asked) -> dict[str, int]:
        return dict(answer(llm, **asked).usage.misses)

    llm = make(tmp_path)
    llm.add_schema(SCHEMA, encode=False)
    first = misses(llm)
    tokens = sum(first.values())
    assert list(first) == ["never seen"]
    assert misses(llm) == {}
    while llm.stats().unwritten_segments:
        llm.generate("some text", GREEDY)
    assert set(misses(llm, reuse="isolated")) <= {"other context"}
    llm.shutdown()

    for settings, reason in (({"model": "qwen2"}, "other model"), ({"cache_salt": "x"}, "other salt")):
        other = make(tmp_path, **settings)
        other.add_schema(SCHEMA, encode=False)
        assert misses(other) == {reason: tokens}
        other.shutdown()

    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        path.write_bytes(data)
    again = make(tmp_path)
    again.add_schema(SCHEMA, encode=False)
    assert misses(again) == {"corrupt": tokens}
    again.shutdown()

    plain = make(None)
    plain.add_schema(SCHEMA, encode=False)
    misses(plain)
    plain.store.clear()
    assert misses(plain) == {"evicted": tokens}


def test_miss_reasons_do_not_reveal_private_segments(tmp_path):
    llm = make(tmp_path, store_private=True)
    llm.add_schema(SCHEMA, cache_salt="one")
    answer(llm, cache_salt="one")
    for each in (llm, make(tmp_path, store_private=True)):
        each.add_schema(SCHEMA, encode=False, cache_salt="other")
        assert [reason for reason, _ in answer(each, cache_salt="other").usage.misses] == ["never seen"]
        each.shutdown()


def test_late_segments_are_reported_as_late(store, monkeypatch):
    go_on = hang(monkeypatch)
    llm = make(store, store_timeout_s=0.05)
    llm.add_schema(SCHEMA, encode=False)
    assert [reason for reason, _ in answer(llm).usage.misses] == ["late"]
    go_on.set()
    llm.shutdown()
