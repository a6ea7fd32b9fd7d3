"""A context's record has constant size and depends only on the tokens before a segment, however they were combined."""

from __future__ import annotations

import hashlib
import pickle
import random
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.kv.identity import EMPTY, Context
from tests.raising import raises

#: The input of a record, in order: tokens (the distance to the token before, and a new context), or a change of owner.
#: Few values, so that many streams are alike; some are long.
TOKEN = st.tuples(
    st.integers(0, 2), st.sampled_from([1, 1, 1, 4]), st.sampled_from([None, None, None, EMPTY, b"x" * 32])
)
STREAMS = st.lists(TOKEN | st.sampled_from([b"one", b"other"]), max_size=6).flatmap(
    lambda stream: st.integers(0, 140).map(lambda more: [*stream, *[(more % 3, 1, None)] * (more if more > 60 else 0)])
)


def tell(stream, randomly: random.Random | None = None, begin: Context | None = None) -> Context:
    """The record of a stream, in pieces: of one token each, or of as many as may go together, cut at random."""
    record, at = begin or Context(), 0
    while at < len(stream):
        if isinstance(stream[at], bytes):
            record, at = record.keep_private(stream[at]), at + 1
            continue
        length = 1
        while at + length < len(stream) and stream[at + length][1:] == (1, None) if randomly else False:
            length += 1
        length = randomly.randint(1, length) if randomly else 1
        first, gap, made = stream[at]
        start = record.end + gap - 1
        ids = (first, *(token for token, _, _ in stream[at + 1 : at + length]))
        record, at = record.extend(ids, start, made or EMPTY, continues=made is None), at + length
    return record


def significant(stream):
    """The significant part of a stream: the first salt, and no distance before the first token."""
    kept, salted = [], False
    for each in stream:
        if isinstance(each, bytes):
            kept += [] if salted else [each]
            salted = True
        else:
            first = all(isinstance(other, bytes) for other in kept)
            kept.append((each[0], 0, each[2]) if first else each)
    return kept


def digest(record: Context) -> bytes:
    return record.digest(record.end + 7)


@given(STREAMS, st.randoms(use_true_random=False))
def test_record_does_not_depend_on_token_splits(stream, randomly):
    one, other = tell(stream), tell(stream, randomly)
    assert one == other
    assert digest(one) == digest(other)


@given(STREAMS, STREAMS)
def test_equal_digests_mean_equal_contexts(stream, other):
    assert (digest(tell(stream)) == digest(tell(other))) == (significant(stream) == significant(other))


@given(STREAMS, st.integers(0, 5))
def test_record_round_trips_through_bytes(stream, start):
    record = tell(stream)
    read = Context.from_bytes(record.to_bytes())
    assert read == record
    assert read.digest(start) == record.digest(start)
    longer = [r.extend((1, 2, 3), r.end, EMPTY, continues=True) for r in (read, record)]
    assert longer[0] == longer[1]


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127, 128, 1000, 100_000])
def test_a_record_has_a_constant_size(tokens):
    record = Context().extend(tuple(range(tokens)), 0, EMPTY, continues=True)
    assert (len(record.chain), len(record.pending)) == (32, tokens % 64 * 8)
    assert len(record.to_bytes()) <= 562
    assert (record.tokens, record.end) == (tokens, tokens)


def test_group_ends_where_the_token_source_changes():
    """So the waiting records are all of one kind, and few, for a prompt of many small modules too."""
    record = Context()
    for number in range(100):
        record = record.extend((1,) * 40, 40 * number, b"x" * 32, continues=False)
        assert len(record.pending) == 40 * 8


def test_hashed_bytes_are_fixed_by_the_version():
    """Digests name what is stored: those of one version never change."""
    whole = b"".join(n.to_bytes(4, "little") + (n > 0).to_bytes(4, "little") for n in range(64))
    chain = hashlib.sha256(b"inlay context 1 group " + bytes(32) + whole).digest()
    pending = (64).to_bytes(4, "little") + (1).to_bytes(4, "little")
    record = Context().extend(tuple(range(65)), 3, EMPTY, continues=True)
    assert record == Context(chain, pending, 65, 68, private=False)
    told = (65).to_bytes(8, "little") + (2).to_bytes(8, "little")
    assert record.digest(70) == hashlib.sha256(b"inlay context 1 digest" + chain + told + pending).digest()


def test_salt_is_neither_kept_nor_written():
    salt = b"a secret that is nobody else's"
    record = Context().extend((1, 2), 0, EMPTY, continues=True).keep_private(salt)
    for longer in (record, record.extend((3,), 2, EMPTY, continues=True)):
        assert salt not in longer.to_bytes()
        assert salt not in pickle.dumps(longer)
        assert longer.private


def test_a_record_is_never_changed():
    record = Context().extend((1,), 0, EMPTY, continues=True)
    with pytest.raises(FrozenInstanceError):
        record.tokens = 2
    assert record.keep_private(b"") is record
    assert record.extend((), 5, EMPTY, continues=False) is record


@given(STREAMS, st.integers(0, 9))
def test_record_under_an_adapter_names_the_adapter(stream, start):
    """Of the same tokens, records under different adapters and under none differ, from before the first token on."""
    adapters = (b"", bytes(32), bytes(range(32)))
    records = [tell(stream, begin=Context.under(adapter)) for adapter in adapters]
    assert len({record.digest(start) for record in records}) == 3
    assert [record.adapter for record in records] == list(adapters)
    for record in records:
        read = Context.from_bytes(record.to_bytes())
        assert read == record
        assert read.digest(start) == record.digest(start)
        assert len(record.to_bytes()) <= 594
    assert Context.under(b"") == Context()


@given(st.integers(16, 8 * 100))
def test_flipped_bit_in_an_adapter_record_is_rejected(bit):
    damaged = bytearray(Context.under(bytes(range(32))).extend(tuple(range(80)), 0, EMPTY, continues=True).to_bytes())
    damaged[bit // 8] ^= 1 << bit % 8
    with raises("cache.damaged_record"):
        Context.from_bytes(bytes(damaged))


WRITTEN = Context().extend(tuple(range(70)), 0, EMPTY, continues=True).to_bytes()


@given(st.integers(8, 8 * len(WRITTEN) - 1))
def test_flipped_bit_in_a_record_is_rejected(bit):
    damaged = bytearray(WRITTEN)
    damaged[bit // 8] ^= 1 << bit % 8
    with raises("cache.damaged_record"):
        Context.from_bytes(bytes(damaged))


@pytest.mark.parametrize(
    "written", [b"", WRITTEN[:-1], WRITTEN + b"0", WRITTEN[:30], WRITTEN[:57], WRITTEN + bytes(512)]
)
def test_a_record_of_another_length_is_refused(written):
    with pytest.raises(ValueError, match=f"a context record cannot have {len(written)} bytes"):
        Context.from_bytes(written)


def test_a_record_of_another_version_is_refused():
    with raises("cache.other_version", names="2"):
        Context.from_bytes(b"\x02" + WRITTEN[1:])


def test_a_shorter_record_of_a_right_length_is_refused():
    with raises("cache.damaged_record"):
        Context.from_bytes(WRITTEN[:-8])
