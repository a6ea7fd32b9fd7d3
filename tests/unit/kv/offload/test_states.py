"""All tiers at once under random operations and faults: a segment in the pool is right, or absent."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inlay.errors import CapacityError
from inlay.kv.offload import shared
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import PAGE, HostTier
from inlay.kv.offload.loader import Coming
from inlay.kv.offload.shared import SharedTier
from tests.unit.kv.accounting import audit
from tests.unit.kv.offload.segments import spec_of
from tests.unit.kv.offload.site import Site
from tests.unit.kv.offload.watched_storage import nothing

pytest.importorskip("redis", reason="redis-py is not installed")
from tests.unit.kv.offload.fake_server import FakeServer

SPECS = [spec_of(number, tokens) for number, tokens in enumerate((20, 40, 50, 70, 100), 1)]
specs = st.sampled_from(SPECS)
places = st.integers(0, 99)  # an index into the present segments, so that the drawn value depends on no other thread
LIES = {
    "other bytes": lambda name, reply: (
        reply[:-9] + bytes([reply[-9] ^ 1]) + reply[-8:] if name == "GETRANGE" else reply
    ),
    "no length": lambda name, reply: b"$1\r\na\r\n" if name == "STRLEN" else reply,
    "everything is there": lambda name, reply: b":1\r\n" if name == "EXISTS" else reply,
    "nothing is there": lambda name, reply: b":0\r\n" if name == "EXISTS" else reply,
    "noise": lambda name, reply: b"\x00 no answer\r\n",
}


class Tiers(RuleBasedStateMachine):
    """A pool above a host tier, a folder and a server."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.server = FakeServer()
        self.patch = pytest.MonkeyPatch()
        for name in ("FIND_S", "BLOCK_S", "WRITE_S"):
            self.patch.setattr(shared, name, 0.05)
        self.patch.setattr(shared, "ABSENT_S", 0.0)
        self.patch.setattr(shared, "CONNECT_S", 0.1)
        self.patch.setattr(shared, "FIRST_PAUSE_S", 0.01)
        self.patch.setattr(shared, "LONGEST_PAUSE_S", 0.02)
        self.patch.setattr("inlay.kv.offload.loader.AGAIN_S", 0.0)
        self.codec, self.pages = "none", 0

    @initialize(codec=st.sampled_from(["none", "int8", "fp8"]), pages=st.sampled_from([0, 1, 5, 64]))
    def begin(self, codec, pages):
        self.codec, self.pages = codec, pages
        self.open()

    def open(self) -> None:
        self.disk = DiskTier(self.folder, 1 << 20, self.codec)
        self.host = HostTier(self.pages * PAGE) if self.pages else None
        self.site = Site([self.disk, SharedTier(self.server.address, self.codec)], tokens=160, host=self.host)

    @rule(spec=specs)
    def compute(self, spec):
        if self.site.store.get(spec) is None:
            try:
                self.site.compute(spec)
            except CapacityError:  # copies hold references
                self.site.settled()
                self.site.compute(spec)

    @rule(spec=specs)
    def read(self, spec):
        """In the most exact form that is below, as a request does."""
        forms = list(self.site.residency.forms(spec))
        self.site.seek(*forms)
        for form in forms:
            if self.site.store.get(form) is None and self.site.residency.below(form.key):
                if self.site.residency.bring_up([(form, self.site.store.longest(form))]) is not Coming.NOT:
                    while self.site.residency.bringing([form.key]):
                        self.site.residency.wait(10)
                        self.site.residency.poll()
                return

    @rule()
    def evict(self):
        self.site.store.clear()

    @rule(spec=specs, tokens=st.integers(1, 100))
    def evict_the_end(self, spec, tokens):
        with self.site.store.hold(self.site.store.longest(spec, most=tokens)):
            self.site.store.clear()

    @rule(urgent=st.booleans())
    def make_room(self, urgent):
        with suppress(CapacityError):
            self.site.pool.free(self.site.store.allocate(100, urgent=urgent))

    @rule()
    def turn_over(self):
        """Evict the whole pool, once it is copied."""
        with suppress(CapacityError):
            self.site.pool.free(self.site.allocate(160))

    @rule()
    def copy_ahead(self):
        self.site.residency.demote()

    @rule()
    def clear_the_host(self):
        self.site.residency.clear_host()

    @rule(spec=specs)
    def forget(self, spec):
        for form in self.site.residency.forms(spec):
            self.site.residency.forget(form.key)

    @rule(spec=specs, pinned=st.booleans())
    def pin(self, spec, pinned):
        self.disk.pin(spec.through(self.codec, self.site.store.keys).key, pinned)

    @rule()
    def settle(self):
        self.site.settled()

    @rule(codec=st.sampled_from(["none", "int8", "fp8"]))
    def restart(self, codec):
        """With another codec than before, perhaps."""
        self.site.settled()
        self.site.close()
        self.codec = codec
        self.open()

    # Faults

    @precondition(lambda self: self.pages)
    @rule(where=st.floats(0, 1), which=places)
    def flip_a_byte_of_the_host(self, where, which):
        if kept := sorted(self.host.kept.items()):
            _, segment = kept[which % len(kept)]
            size = segment.record.tokens * 320
            self.host.memory.read(segment.pages, int(where * (size - 1)), 1)[0] ^= 1

    @precondition(lambda self: self.pages)
    @rule(fails=st.booleans())
    def copies_fail(self, fails):
        def fail(layer, slots):
            if layer:
                raise RuntimeError("the device is gone")

        self.site.storage.before_read = fail if fails else nothing

    @rule(where=st.floats(0, 1), which=places)
    def flip_a_byte_on_disk(self, where, which):
        files = sorted(self.disk.folder.glob("*.safetensors"))
        if files:
            path = files[which % len(files)]
            with suppress(FileNotFoundError):  # a forgotten file may disappear at any moment
                content = bytearray(path.read_bytes())
                content[int(where * (len(content) - 1))] ^= 1
                path.unlink()
                path.write_bytes(content)

    @rule(which=places)
    def lose_a_file(self, which):
        files = sorted(self.disk.folder.glob("*.safetensors"))
        if files:
            files[which % len(files)].unlink(missing_ok=True)

    @rule(quota=st.sampled_from([0, 30_000, 1 << 20]))
    def fill_the_disk(self, quota):
        self.disk.quota = quota

    @rule(where=st.floats(0, 1), which=places)
    def flip_a_byte_on_the_server(self, where, which):
        if names := sorted(self.server.values):
            name = names[which % len(names)]
            content = bytearray(self.server.values[name])
            content[int(where * (len(content) - 1))] ^= 1
            self.server.values[name] = bytes(content)

    @rule(one=places, other=places)
    def swap_values_on_the_server(self, one, other):
        if names := sorted(self.server.values):
            taken = self.server.values[names[other % len(names)]]
            self.server.values[names[one % len(names)]] = taken

    @rule()
    def empty_the_server(self):
        self.server.values.clear()

    @rule(lie=st.sampled_from(sorted(LIES)))
    def lie(self, lie):
        self.server.lie = LIES[lie]

    @rule(command=st.sampled_from(["EXISTS", "GETRANGE", "SET", "UNLINK"]))
    def stall(self, command):
        self.server.stalls = {command}

    @rule()
    def be_right(self):
        self.server.right()

    @precondition(lambda self: not self.server.gone)
    @rule()
    def go_away(self):
        self.server.go_away()

    @precondition(lambda self: self.server.gone)
    @rule()
    def come_back(self):
        self.server.come_back()

    @invariant()
    def pool_contents_are_right(self):
        if not hasattr(self, "site"):
            return
        if self.site.residency.settled and not self.site.residency.demoting:  # else some is held
            audit(self.site.store)
            if self.host is not None:
                assert self.host.memory.free_bytes == self.host.quota - self.host.stats().bytes
        fails, self.site.storage.before_read = self.site.storage.before_read, nothing
        for spec in SPECS:
            for codec in ("none", "int8", "fp8"):
                form = spec.through(codec, self.site.store.keys)
                assert self.site.store.get(form) is None or self.site.lies_right(form)
        self.site.storage.before_read = fails

    def teardown(self):
        try:
            if hasattr(self, "site"):
                self.site.settled()
                audit(self.site.store)
                self.site.close()
        finally:
            self.server.go_away()
            self.patch.undo()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_random_operations_on_all_tiers(examples):
    run_state_machine_as_test(Tiers, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))
