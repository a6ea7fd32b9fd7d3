"""Records of segments read back unchanged, and every part of a key counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inlay.kv.identity import Context, KeyMaker, specify
from inlay.kv.offload.record import SegmentRecord, is_finite
from tests.unit.kv.offload.segments import KEYS, LAYERS, record_of, spec_of

CHANGES = {
    "fingerprint": b"another model",
    "kv_dtype": "bfloat16",
    "codec": "int8",
    "salt": b"a tenant's",
    "positioned": True,
    "numerics": "2",
}


def test_record_round_trips():
    behind = specify((7, 8, 9), 3, [specify((1, 2, 3), 0, (), KEYS, b"secret")], KEYS, b"secret")
    for spec in (spec_of(1), behind):
        assert SegmentRecord.from_json(record_of(spec).to_json()) == record_of(spec)
        assert record_of(spec).context == spec.digest
    assert "secret" not in str(record_of(behind).to_json())


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_of_the_key_is_in_the_record(name):
    keys = replace(KEYS, **{name: CHANGES[name]})
    ids = spec_of(1).ids
    other = SegmentRecord.of(specify(ids, 0, (), keys), keys, LAYERS, "a model")
    assert other.key != record_of(spec_of(1)).key
    assert not other.same(replace(record_of(spec_of(1)), key=other.key))
    assert other.key_holds()


def test_wrong_key_is_detected():
    record = record_of(spec_of(1))
    assert record.key_holds()
    for change in ({"ids": (1, 2)}, {"before": Context(tokens=1, end=1)}, {"numerics": "0"}, {"fingerprint": b"x"}):
        assert not replace(record, **change).key_holds()


def test_new_version_gives_another_key():
    old, new = (KeyMaker(b"m", "float32", "none", b"", False, version) for version in ("1, torch 2", "1, torch 3"))
    assert old.key(b"", (1,), 0) != new.key(b"", (1,), 0)
    assert old.place(b"", 0) != new.place(b"", 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 0)])
def test_invalid_numbers_are_detected(bad, dtype, bits):
    sound = np.linspace(-3e38, 3e38, 64, dtype="<f4")
    damaged = sound.copy()
    damaged[17] = bad
    for numbers, expected in ((sound, True), (damaged, False)):
        stored = numbers if dtype == "float32" else (numbers.view("<u4") >> 16).astype("<u2")
        assert is_finite(stored.view(np.uint8).reshape(2, 1, 4, -1), dtype) is expected
