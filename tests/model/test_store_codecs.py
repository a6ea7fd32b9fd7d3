"""The store through a codec, by the LLM class: half the bytes, and lossy forms are never taken for exact ones."""

from __future__ import annotations

import pytest

from inlay import LLM, ParameterError, SamplingParams, Schema
from inlay.kv.offload.disk import DiskTier
from inlay.prompt.composed import CachedSpan, NewSpan, compose
from inlay.prompt.request import EngineRequest
from tests.model.test_store import BOTH, GREEDY, SCHEMA, answer, files, make, restarted
from tests.raising import raises


@pytest.fixture(scope="module")
def expected():
    return restarted(None)[0].outputs[0].token_ids


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_restarted_process_computes_no_module(tmp_path, codec):
    first, before = restarted(tmp_path, store_codec=codec)
    second, after = restarted(tmp_path, store_codec=codec)
    assert (after.encoded_tokens, after.disk_tokens) == (0, before.encoded_tokens)
    assert second.usage.disk_tokens == second.usage.cached_tokens
    assert (second.usage.exact_tokens, second.usage.module_tokens) == (0, second.usage.cached_tokens)
    assert first.usage.misses == (("never seen", before.encoded_tokens),)
    plain = restarted(tmp_path / "plain")[1].disk
    assert after.disk.bytes < plain.bytes


def test_added_schema_is_read_from_disk_and_not_encoded(tmp_path):
    restarted(tmp_path, store_codec="int8")
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA)
    assert llm.stats().encoded_tokens == 0
    output = answer(llm)
    assert output.usage.cached_tokens == llm.stats().disk_tokens
    assert output.usage.exact_tokens == 0
    llm.shutdown()


def test_exact_request_reads_no_lossy_form(tmp_path, expected):
    """Nor text that was computed after a lossy form, with both in the pool."""
    restarted(tmp_path, store_codec="int8")
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA)
    lossy = answer(llm)  # its text, and its answer, lie after lossy forms now
    assert lossy.usage.module_tokens > 0
    exact = answer(llm, BOTH, reuse="exact")
    assert exact.usage.cached_tokens == 0
    again = answer(llm, BOTH, reuse="exact")
    assert again.usage.cached_tokens == again.usage.exact_tokens > 0
    plain = make(None)
    plain.add_schema(SCHEMA, encode=False)
    assert (
        exact.outputs[0].token_ids
        == again.outputs[0].token_ids
        == answer(plain, BOTH, reuse="exact").outputs[0].token_ids
    )
    assert answer(llm, BOTH, reuse="off").usage.cached_tokens == 0
    llm.shutdown()


def test_lossless_form_is_preferred(tmp_path, expected):
    restarted(tmp_path, store_codec="int8")
    restarted(tmp_path)  # which reads no int8, computes, and writes what it has computed
    assert len(files(tmp_path)) == 6
    output, stats = restarted(tmp_path, store_codec="int8")
    assert output.outputs[0].token_ids == expected
    assert output.usage.exact_tokens > 0
    assert stats.encoded_tokens == 0


def test_computed_segments_in_the_pool_stay_lossless(tmp_path, expected):
    """The process that has written lossy forms has the others in its pool."""
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA, encode=False)
    for _ in range(3):
        output = answer(llm)
        assert output.outputs[0].token_ids == expected
    assert output.usage.disk_tokens == 0
    while llm.stats().unwritten_segments:
        answer(llm)
    llm.store.clear()
    output = answer(llm)
    assert (output.usage.exact_tokens, output.usage.disk_tokens) == (0, output.usage.cached_tokens)
    llm.shutdown()


def test_other_codec_is_a_miss_reason(tmp_path):
    for settings in ({}, {"store_codec": "fp8"}):
        folder = tmp_path / str(len(settings))
        restarted(folder, store_codec="int8")
        output, stats = restarted(folder, **settings)
        assert output.usage.misses == (("other codec", stats.encoded_tokens),)


def test_damaged_lossy_file_costs_time_only(tmp_path, expected):
    restarted(tmp_path, store_codec="int8")
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        path.write_bytes(data)
    output, stats = restarted(tmp_path, store_codec="int8")
    assert output.outputs[0].token_ids == expected
    assert output.usage.misses == (("corrupt", stats.encoded_tokens),)
    assert restarted(tmp_path, store_codec="int8")[1].encoded_tokens == 0


def test_missing_module_is_encoded_with_an_exact_context(tmp_path):
    """The module's context returns in a lossy form, and is recomputed exactly to encode the module."""
    restarted(tmp_path, store_codec="int8")
    largest = max(files(tmp_path), key=lambda path: path.stat().st_size)
    largest.unlink()
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA)
    assert llm.stats().encoded_tokens > 0
    assert llm.stats().disk_tokens > 0
    llm.shutdown()
    whole = make(tmp_path, store_codec="int8")
    whole.add_schema(SCHEMA)
    assert whole.stats().encoded_tokens == 0, "it was written again, as what it would have been"
    whole.shutdown()


def test_text_after_a_lossy_form_has_its_own_key(tmp_path):
    """Records after a lossy form differ from those after an exact one, and those of two codecs differ."""
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA, encode=False)

    request = llm.processor.process(BOTH, SamplingParams(), llm.policy())
    both = request.with_forms(llm.client.residency.forms)
    lossy = frozenset(spec.key for part in both.parts for spec in part.candidates if spec.codec != "none")
    runs = []
    for stored in (frozenset(), lossy):
        composed = compose(both, stored)
        assert {part.spec.codec for part in composed if isinstance(part, CachedSpan)} == (
            {"int8"} if stored else {"none"}
        )
        assert all(not part.exact for part in composed if isinstance(part, CachedSpan) and stored)
        (last,) = [part for part in composed if isinstance(part, NewSpan)][-1:]
        runs.append(last.run.digest)
    assert len(set(runs)) == 2
    llm.shutdown()


def test_evicted_lossy_form_is_recomputed_and_stays_lossy(tmp_path, expected):
    """A running request keeps the forms that it reads. If they have gone, it is admitted again."""
    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA, encode=False)
    request = llm.client.prepare(llm.processor.process(BOTH, GREEDY, llm.policy()))
    manager = llm.client.engine.kv_manager
    request.prompt.choose(
        lambda specs: frozenset(spec.key for spec in specs if spec.codec == "int8"),
        lambda run: 0,
        manager.profiles,
        manager.orders,
        llm.store,
    )
    request.prompt.settle()
    events = []
    llm.client.submit(request, events.extend)
    while not request.finished:
        llm.client.pump()
    assert tuple(request.token_ids) == expected, "what it has computed is what it would have been"
    anchor = len(request.prompt.request.parts[0].ids)  # computed as it is, for modules to be encoded after
    assert answer(llm, reuse="exact").usage.cached_tokens == anchor
    llm.shutdown()
    output, stats = restarted(tmp_path, store_codec="int8")
    assert (stats.encoded_tokens, output.usage.exact_tokens) == (0, 0), "it was written as the form that it is called"


def test_request_serialised_before_forms_existed_is_readable(tmp_path):
    """Forms belong to the engine: serialized requests do not name them."""

    llm = make(tmp_path, store_codec="int8")
    llm.add_schema(SCHEMA, encode=False)
    request = llm.processor.process(BOTH, SamplingParams(), llm.policy())
    read = EngineRequest.from_bytes(request.to_bytes(), llm.client.model.keys)
    assert all(spec.codec == "none" for part in read.parts for spec in part.candidates)
    llm.shutdown()


def test_lossy_stores_take_half_of_the_bytes(tmp_path):
    """Of a module of 1,024 tokens and more, its file as a whole."""
    text = " ".join(str(number * 7919 % 10_007) for number in range(2000))

    sizes = {}
    for codec in ("none", "int8", "fp8"):
        llm = LLM(
            "demo", kv_memory="256MiB", store=tmp_path / codec, store_codec=codec, dtype="bfloat16", profile="off"
        )
        llm.add_schema(Schema.from_string(f'<schema name="big"><module name="m">{text[:3500]}</module></schema>'))
        llm.shutdown()
        (path,) = sorted(files(tmp_path / codec), key=lambda path: path.stat().st_size)[-1:]
        tier = DiskTier(tmp_path / codec, 1 << 30)
        assert tier.record(bytes.fromhex(path.stem)).tokens >= 1024
        sizes[codec] = path.stat().st_size
        tier.close()
    assert sizes["int8"] <= 0.53 * sizes["none"]
    assert sizes["fp8"] <= 0.53 * sizes["none"]


@pytest.mark.parametrize("codec", ["int4", None, 3])
def test_an_unknown_codec_is_an_error(codec):
    with raises("parameter.unknown_choice", ParameterError, names="store_codec"):
        make(None, store_codec=codec)
