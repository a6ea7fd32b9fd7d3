"""Identity: keys and context digests depend on exactly the text that a segment could attend to."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.kv.identity import EMPTY, Context, KeyMaker, TokenRun, specify

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)
TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=12)


def chain(cuts: list[tuple[int, ...]], start: int = 0, keys: KeyMaker = KEYS):
    """Specs of consecutive segments, each made under all those before it."""
    specs, at = [], start
    for ids in cuts:
        specs.append(specify(ids, at, tuple(specs), keys))
        at += len(ids)
    return specs


@given(TOKENS, st.data())
def test_cutting_a_context_never_changes_its_digest(tokens, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)), max_size=4)))
    pieces = [tuple(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True) if a < b]
    (whole,) = chain([tuple(tokens)])
    last = chain(pieces)[-1]
    assert last.record.digest(len(tokens) + 3) == whole.record.digest(len(tokens) + 3)


@given(TOKENS, TOKENS, st.integers(0, 50))
def test_context_start_does_not_change_keys(tokens, more, start):
    here = chain([tuple(tokens), tuple(more)])
    there = chain([tuple(tokens), tuple(more)], start)
    assert [spec.key for spec in here] == [spec.key for spec in there]


@given(TOKENS, TOKENS)
def test_other_tokens_give_another_digest(tokens, others):
    one, other = (chain([tuple(t)])[0].record.digest(99) for t in (tokens, others))
    # the distance to position 99 differs with the length, so equal digests mean equal tokens
    assert (one == other) == (tokens == others)


def test_empty_context_has_the_empty_digest():
    assert Context().digest(0) == Context().digest(7) == EMPTY
    assert specify((1, 2), 5, (), KEYS).digest == EMPTY


def test_a_gap_is_part_of_the_context():
    (first,) = chain([(1, 2, 3)])
    assert first.record.digest(3) != first.record.digest(4)
    assert specify((9,), 3, (first,), KEYS).key != specify((9,), 4, (first,), KEYS).key


def test_a_gap_inside_the_context_is_seen():
    near = Context().extend((1, 2), 0, EMPTY, continues=True).extend((3,), 2, b"x", continues=True)
    far = Context().extend((1, 2), 0, EMPTY, continues=True).extend((3,), 5, b"x", continues=True)
    assert near.digest(near.end) != far.digest(far.end)


def test_segmentation_is_part_of_the_context():
    """Two modules encoded alone are another context than the same text encoded in one go."""
    together = chain([(1, 2), (3, 4)])[-1].record
    apart = Context().extend((1, 2), 0, EMPTY, continues=True).extend((3, 4), 2, EMPTY, continues=False)
    assert together.digest(4) != apart.digest(4)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": b"other"},
        {"kv_dtype": "bfloat16"},
        {"codec": "int8"},
        {"salt": b"tenant"},
    ],
)
def test_everything_that_changes_kv_changes_the_key(other):
    settings = {"fingerprint": b"model", "kv_dtype": "float32", "codec": "none", "salt": b"", "positioned": False}
    assert KeyMaker(**settings).key(b"", (1,), 0) != KeyMaker(**settings | other).key(b"", (1,), 0)


def test_start_is_in_the_key_only_for_learned_positions():
    assert KEYS.key(b"", (1,), 0) == KEYS.key(b"", (1,), 9)
    learned = KeyMaker(b"model", "float32", "none", b"", positioned=True)
    assert learned.key(b"", (1,), 0) != learned.key(b"", (1,), 9)


def test_key_fields_are_delimited():
    one = KeyMaker(b"ab", "c", "none", b"", positioned=False).key(b"", (1,), 0)
    other = KeyMaker(b"a", "bc", "none", b"", positioned=False).key(b"", (1,), 0)
    assert one != other


@given(TOKENS, st.integers(0, 12), st.booleans(), st.booleans())
def test_split_run_leaves_the_same_record(tokens, at, behind_something, continues):
    """The rest of a run begins where the run would have gone on, and ends in the record of the whole."""
    before = Context().extend((7, 8, 9), 0, EMPTY, continues=True) if behind_something else Context()
    run = TokenRun(tuple(tokens), 5, before, continues)
    rest = run.rest(min(at, len(tokens)))
    assert (run.ids[: len(tokens) - len(rest.ids)] + rest.ids, rest.start) == (run.ids, 5 + len(tokens) - len(rest.ids))
    end = 5 + len(tokens)
    assert rest.after(len(rest.ids)).digest(end) == run.after(len(tokens)).digest(end)


@given(TOKENS, st.integers(0, 50))
def test_a_spec_and_its_run_agree(tokens, start):
    head = specify((1, 2, 3), start, (), KEYS)
    spec = specify(tuple(tokens), start + 5, (head,), KEYS)
    run = TokenRun(spec.ids, spec.start, spec.before)
    assert run.digest == spec.digest
    assert run.after(len(tokens)) == spec.after(len(tokens)) == spec.record
    assert spec.key == KEYS.key(run.digest, run.ids, run.start)


def test_index_node_key_holds_everything_but_the_tokens():
    learned = KeyMaker(b"model", "float32", "none", b"", positioned=True)
    assert KEYS.place(b"", 0) == KEYS.place(b"", 9)
    assert learned.place(b"", 0) != learned.place(b"", 9)
    assert len({KEYS.place(b"", 0), KEYS.place(b"x", 0), learned.place(b"", 0), KEYS.key(b"", (), 0)}) == 4


def test_segment_keys_need_no_torch():
    code = "import sys, inlay.kv.identity; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_codec_is_part_of_key_and_record():
    """The codec that KV has passed through is in the digest, the key, and the record of all later text."""
    anchor = specify((1, 2, 3), 0, (), KEYS)
    spec = specify(tuple(range(4, 90)), 3, [anchor], KEYS)
    forms = [spec, spec.through("int8", KEYS), spec.through("fp8", KEYS)]
    assert len({form.key for form in forms}) == len({form.digest for form in forms}) == 3
    assert len({form.record.digest(form.end) for form in forms}) == 3
    for codec, form in zip(("none", "int8", "fp8"), forms, strict=True):
        assert (form.ids, form.start, form.parent, form.codec) == (spec.ids, spec.start, anchor, codec)
        assert form.lossless is spec
        assert form.rest(70).digest != spec.rest(70).digest or form is spec
        assert spec.through(codec, KEYS) is form, "it is made once"
    first = specify((1, 2), 0, (), KEYS)
    assert first.digest == b""
    assert first.through("int8", KEYS).digest != b""


@pytest.mark.parametrize("salt", [b"", b"somebody"])
def test_codec_and_adapter_are_both_in_the_key(salt):
    """Neither an adapter nor a codec hides the other: every pair of them is a segment, and a context, of its own."""
    adapters, codecs, ids = (b"", bytes(32), bytes(range(32))), ("none", "int8", "fp8"), tuple(range(4, 90))
    specs = [specify(ids, 3, [specify((1, 2, 3), 0, (), KEYS, salt, each)], KEYS, salt) for each in adapters]
    firsts = [specify((1, 2), 0, (), KEYS, salt, each) for each in adapters]
    for made in (specs, firsts):
        forms = {(n, codec): spec.through(codec, KEYS) for n, spec in enumerate(made) for codec in codecs}
        for of in (lambda form: form.key, lambda form: form.digest, lambda form: form.record.digest(form.end)):
            assert len(set(map(of, forms.values()))) == len(adapters) * len(codecs)
        for (number, codec), form in forms.items():
            assert (form.codec, form.lossless) == (codec, made[number])
            assert {form.before.adapter, form.record.adapter} == {adapters[number]}
            assert Context.from_bytes(form.before.to_bytes()) == form.before
            assert Context.from_bytes(form.record.to_bytes()) == form.record


def test_text_after_a_lossy_form_has_its_own_digest():
    spec = specify((1, 2, 3), 0, (), KEYS)
    lossy = spec.through("int8", KEYS)
    behind = [Context().extend(each.ids, 0, each.digest, not each.digest).digest(3) for each in (spec, lossy)]
    assert behind[0] != behind[1]
    assert lossy.record.digest(3) not in behind, "that is the place of what continues the form itself"
    assert Context.from_bytes(lossy.before.to_bytes()) == lossy.before
