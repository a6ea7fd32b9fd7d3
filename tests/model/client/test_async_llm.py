"""AsyncLLM: many callers and one engine thread; each caller receives the events of its own request only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from inlay import (
    LLM,
    AbortedError,
    AsyncLLM,
    CapacityError,
    DeadlineError,
    InlayError,
    ParameterError,
    PMLError,
    QueueFullError,
    SamplingParams,
    Schema,
)
from inlay.types import RequestOutput
from tests.conftest import tiny
from tests.raising import raises

SCHEMA = Schema.from_string('<schema name="s">Always. <module name="a">A module of some length.</module></schema>')
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def engine(**settings: object) -> AsyncLLM:
    settings.setdefault("speculation", "off")  # one token a step, so that answers take their time
    return AsyncLLM(tiny("llama"), kv_memory="16MiB", chunk_size=8, **settings)


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def test_concurrent_answers_equal_separate_answers():
    prompts = [f"Some words that all begin with, and then number {n}." for n in range(12)]
    solo = LLM(tiny("llama"), kv_memory="16MiB")
    expected = [solo.generate(prompt, PARAMS, reuse="off")[0].outputs[0].token_ids for prompt in prompts]

    async def ask() -> list[RequestOutput]:
        llm = engine(max_num_seqs=5)
        return await asyncio.gather(*(last(llm.generate(prompt, PARAMS)) for prompt in prompts))

    outputs = asyncio.run(ask())
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.usage.exact_tokens > 40 for output in outputs) >= 11, "they share what they begin with"


def test_schemas_and_several_answers():
    async def ask() -> tuple[RequestOutput, RequestOutput]:
        llm = engine()
        await llm.add_schema(SCHEMA)
        prompt = SCHEMA.prompt().use("a").text("?")
        several = SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=5, ignore_eos=True)
        return await last(llm.generate(prompt, PARAMS)), await last(llm.generate(prompt, several))

    one, three = asyncio.run(ask())
    assert one.usage.computed_tokens == 1
    assert len({answer.token_ids for answer in three.outputs}) > 1


def test_leaving_the_loop_gives_the_request_up():
    async def leave() -> tuple[int, int]:
        llm = engine()
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        await stream.aclose()
        await asyncio.wrap_future(llm.client.call(llm.store.clear))
        assert not llm.stats().busy
        await last(llm.generate("Hello", PARAMS))
        await asyncio.wrap_future(llm.client.call(llm.store.clear))
        return llm.store.pool.free_chunks, llm.store.pool.chunks

    free, chunks = asyncio.run(leave())
    assert free == chunks


def test_abort_and_deadline_end_one_request_with_an_error():
    async def end() -> None:
        llm = engine()
        with raises("request.deadline", DeadlineError):
            await last(llm.generate("Hello", LONG, timeout_s=1e-4))
        stream = llm.generate("Hello", LONG, request_id="mine")
        await anext(stream)
        with raises("request.duplicate_id", ParameterError, names="mine"):
            await anext(llm.generate("Hello", PARAMS, request_id="mine"))
        assert llm.abort("mine")
        with raises("request.aborted", AbortedError, names="mine"):
            async for _ in stream:
                pass
        assert not llm.abort("mine")
        assert (await last(llm.generate("Hello", PARAMS, request_id="mine"))).request_id == "mine"

    asyncio.run(end())


def test_full_queue_rejects_requests_and_serves_the_rest():
    async def ask() -> list[object]:
        llm = engine(max_num_seqs=1, max_waiting=2)
        first = llm.generate("Number 0", LONG)
        await anext(first)  # it runs, and the others wait or are refused
        streams = [first, *(llm.generate(f"Number {n}", PARAMS) for n in range(1, 6))]
        return await asyncio.gather(*(last(stream) for stream in streams), return_exceptions=True)

    outcomes = asyncio.run(ask())
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
    served = [outcome for outcome in outcomes if isinstance(outcome, RequestOutput)]
    assert refused
    assert len(refused) + len(served) == 6
    assert len(served) >= 3


def test_invalid_prompt_is_one_sentence_and_other_requests_run():
    async def ask() -> RequestOutput:
        llm = engine()
        with raises("prompt.empty", ParameterError):
            await last(llm.generate([], PARAMS))
        with pytest.raises(ParameterError, match="timeout_s is -1"):
            await last(llm.generate("Hello", PARAMS, timeout_s=-1))
        return await last(llm.generate("Hello", PARAMS))

    assert len(asyncio.run(ask()).outputs[0].token_ids) == 10


def test_a_slow_reader_gets_fewer_steps_and_all_of_the_answer():
    async def read() -> list[RequestOutput]:
        llm, outputs = engine(), []
        async for output in llm.generate("Hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)):
            outputs.append(output)
            await asyncio.sleep(0.05)
        return outputs

    outputs = asyncio.run(read())
    assert len(outputs) < 60
    assert len(outputs[-1].outputs[0].token_ids) == 60


def test_shutdown_ends_running_requests():
    async def end() -> None:
        llm = engine()
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with raises("engine.shut_down", InlayError):
            async for _ in stream:
                pass
        with raises("engine.shut_down", InlayError):
            await last(llm.generate("Hello", PARAMS))

    asyncio.run(end())


@pytest.mark.parametrize(("modules", "repeats"), [(12, 4), (1, 44)])
def test_schema_is_encoded_between_the_steps_of_other_requests(modules, repeats):
    """Other streams go on during the many passes of a schema with many modules or one long module."""
    texts = [f"Text number {n} of some length. " * repeats for n in range(modules)]
    modules = "".join(f"<module name='m{n}'>{text}</module>" for n, text in enumerate(texts))
    schema = Schema.from_string(f"<schema name='many'>{modules}</schema>")
    events: list[str] = []

    async def listen(llm: AsyncLLM) -> None:
        async for _ in llm.generate("Somebody who reads", LONG):
            events.append("token")

    async def run() -> None:
        llm = engine(prefill_chunk=128)
        reading = asyncio.create_task(listen(llm))
        while not events:
            await asyncio.sleep(0.001)
        await llm.add_schema(schema, progress=lambda done, total: events.append("encoded"))
        assert all(tokens == stored > 0 for tokens, stored in (await llm.stored("many")).values())
        reading.cancel()

    asyncio.run(run())
    first, last_one = events.index("encoded"), len(events) - 1 - events[::-1].index("encoded")
    assert events[first:last_one].count("token") >= 6


MANY = "".join(f"<module name='m{n}'>{f'Text number {n}. ' * 20}</module>" for n in range(30))


@pytest.mark.parametrize("change", ["removed", "replaced", "given up"])
def test_cancelled_encoding_stops(change):
    schema = Schema.from_string(f"<schema name='many'>{MANY}</schema>")

    async def run() -> tuple[int, int]:
        llm = engine(max_num_batched_tokens=64)
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            if done > 700:
                loop.call_soon_threadsafe(begun.set)

        encoding = asyncio.create_task(llm.add_schema(schema, progress=progress))
        await begun.wait()
        if change == "removed":
            assert llm.remove_schema("many")
        elif change == "replaced":
            await llm.add_schema(
                Schema.from_string("<schema name='many'>Other text.</schema>"), encode=False, replace=True
            )
        else:
            encoding.cancel()
        with pytest.raises(asyncio.CancelledError if change == "given up" else AbortedError) as caught:
            await encoding
        if change != "given up":
            said = "schema 'many' was removed or replaced while it was encoded; its encoded segments stay stored"
            assert str(caught.value) == said
        await last(llm.generate("And on it goes.", PARAMS))
        await llm.add_schema(schema, encode=False, replace=True)
        return tuple(map(sum, zip(*(await llm.stored("many")).values(), strict=True)))

    tokens, stored = asyncio.run(run())
    assert 300 < stored < tokens


def test_adding_the_same_schema_concurrently_is_safe():
    schema = Schema.from_string(f"<schema name='many'>{MANY}</schema>")

    async def run() -> None:
        llm = engine(max_num_batched_tokens=64)
        await asyncio.gather(*(llm.add_schema(schema) for _ in range(3)))
        assert all(tokens == stored > 0 for tokens, stored in (await llm.stored("many")).values())

    asyncio.run(run())


def test_module_longer_than_the_context_is_rejected_with_its_place():
    long = "word " * 410
    schema = Schema.from_string(
        f"<schema name='s'>\n  <module name='fits'>x</module><module name='m'>{long}</module></schema>"
    )
    with pytest.raises(PMLError) as caught:
        asyncio.run(engine().add_schema(schema))
    assert str(caught.value) == (
        "<schema>:2:33: module 'm' is 2050 tokens long and the model's context is 2048 tokens long, answer included; "
        "shorten it, or cut it into modules of which prompts import some"
    )
    always = Schema.from_string(f"<schema name='s'>{long}</schema>")
    with raises("schema.too_long", PMLError, names="2050"):
        asyncio.run(engine().add_schema(always))


def test_encoding_that_cannot_fit_gives_one_sentence():
    schema = Schema.from_string(f"<schema name='many'>{MANY}</schema>")

    async def run() -> None:
        llm = AsyncLLM(tiny("llama"), kv_memory="1MiB", chunk_size=8)
        with raises("engine.kv_memory", CapacityError, names="many") as caught:
            await llm.add_schema(schema)
        assert "tokens to encode and the KV pool holds" in str(caught.value)
        assert "encode=False, which leaves each module to the first prompt" in str(caught.value)
        await last(llm.generate("And on it goes.", PARAMS))

    asyncio.run(run())


def test_failing_progress_callback_ends_only_its_encoding():
    async def run() -> None:
        llm = engine()

        def progress(done: int, total: int) -> None:
            if done:
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await llm.add_schema(SCHEMA, progress=progress)
        await llm.add_schema(SCHEMA)

    asyncio.run(run())


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), True, "2"])
def test_a_weight_is_a_number_above_0(weight):
    async def run() -> None:
        llm = engine()
        with raises("parameter.out_of_range", ParameterError, names="weight"):
            await last(llm.generate("Well", PARAMS, weight=weight))
        with raises("parameter.out_of_range", ParameterError, names="weight"):
            await llm.add_schema(SCHEMA, weight=weight)

    asyncio.run(run())


def test_full_queue_drops_a_request_of_the_largest_tenant():
    async def run() -> list[RequestOutput | BaseException]:
        llm = engine(max_num_seqs=2, max_waiting=3)
        many = []
        for n, params in enumerate([LONG, LONG, PARAMS, PARAMS, PARAMS]):
            many.append(asyncio.create_task(last(llm.generate(f"{n} of many", params, tenant="many"))))
            while llm.stats().running + llm.stats().waiting <= n:
                await asyncio.sleep(0.001)
        one = await last(llm.generate("One", PARAMS, tenant="one"))
        assert one.finished
        assert not many[0].done(), "the other of the two had its place"
        return await asyncio.gather(*many, return_exceptions=True)

    *others, refused = asyncio.run(run())
    assert all(end.finished for end in others)
    assert isinstance(refused, QueueFullError)


def test_stored_reports_encoded_tokens():
    async def run() -> None:
        llm = engine()
        await llm.add_schema(SCHEMA, encode=False)
        sizes = {"": len(llm.encoder.text("Always. ")), "a": len(llm.encoder.text("A module of some length."))}
        assert await llm.stored("s") == {name: (size, 0) for name, size in sizes.items()}
        await llm.add_schema(SCHEMA)
        assert await llm.stored("s") == {name: (size, size) for name, size in sizes.items()}
        assert await llm.stored("s", reuse="exact") == {}
        await llm.add_schema(SCHEMA, cache_salt="mine", encode=False)
        assert (await llm.stored("s", cache_salt="mine"))["a"] == (sizes["a"], 0)
        assert (await llm.stored("s", cache_salt="yours"))["a"] == (sizes["a"], sizes["a"])
        with raises("schema.unknown", ParameterError, names="t"):
            await llm.stored("t")

    asyncio.run(run())


def test_time_to_first_token_is_queue_fetch_and_compute():
    async def run() -> list[RequestOutput]:
        llm = engine(max_num_seqs=1)
        return await asyncio.gather(*(last(llm.generate(f"Prompt number {n}", PARAMS)) for n in range(3)))

    for output in asyncio.run(run()):
        metrics = output.metrics
        parts = [metrics.queue_s, metrics.fetch_s, metrics.compute_s]
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(metrics.ttft_s, abs=1e-6)


@pytest.mark.parametrize("answers", [1, 3])
def test_stream_interval_none_gives_one_output(answers):
    async def run() -> tuple[list[RequestOutput], RequestOutput]:
        llm = engine()
        params = SamplingParams(temperature=1, seed=3, n=answers, max_tokens=10, ignore_eos=True)
        whole = [output async for output in llm.generate("Hello", params, stream_interval=None)]
        return whole, await last(llm.generate("Hello", params))

    (whole,), streamed = asyncio.run(run())
    assert whole.finished
    assert [one.token_ids for one in whole.outputs] == [one.token_ids for one in streamed.outputs]


def test_stream_interval_batches_tokens():
    async def run() -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        return [output async for output in engine().generate("Hello", params, stream_interval=8)]

    said = [len(output.outputs[0].token_ids) for output in asyncio.run(run())]
    assert said[-1] == 40
    assert all(later - earlier >= 8 for earlier, later in pairwise(said[:-1]))
    assert len(said) > 2, "it is no stream"


@pytest.mark.parametrize("interval", [0, -3])
def test_invalid_stream_interval_is_rejected(interval: int):
    with raises("parameter.out_of_range", ParameterError, names=str(interval)):
        asyncio.run(last(engine().generate("Hello", PARAMS, stream_interval=interval)))


def test_deadline_error_is_raised_without_streaming():
    async def run() -> None:
        llm = engine()
        with pytest.raises(DeadlineError):
            await last(llm.generate("Hello", LONG, timeout_s=0.02, stream_interval=None))

    asyncio.run(run())
