"""Many threads on all tiers at once, below a pool that moves segments between them: nothing wrong, no deadlock."""

from __future__ import annotations

import random
import threading
import time

import pytest

from inlay.errors import CapacityError
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.shared import SharedTier
from inlay.kv.offload.tier import Miss, Tier, TierMissError
from tests.unit.kv.accounting import audit
from tests.unit.kv.offload.memory import MemoryTier
from tests.unit.kv.offload.segments import KEYS, alike, expected, read, record_of, slabs_of, spec_of
from tests.unit.kv.offload.site import Site

pytest.importorskip("redis", reason="redis-py is not installed")
from tests.unit.kv.offload.fake_server import FakeServer

THREADS = 32
SPECS = [spec_of(number, 10 * number) for number in range(1, 9)]
FORMS = [spec.through(codec, KEYS) for spec in SPECS for codec in ("none", "int8")]
EXPECTED = {form.key: expected(form) for form in FORMS}


def act(tier: Tier, form, moves: random.Random) -> str | None:
    """Do something with a segment; returns what was wrong with it."""
    move = moves.choice(("get", "get", "get", "put", "put", "pin", "delete", "refresh"))
    if move == "put":
        tier.put(record_of(form), slabs_of(form.lossless))
    elif move == "delete":
        tier.delete(form.key)
    elif move == "refresh":
        tier.refresh()
        tier.find([form.key])
    elif move == "pin" and isinstance(tier, DiskTier):
        tier.pin(form.key, moves.random() < 0.2)
    elif move == "get" and tier.holds(form.key):
        try:
            if not alike(read(tier, record_of(form)), EXPECTED[form.key], form.codec):
                return f"{tier.name} gave other keys and values"
        except TierMissError as miss:
            return None if miss.reason is Miss.ABSENT else f"{tier.name}: {miss.reason} {miss}"
    return None


def hammer(folder, seconds: float) -> None:
    server = FakeServer()
    disks = [DiskTier(folder, 200_000, "int8") for _ in range(2)]
    servers = [SharedTier(server.address, "int8") for _ in range(2)]
    tiers = [*disks, *servers]
    site = Site([disks[0], servers[0]], tokens=320)
    until = time.monotonic() + seconds
    wrong: list[str] = []

    def work(seed: int) -> None:
        moves = random.Random(seed)
        while time.monotonic() < until and not wrong:
            try:
                said = act(moves.choice(tiers), moves.choice(FORMS), moves)
            except Exception as error:
                said = repr(error)
            if said is not None:
                wrong.append(said)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    moves = random.Random(THREADS)
    while time.monotonic() < until and not wrong:
        _move(site, moves.choice(SPECS), moves)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    site.settled()
    audit(site.store)
    disks[0].reconcile()
    entries = list(disks[0].iterate())
    assert {entry.key for entry in entries} == {bytes.fromhex(p.stem) for p in disks[0].folder.glob("*.safetensors")}
    for entry in entries:
        disks[0].verify(entry.key)
    disks[1].close()
    servers[1].close()
    site.close()
    server.go_away()


def _move(site: Site, spec, moves: random.Random) -> None:
    """One step of the engine's thread."""
    move = moves.choice(("compute", "read", "read", "evict", "forget", "pin"))
    forms = list(site.residency.forms(spec))
    if move == "compute" and site.store.get(spec) is None:
        try:
            site.compute(spec)
        except CapacityError:
            site.settled()
    elif move == "read":
        form = next((form for form in forms if site.residency.below(form.key)), spec)
        if site.residency.below(form.key):
            site.residency.bring_up([(form, site.store.longest(form))])
        while site.residency.bringing([form.key]):
            site.residency.wait(10)
            site.residency.poll()
        assert site.store.get(form) is None or site.lies_right(form)
    elif move == "evict":
        site.store.clear()
    elif move == "forget":
        for form in forms:
            site.residency.forget(form.key)
    elif move == "pin":
        with site.store.hold(site.store.longest(spec)):
            site.store.clear()
    site.residency.poll()


def test_32_threads(tmp_path):
    hammer(tmp_path, 3)


@pytest.mark.slow
def test_32_threads_for_a_minute(tmp_path):
    hammer(tmp_path, 60)


def test_memory_tier_keeps_any_form_unchanged(tmp_path):
    """Copies in memory are returned in the form in which they were put."""
    tier = MemoryTier()
    for form in FORMS[:4]:
        tier.put(record_of(form), EXPECTED[form.key])
        assert alike(read(tier, record_of(form)), EXPECTED[form.key], form.codec)
