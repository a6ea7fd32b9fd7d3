"""An ingress without weights in front of remote engines answers as one engine does, after any failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from inlay import AbortedError, AsyncLLM, DeadlineError, ParameterError, RequestOutput, SamplingParams, Schema
from inlay.errors import EngineDeadError, InlayError
from inlay.prompt.seen_pieces import text_hash
from inlay.retrieval import marked_parts
from inlay.server.cache_view import CacheView
from tests.adapters import ALL, write_adapter
from tests.conftest import tiny
from tests.raising import raises
from tests.system.cluster.local import Cluster, cluster

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">First module, which is long enough to be worth its place.</module>'
    '<module name="b">Second module, which nobody has asked for yet.</module>'
    '<module name="c">Third module, <param name="p" len="6" default="one"/> of them.</module></schema>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def with_cluster(test: Callable[[Cluster], Awaitable[None]], replicas: int = 2, **settings: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), cluster(replicas, **settings) as made:
            await test(made)

    asyncio.run(run())


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **asked: Any) -> RequestOutput:
    async for output in llm.generate(prompt, params, **asked):
        found = output
    return found


def expected(*prompts: Any, params: SamplingParams = GREEDY, schema: Schema | None = None) -> list[RequestOutput]:
    """The answers of one engine in this process."""

    async def ask() -> list[RequestOutput]:
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", chunk_size=8, seed=0)
        if schema is not None:
            await llm.add_schema(schema)
        found = [await last(llm, prompt, params) for prompt in prompts]
        llm.shutdown()
        return found

    return asyncio.run(ask())


def prompt_of(*modules: str) -> Any:
    prompt = SCHEMA.prompt()
    for module in modules:
        prompt = prompt.use(module)
    return prompt.text(" Who?")


def test_cluster_answers_equal_one_engine():
    prompts = ["Once upon a time", [5, 6, 7, 8], "Once upon another time"]
    wanted = expected(*prompts)

    async def test(made: Cluster) -> None:
        for replica, other in (("r0", "r1"), ("r1", "r0")):
            made.transport.gone = {other}
            found = await asyncio.gather(*(last(made.llm, prompt) for prompt in prompts))
            assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
            assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in wanted]
            assert all(one.finished and one.outputs[0].finish_reason == "length" for one in found)
            assert set(made.transport.answered) == {replica}
            made.transport.answered.clear()

    with_cluster(test)


def test_modules_are_encoded_on_their_replica_and_found_there():
    wanted = expected(prompt_of("a", "c"), prompt_of("b"), schema=SCHEMA)

    async def test(made: Cluster) -> None:
        told: list[tuple[int, int]] = []
        await made.llm.add_schema(SCHEMA, progress=lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] > 0
        assert all(have == of for of, have in (await made.llm.stored("s")).values())
        for prompt, one in zip((prompt_of("a", "c"), prompt_of("b")), wanted, strict=True):
            await made.follow()
            found = await last(made.llm, prompt)
            assert found.outputs[0].token_ids == one.outputs[0].token_ids
        await made.follow()
        again = await last(made.llm, prompt_of("a", "c"))
        assert again.usage.cached_tokens == again.usage.prompt_tokens - again.usage.computed_tokens > 30
        counts = made.routing.counts
        assert counts.requests == 3
        assert 0 < counts.predicted_tokens <= counts.prompt_tokens
        assert abs(counts.predicted_tokens - counts.found_tokens) <= 40

    with_cluster(test)


def test_adapters_work_on_replicas(tmp_path: Path):
    """Each adapter answers as on one engine, none reads another's segments, and the router separates them."""
    folders = {name: write_adapter(tmp_path / name, tiny("llama"), ALL, seed=seed) for seed, name in enumerate("xy")}
    wanted: dict[str | None, RequestOutput] = {}

    async def one_engine() -> None:
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", chunk_size=8, seed=0, adapters=folders)
        await llm.add_schema(SCHEMA)
        for name in (None, *folders):
            wanted[name] = await last(llm, prompt_of("a", "c"), adapter=name)
        llm.shutdown()

    async def test(made: Cluster) -> None:
        assert made.llm.adapters == made.engines["r0"].adapters
        await made.llm.add_schema(SCHEMA)
        for name in wanted:
            await made.follow()
            first = await last(made.llm, prompt_of("a", "c"), adapter=name)
            await made.follow()
            predicted = made.routing.counts.predicted_tokens
            again = await last(made.llm, prompt_of("a", "c"), adapter=name)
            predicted = made.routing.counts.predicted_tokens - predicted
            for one in (first, again):
                assert one.outputs[0].token_ids == wanted[name].outputs[0].token_ids
            assert bool(first.usage.cached_tokens) == (name is None), "another's are not this one's"
            assert again.usage.cached_tokens > 30
            assert abs(predicted - again.usage.cached_tokens) <= 10
        with raises("adapter.unknown", ParameterError) as caught:
            await last(made.llm, "a", adapter="z")
        assert "'z'" in str(caught.value)
        assert "'x'" in str(caught.value)

    asyncio.run(one_engine())
    assert len({tuple(one.outputs[0].token_ids) for one in wanted.values()}) == 3
    with_cluster(test, adapters=folders)


def test_next_prompt_goes_to_the_replica_with_its_prefix():
    text = "A conversation that goes on for quite a while, so that it has some borders to be found at. " * 3

    async def test(made: Cluster) -> None:
        await last(made.llm, text)
        (first,) = made.transport.answered
        await made.follow()
        for _ in range(3):
            await last(made.llm, text + " And on.")
            await made.follow()
        assert set(made.transport.answered) == {first}
        assert made.routing.counts.predicted_tokens > 3 * 128

    with_cluster(test, bound=100.0)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in fields(params)}


def test_stop_string_ends_the_answer_on_the_replica(caplog: pytest.LogCaptureFixture):
    (free,) = expected("Tell me", params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = free.outputs[0].text[6:9]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=[stop])

    async def test(made: Cluster) -> None:
        found = await last(made.llm, "Tell me", params)
        assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", stop)
        both = await last(made.llm, "Tell me", SamplingParams(**{**vars_of(params), "n": 2, "temperature": 1.0}))
        assert both.finished
        assert all(answer.finish_reason in ("stop", "length") for answer in both.outputs)
        async with asyncio.timeout(20):
            while any(engine.stats().running for engine in made.engines.values()):
                await asyncio.sleep(0.01)
        assert "lost its replica" not in caplog.text

    with_cluster(test)


def test_replica_lost_before_its_first_token_is_replaced():
    wanted = expected("Once upon a time")

    async def test(made: Cluster) -> None:
        made.transport.cut_after.update(r0=0, r1=0)  # the first that is asked
        found = await last(made.llm, "Once upon a time")
        assert found.outputs[0].token_ids == wanted[0].outputs[0].token_ids
        assert len(set(made.transport.answered)) == len(made.transport.answered) > 1
        assert made.routing.counts.retries >= 1
        assert made.routing.counts.lost >= 1

    with_cluster(test, replicas=3)


def test_replica_lost_during_an_answer_is_an_error():
    async def test(made: Cluster) -> None:
        made.transport.cut_after.update(r0=1, r1=1)
        heard = []

        async def listen() -> None:
            async for output in made.llm.generate("Once", SamplingParams(max_tokens=200, ignore_eos=True)):
                heard.append(output)

        with raises("engine.dead", EngineDeadError):
            await listen()
        assert heard
        assert len(made.transport.answered) == 1
        assert len(made.routing.replicas) == 1

    with_cluster(test)


def test_requests_fail_without_replicas_and_recover_later():
    async def test(made: Cluster) -> None:
        made.transport.gone.update(("r0", "r1"))
        with raises("engine.dead", EngineDeadError):
            await last(made.llm, "Once")
        made.client.set_replicas([])
        with raises("engine.dead", EngineDeadError):
            await made.llm.check_health()
        with raises("engine.dead", EngineDeadError):
            await last(made.llm, "Once")
        made.transport.gone.clear()
        made.client.set_replicas(["r0"])
        assert (await last(made.llm, "Once")).finished

    with_cluster(test)


def test_stalled_replica_is_avoided():
    """The first replica never responds; its request is retried elsewhere, and later ones avoid it."""

    async def test(made: Cluster) -> None:
        made.transport.silent.add("r0")
        outputs = await asyncio.gather(*(last(made.llm, f"Prompt number {number}") for number in range(6)))
        assert all(one.finished for one in outputs)
        async with asyncio.timeout(20):
            while not made.routing.stalled("r0"):
                await asyncio.sleep(0.05)
        before = made.transport.answered.count("r0")
        for number in range(4):
            await last(made.llm, f"Later prompt {number}")
        assert made.transport.answered.count("r0") == before

    with_cluster(test, stalled_s=1.0)


def test_deadline_is_kept_if_the_replica_is_silent():
    async def test(made: Cluster) -> None:
        made.transport.silent.add("r0")
        with raises("request.deadline", DeadlineError):
            await last(made.llm, "Once", timeout_s=0.2)

    with_cluster(test, replicas=1)


def test_invalid_requests_end_with_the_replicas_error():
    async def test(made: Cluster) -> None:
        grammar = SamplingParams(structured_outputs={"regex": "(["})
        with raises("structured.invalid", ParameterError) as caught:
            await last(made.llm, "Once", grammar)
        assert "structured_outputs" in str(caught.value)
        with pytest.raises(DeadlineError):
            await last(made.llm, "Once", SamplingParams(max_tokens=1900, ignore_eos=True), timeout_s=0.05)
        with pytest.raises(ParameterError):
            await last(made.llm, [10**6])

    with_cluster(test)


def test_disconnect_or_abort_cancels_the_request_on_the_replica():
    async def test(made: Cluster) -> None:
        long = SamplingParams(max_tokens=1900, ignore_eos=True)
        stream = made.llm.generate("Once", long)
        await anext(stream)
        await stream.aclose()

        async def aborted() -> None:
            async for _ in made.llm.generate("Twice", long, request_id="named"):
                made.llm.abort("named")

        with pytest.raises(AbortedError):
            await aborted()
        async with asyncio.timeout(20):
            while any(engine.stats().running for engine in made.engines.values()):
                await asyncio.sleep(0.01)

    with_cluster(test)


def test_stats_are_summed_over_replicas():
    async def test(made: Cluster) -> None:
        await asyncio.gather(*(last(made.llm, f"Prompt {number}") for number in range(4)))
        await made.follow()
        stats = made.llm.stats()
        assert stats.chunks == sum(engine.stats().chunks for engine in made.engines.values())
        assert stats.steps == sum(engine.stats().steps for engine in made.engines.values())
        await made.llm.reset_prefix_cache()
        async with asyncio.timeout(20):
            while any(engine.stats().segments for engine in made.engines.values()):
                await asyncio.sleep(0.01)

    with_cluster(test)


def test_files_listings_and_pins_are_refused_with_the_reason():
    async def test(made: Cluster) -> None:
        schemas: Any = None
        with raises("cluster.not_available", ParameterError):
            await CacheView(made.llm, schemas).verify()
        await made.llm.add_schema(SCHEMA, encode=False)
        with raises("cluster.not_available", ParameterError):
            await made.llm.pin("s")
        assert not await made.llm.unpin("s"), "nothing is pinned"
        with raises("cluster.not_available", ParameterError):
            made.llm.local.modules()

    with_cluster(test)


def test_removed_schema_ends_its_encoding():
    async def test(made: Cluster) -> None:
        with raises("schema.removed", InlayError):
            await made.llm.add_schema(SCHEMA, progress=lambda done, total: made.llm.remove_schema("s"))

    with_cluster(test)


def test_closed_client_rejects_requests_with_a_reason():
    async def test(made: Cluster) -> None:
        made.client.shutdown()
        with raises("engine.shut_down", InlayError):
            await last(made.llm, "Once")

    with_cluster(test)


def test_texts_are_scored_from_the_routers_map_without_a_call():
    system = {"role": "system", "content": "Answer from the documents."}
    texts = [
        "Lima lies by the sea. " * 6 + "\n",
        "Oslo lies to the north. " * 7 + "\n",
        "Rome lies on a river. " * 5 + "\n",
    ]
    messages = [system, {"role": "user", "content": marked_parts(texts[:2], "Where?")}]

    async def test(made: Cluster) -> None:
        assert [one.resident for one in await made.llm.score_cached(texts, messages=[system])] == [{}] * 3
        await last(made.llm, messages, reuse="modular", cache_salt="mine")
        await made.follow()
        made.transport.calls.clear()
        first, second, third = await made.llm.score_cached(texts, messages=[system], reuse="modular", cache_salt="mine")
        assert (first.resident, second.resident) == ({"pool": first.tokens}, {"pool": second.tokens})
        assert third.resident == {}
        hashes = [text_hash(text) for text in texts]
        again = await made.llm.score_cached(hashes=hashes, messages=[system], reuse="modular", cache_salt="mine")
        assert [one.resident for one in again] == [first.resident, second.resident, {}]
        for foreign in (None, "other"):
            scores = await made.llm.score_cached(texts, messages=[system], reuse="modular", cache_salt=foreign)
            assert [one.resident for one in scores] == [{}] * 3
        assert made.transport.calls == []

    with_cluster(test)
