"""A shared store through the LLM class: one server encodes text and the others read it under any fault."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from inlay import AsyncLLM, ParameterError
from inlay.cli.main import main
from inlay.kv.offload import shared
from tests.model.test_store import BOTH, SCHEMA, answer, last, make, restarted

pytest.importorskip("redis", reason="redis-py is not installed")
from tests.raising import raises
from tests.unit.kv.offload.fake_server import FakeServer


@pytest.fixture
def server():
    made = FakeServer()
    yield made
    made.go_away()


DEADLINES = {"EXISTS": "FIND_S", "GETRANGE": "BLOCK_S", "SET": "WRITE_S"}


@pytest.fixture
def quick(monkeypatch, command):
    """A deadline that a test can wait for, of that command alone."""
    monkeypatch.setattr(shared, DEADLINES[command], 0.5)


@pytest.fixture(scope="module")
def expected():
    return restarted(None)[0].outputs[0].token_ids


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_encoded_text_is_read_by_other_servers(server, tmp_path, expected, codec):
    first, before = restarted(None, store_shared=server.address, store_codec=codec)
    assert (first.usage.shared_tokens, before.shared.writes) == (0, 3)
    second, after = restarted(tmp_path, store_shared=server.address, store_codec=codec)
    assert (after.encoded_tokens, after.shared_tokens, after.disk_tokens) == (0, before.encoded_tokens, 0)
    assert second.usage.shared_tokens == second.usage.cached_tokens
    assert (after.disk.writes, after.shared.hits) == (3, 3), "and it has a copy on its own disk"
    server.values.clear()
    third, last = restarted(tmp_path, store_shared=server.address, store_codec=codec)
    assert (last.encoded_tokens, last.disk_tokens) == (0, before.encoded_tokens)
    if codec == "none":
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids == expected


def test_added_schema_is_read_and_not_encoded(server):
    restarted(None, store_shared=server.address)
    llm = make(None, store_shared=server.address)
    llm.add_schema(SCHEMA)
    assert (llm.stats().encoded_tokens, llm.stats().shared.hits) == (0, 3)
    llm.shutdown()


def test_private_text_is_shared_only_if_enabled(server):
    for private, written in ((False, 0), (True, 3)):
        llm = make(None, store_shared=server.address, store_private=private)
        llm.add_schema(SCHEMA, cache_salt="somebody's")
        answer(llm, cache_salt="somebody's")
        llm.shutdown()
        assert len(server.values) == written
    assert not any(b"somebody" in value for value in server.values.values())
    other = make(None, store_shared=server.address, store_private=True)
    other.add_schema(SCHEMA, encode=False, cache_salt="another's")
    assert answer(other, cache_salt="another's").usage.cached_tokens == 0
    other.shutdown()


def test_marked_parts_of_messages_are_not_shared_by_default(server, tmp_path):
    """Only this user reads the folder; others may read the server."""
    document = {"type": "text", "text": "A document of some length. " * 5, "cache_control": {"type": "ephemeral"}}
    chat = [{"role": "user", "content": [document, {"type": "text", "text": "What?"}]}]
    for private, written in ((None, False), (True, True)):
        llm = make(tmp_path, store_shared=server.address, store_private=private)
        for _ in range(2):
            answer(llm, chat)
        llm.shutdown()
        assert bool(server.values) is written


def test_server_is_not_queried_for_private_text(server):
    llm = make(None, store_shared=server.address)
    llm.add_schema(SCHEMA, encode=False, cache_salt="somebody's")
    answer(llm, cache_salt="somebody's")
    assert "EXISTS" not in server.asked
    llm.shutdown()


@pytest.mark.parametrize("command", ["EXISTS", "GETRANGE", "SET"])
def test_stalled_server_delays_an_answer_and_does_not_change_it(server, quick, expected, command):
    restarted(None, store_shared=server.address)
    if command == "SET":
        server.values.clear()
    llm = make(None, store_shared=server.address, store_timeout_s=30)
    server.stalls = {command, "PING"}
    llm.add_schema(SCHEMA, encode=False)
    output = answer(llm)
    llm.shutdown()
    stats = llm.stats()
    assert output.outputs[0].token_ids == expected
    assert stats.encoded_tokens == output.usage.prompt_tokens - 10
    assert (stats.shared.up, stats.shared.failures) == (False, 1)
    assert sum(tokens for _, tokens in output.usage.misses) == stats.encoded_tokens
    reasons = {"EXISTS": {"late"}, "GETRANGE": {"late", "failed"}, "SET": {"never seen"}}
    assert {reason for reason, _ in output.usage.misses} <= reasons[command]


def test_corrupt_values_delay_an_answer_and_do_not_change_it(server, expected):
    restarted(None, store_shared=server.address)
    for name, value in server.values.items():
        server.values[name] = value[:-1] + bytes([value[-1] ^ 1])
    output, stats = restarted(None, store_shared=server.address)
    assert output.outputs[0].token_ids == expected
    assert output.usage.misses == (("corrupt", stats.encoded_tokens),)
    assert dict(stats.shared.misses) == {"corrupt": 3}
    assert restarted(None, store_shared=server.address)[1].encoded_tokens == 0, "it was written again"


def test_finished_query_is_not_late(server, expected, monkeypatch):
    """The answer is known a moment before the query has ended. A request in between is not late."""
    find = shared.SharedTier.find

    def linger(tier, keys):
        find(tier, keys)
        time.sleep(0.3)

    monkeypatch.setattr(shared.SharedTier, "find", linger)
    output, _ = restarted(None, store_shared=server.address)
    assert output.outputs[0].token_ids == expected
    assert {reason for reason, _ in output.usage.misses} == {"never seen"}


def test_failed_read_is_not_late(server, expected, monkeypatch):
    """The failure is known a moment before the read has ended. A request in between is not late."""
    get = shared.SharedTier.get

    def linger(*arguments):
        try:
            get(*arguments)
        finally:
            time.sleep(0.3)

    monkeypatch.setattr(shared.SharedTier, "get", linger)
    restarted(None, store_shared=server.address)
    server.values = {name: value[:-1] + bytes([value[-1] ^ 1]) for name, value in server.values.items()}
    output, stats = restarted(None, store_shared=server.address)
    assert output.outputs[0].token_ids == expected
    assert output.usage.misses == (("corrupt", stats.encoded_tokens),)


def test_server_may_be_absent(server, expected):
    server.go_away()
    output, stats = restarted(None, store_shared=server.address)
    assert output.outputs[0].token_ids == expected
    assert (stats.shared.up, stats.unwritten_segments) == (False, 0)


def test_other_requests_continue_during_a_query(server, expected, monkeypatch):
    restarted(None, store_shared=server.address)

    async def ask():
        llm = make(None, AsyncLLM, store_shared=server.address, store_timeout_s=30)
        await llm.add_schema(SCHEMA, encode=False)
        server.stalls = {"EXISTS"}
        waiting = asyncio.ensure_future(last(llm, BOTH))
        other = await last(llm, "somebody else's text")
        assert len(other.outputs[0].token_ids) == 6
        assert not waiting.done()
        server.go_away()  # which ends the wait
        output = await waiting
        llm.shutdown()
        return output

    assert asyncio.run(ask()).outputs[0].token_ids == expected


def test_folder_can_be_a_shared_store(tmp_path, monkeypatch):
    """A running engine finds and reads what another has written."""
    monkeypatch.setattr("inlay.kv.offload.disk.LOOK_S", 0.0)
    second = make(tmp_path)
    second.add_schema(SCHEMA, encode=False)
    restarted(tmp_path)
    while second.stats().disk.segments < 3:
        second.client.residency.below(b"what nobody has")  # as any request does that finds nothing
    output = answer(second)
    assert (second.stats().encoded_tokens, output.usage.disk_tokens) == (0, output.usage.cached_tokens)
    second.shutdown()


@pytest.mark.parametrize("address", ["somewhere", 3, "http://host"])
def test_invalid_address_is_rejected(address):
    with raises("cache.invalid_address", ParameterError, names="store_shared"):
        make(None, store_shared=address)


def test_run_reports_tokens_of_each_tier(server, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    arguments = ["run", "examples/docs/docs.xml", "--prompt", "examples/docs/prompt.xml", "--json", "--max-tokens", "1"]
    arguments += ["--reuse", "anchored", "--store", "off", "--store-shared", server.address, "--store-codec", "int8"]
    rows = []
    for _ in range(2):
        assert main(arguments) == 0
        said = capsys.readouterr()
        rows.append(json.loads(said.out))
        assert "encoded modules are kept on the shared store" in said.err
    assert rows[0]["tiers"]["shared"] == rows[1]["encoded_tokens"] == 0
    assert rows[1]["tiers"]["shared"] == rows[1]["cached_tokens"] == rows[0]["encoded_tokens"] > 0
