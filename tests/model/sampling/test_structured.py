"""Answers in a given language: every answer is in it under all other parameters."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay import LLM, InlayError, ParameterError, SamplingParams
from inlay.output import TextStream
from inlay.sampling import structured
from inlay.sampling.grammar_forms import too_large
from inlay.sampling.row import Row
from inlay.sampling.structured import Grammars, Guide, allowed_bits
from tests.conftest import tiny
from tests.raising import PanicException, raises
from tests.tokenizers_for_tests import family

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind", "quick"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4}
CHOICES = ["yes", "no", "not at all", 'h\u00e9 \U0001f600\n"q\\']
PATTERN = r"[0-9]{3}-[a-f]{1,5}(x|\u00e9)"
LONG = SamplingParams(max_tokens=300, seed=1)


@cache
def model(name: str) -> LLM:
    return LLM(tiny("llama") if name == "tiny" else name, kv_memory="64MiB", seed=0)


def fits(text: str, structure: dict) -> bool:
    """Whether the text is in the language, judged by jsonschema and re."""
    ((kind, value),) = structure.items()
    if kind == "json":
        jsonschema.validate(json.loads(text), value)
        return True
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    return text in value if kind == "choice" else re.fullmatch(value, text) is not None


STRUCTURES = [{"json": PERSON}, {"json": NUMBERS}, {"regex": PATTERN}, {"choice": CHOICES}]


@pytest.mark.parametrize("name", ["demo", "random:tiny"])
def test_every_answer_is_in_its_language(name):
    params = [replace(LONG, n=2, structured_outputs=structure, temperature=0.9) for structure in STRUCTURES]
    outputs = model(name).generate(["Tell me.", "And then?", "Hm", "Yes or no?"], params)
    for output, structure in zip(outputs, STRUCTURES, strict=True):
        for one in output.outputs:
            assert one.finish_reason == "stop"
            assert fits(one.text, structure), one.text
    assert len({one.text for one in outputs[0].outputs}) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.5, "min_p": 0.01},
        {"typical_p": 0.5},
        {"frequency_penalty": 2.0, "repetition_penalty": 2.0},
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"logprobs": 2},
        {"skip_special_tokens": False},
    ],
    ids=str,
)
def test_other_parameters_keep_answers_in_the_language(changes):
    structures = [{"json": NUMBERS}, {"regex": PATTERN}]
    params = [replace(LONG, structured_outputs=structure, **changes) for structure in structures]
    for output, structure in zip(model("tiny").generate(["Go on."] * 2, params), structures, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert fits(output.outputs[0].text, structure)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_streamed_answers_only_grow_and_end_in_the_language(structure):
    params = replace(LONG, n=2, structured_outputs=structure)
    steps = list(model("tiny").stream("Tell me.", params))
    for index in range(2):
        texts = [step.outputs[index].text for step in steps]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert fits(texts[-1], structure)


def test_stop_string_truncates_a_structured_answer_and_is_reported():
    """As in vLLM: the answer is cut, and its stop_reason is the stop string."""
    params = replace(LONG, n=8, structured_outputs={"json": PERSON})
    whole = model("tiny").generate("Tell me.", params)[0].outputs
    cut = model("tiny").generate("Tell me.", replace(params, stop=["quick", '"tall"']))[0].outputs
    reasons = set()
    for one, other in zip(cut, whole, strict=True):
        reasons.add(one.stop_reason)
        if one.stop_reason is None:
            assert one.text == other.text
            assert fits(one.text, {"json": PERSON})
        else:
            assert other.text.startswith(one.text + one.stop_reason)
    assert reasons >= {None, "quick"} or reasons >= {None, '"tall"'}


def test_answer_ends_when_the_grammar_is_complete():
    """No forward pass is spent on the end-of-sequence token, and min_tokens does not delay a complete answer."""
    params = replace(LONG, structured_outputs={"choice": ["ab"]}, min_tokens=10)
    one = model("tiny").generate("x", params)[0].outputs[0]
    assert (one.text, len(one.token_ids), one.finish_reason, one.stop_reason) == ("ab", 2, "stop", None)


def test_min_tokens_and_ignore_eos_extend_an_answer_within_the_grammar():
    at_least = replace(
        LONG, structured_outputs={"regex": "a+"}, min_tokens=20, logit_bias={261: 100}
    )  # end-of-sequence
    one = model("tiny").generate("x", at_least)[0].outputs[0]
    assert (one.text, one.finish_reason) == ("a" * 20, "stop")
    on = replace(LONG, structured_outputs={"regex": "a+"}, max_tokens=30, ignore_eos=True)
    one = model("tiny").generate("x", on)[0].outputs[0]
    assert (one.text, one.finish_reason) == ("a" * 30, "length")


def test_row_without_a_grammar_is_unchanged_in_a_batch():
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    free = SamplingParams(seed=3, max_tokens=12, temperature=0.7, top_p=0.9, ignore_eos=True)
    (alone,) = llm.generate("Hello", free)
    guided = [replace(LONG, structured_outputs=structure) for structure in STRUCTURES]
    together = llm.generate(["Tell me."] * 4 + ["Hello"], [*guided, free])
    assert together[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_json_objects():
    small = {"json_object": True}
    (brace,) = model("tiny").tokenizer.encode("}", add_special_tokens=False)
    params = replace(LONG, n=2, structured_outputs=small, logit_bias={brace: 60})
    for one in model("tiny").generate("x", params)[0].outputs:
        assert fits(one.text, small)


def test_schema_may_be_text_and_set_whitespace():
    compact = NUMBERS | {"x-guidance": {"whitespace_flexible": False}}
    for structure in ({"json": json.dumps(compact)}, {"json": compact}):
        text = model("tiny").generate("x", replace(LONG, structured_outputs=structure))[0].outputs[0].text
        assert fits(text, {"json": NUMBERS})
        assert not re.search(r"\s", text)


@pytest.mark.parametrize("name", ["bare", "llama3", "llama2", "gemma"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_walk_through_the_masks_is_in_the_language(name, seed):
    """Byte-level BPE and byte fallback; the text is decoded as the answer's stream decodes it."""
    tokenizer, grammars = _grammars(name)
    prompt = tokenizer.encode("Well? ")
    walk = random.Random(seed)
    for structure in STRUCTURES:
        guide = grammars.guide(structure)
        stream = TextStream(tokenizer, prompt, SamplingParams())
        for _ in range(400):
            if guide.complete:
                break
            (mask,) = allowed_tokens([guide], len(tokenizer) + 3)
            token = int(walk.choice(np.flatnonzero(mask)))
            guide.take(token)
            stream.push(token)
        stream.finish()
        assert guide.complete
        assert fits(stream.text, structure), stream.text


def allowed_tokens(guides: Sequence[Guide], vocabulary: int) -> np.ndarray:
    """Which tokens may come next, (guides, vocabulary)."""
    bits = allowed_bits(guides, vocabulary).view(np.uint8)
    return np.unpackbits(bits, axis=1, count=vocabulary, bitorder="little").view(np.bool_)


@cache
def _grammars(name: str):
    tokenizer = family(name)
    return tokenizer, Grammars(tokenizer, len(tokenizer) + 3, [tokenizer.eos_token_id])


def test_mask_allows_exactly_the_tokens_that_continue_a_choice():
    llm = model("demo")
    tokenizer, vocabulary = llm.tokenizer, llm.vocab_size
    choices = ["the capital", "the price is high", "then", "a"]
    said = ""
    guide = Grammars(tokenizer, vocabulary, [1]).guide({"choice": choices})
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    for _ in range(3):
        (mask,) = allowed_tokens([guide], vocabulary)
        expected = {
            token
            for token, text in enumerate(texts)
            if text and token not in tokenizer.all_special_ids and any(one.startswith(said + text) for one in choices)
        }
        assert set(np.flatnonzero(mask)) == expected
        token = max(expected, key=lambda one: ((said + texts[one]) in "the price is high", len(texts[one])))
        guide.take(token)
        said += texts[token]


def test_batched_masks_equal_single_masks():
    tokenizer, grammars = _grammars("llama3")
    vocabulary = len(tokenizer) + 3
    guides = [grammars.guide(structure) for structure in STRUCTURES]
    together = allowed_tokens(guides, vocabulary)
    for guide, mask in zip(guides, together, strict=True):
        assert (mask == allowed_tokens([guide], vocabulary)[0]).all()


def test_log_probabilities_ignore_the_grammar():
    llm = model("tiny")
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["z"]}, logprobs=0)
    one = llm.generate("x", params)[0].outputs[0]
    (expected,) = llm.distributions(["x"], [[ord("z")]])
    assert one.logprobs is not None
    token = llm.tokenizer.encode("z", add_special_tokens=False)[0]
    assert one.token_ids == (token,)
    assert one.logprobs[0][token].logprob == pytest.approx(float(expected[0, token]), abs=1e-3)
    assert one.logprobs[0][token].rank > 1


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        ({"json": {"type": "objectx"}}, "structured_outputs['json'] cannot be used: Invalid type: objectx."),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "structured_outputs['json'] cannot be used: Unsatisfiable schema: minimum (5) is greater than maximum (3).",
        ),
        ({"json": False}, "structured_outputs['json'] cannot be used: Unsatisfiable schema: schema is false."),
        (
            {"json": {"type": "array", "uniqueItems": True}},
            "structured_outputs['json'] cannot be used: a grammar cannot hold an answer to uniqueItems; leave it out, "
            "and check the list that comes.",
        ),
        (
            {"json": '{"type":'},
            "structured_outputs['json'] is no JSON: Expecting value: line 1 column 9 (char 8).",
        ),
        (
            {"json": {"enum": [{1, 2}]}},
            "structured_outputs['json'] is no JSON: Object of type set is not JSON serializable.",
        ),
        ({"regex": "(a"}, "structured_outputs['regex'] cannot be used: unclosed group."),
        (
            {"regex": "(?=a)b"},
            "structured_outputs['regex'] cannot be used: "
            "look-around, including look-ahead and look-behind, is not supported.",
        ),
        ({"regex": r"a[^\s\S]"}, "structured_outputs['regex'] cannot be used: no text satisfies it."),
    ],
    ids=str,
)
def test_unsatisfiable_structures_are_rejected_before_anything_runs(structure, sentence):
    llm = model("tiny")
    with pytest.raises(ParameterError) as caught:
        llm.generate(["fine", "x"], [SamplingParams(), SamplingParams(structured_outputs=structure)])
    assert str(caught.value) == sentence
    assert not llm.stats().busy


def test_token_outside_the_grammar_raises_an_error():
    guide = _grammars("llama3")[1].guide({"choice": ["a"]})
    with pytest.raises(InlayError, match=r"structured_outputs: .*doesn't satisfy the grammar"):
        guide.take(0)


SMALL = structured.ALLOWANCES[0].size


def _new_grammars(**bounds: float) -> Grammars:
    tokenizer = family("llama3")
    return Grammars(tokenizer, len(tokenizer) + 3, [tokenizer.eos_token_id], **bounds)


def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the grammars that are compiled from now on."""
    texts: list[str] = []
    grammar_from = llguidance.grammar_from
    monkeypatch.setattr(
        llguidance, "grammar_from", lambda kind, text: (texts.append(text), grammar_from(kind, text))[1]
    )
    return texts


def test_compiled_grammars_are_not_shared_between_tenants(monkeypatch):
    grammars = _new_grammars()
    texts = _compiled(monkeypatch)
    for salt in ("a", "a", "b", "", "b", ""):
        grammars.guide({"regex": "[a-c]+"}, salt)
    assert texts == ["[a-c]+"] * 3


def test_grammars_of_one_tenant_do_not_evict_anothers(monkeypatch):
    grammars = _new_grammars(most_bytes=3 * SMALL, each_bytes=2 * SMALL)
    texts = _compiled(monkeypatch)
    for salt, pattern in (("a", "own"), *(("b", f"x{n}") for n in range(5)), ("c", "new"), ("a", "own"), ("b", "x4")):
        grammars.guide({"regex": pattern}, salt)
    assert texts == ["own", "x0", "x1", "x2", "x3", "x4", "new"]
    grammars.guide({"regex": "x3"}, "b")
    assert texts[-1] == "x3", "it was the one that had the most"


def test_unused_grammars_are_evicted(monkeypatch, clock):
    grammars = _new_grammars(unused_s=100)
    texts = _compiled(monkeypatch)
    for seconds, pattern, salt in (
        (0, "old", "a"),
        (0, "used", "a"),
        (0, "old", "b"),
        (90, "used", "a"),
        (20, "new", "b"),
    ):
        clock.advance(seconds)
        grammars.guide({"regex": pattern}, salt)
    assert texts == ["old", "used", "old", "new"]
    for pattern, salt in (("used", "a"), ("old", "a"), ("old", "b")):  # with any pattern compiled before
        grammars.guide({"regex": pattern}, salt)
    assert texts[4:] == ["old", "old"]


def test_large_grammars_count_for_several(monkeypatch):
    grammars = _new_grammars(each_bytes=4 * SMALL)
    texts = _compiled(monkeypatch)
    large, other = "|".join(f"a{n}" for n in range(2_000)), "|".join(f"c{n}" for n in range(2_000))
    for pattern in (large, "b", large, "b", other, "b", other, large):
        grammars.guide({"regex": pattern})
    assert texts == [large, "b", large, "b", other, "b", other, large]


HEAVY = [
    pytest.param({"regex": "(a{999}){1001}"}, id="regex"),
    pytest.param({"regex": "((a{30}){30}){1000}"}, id="nested"),
    pytest.param({"json": {"type": "string", "pattern": "^(a{999}){1001}$"}}, id="pattern of a schema"),
    pytest.param({"grammar": "start: A{1000}\nA: /(a{1000}){1000}/"}, id="lark"),
    pytest.param({"regex": r"\p{L}?" * 5_000}, id="optional classes"),
    pytest.param({"json": {"type": "string", "pattern": r"\w?" * 5_000}}, id="optional classes of a schema"),
    pytest.param(
        {"json": {"type": "object", "properties": {f"p{n}": {"multipleOf": 9_973 - n} for n in range(100)}}},
        id="multiples",
    ),
    pytest.param(
        {
            "grammar": "start: "
            + " ".join(f"r{n}" for n in range(3_000))
            + "\n"
            + "\n".join(f'r{n}: "a{n}"{{1,{n + 1}}}' for n in range(3_000))
        },
        id="rules",
    ),
    pytest.param({"grammar": "start: " + " ".join(['"a"?'] * 5_000)}, id="optional rules"),
]


@pytest.mark.parametrize("structure", HEAVY)
def test_too_expensive_structures_are_rejected_and_not_kept(structure):
    grammars = _new_grammars()
    with pytest.raises(ParameterError, match=r"^structured_outputs\['\w+'\] cannot be used: [^\n]{20,200}\.$"):
        grammars.guide(structure)
    assert grammars.kept_bytes == 0


def test_kept_grammars_are_bounded_in_bytes():
    grammars = _new_grammars(most_bytes=64 * SMALL, each_bytes=16 * SMALL)
    for number in range(12):
        grammars.guide({"regex": f"[a-z]{{{number}}}" + r"(\p{L}\p{N}){500}"}, f"tenant {number % 6}")
        assert grammars.kept_bytes <= 64 * SMALL
    assert grammars.kept_bytes >= 48 * SMALL


def test_pattern_that_grows_within_an_answer_ends_it():
    grammars = _new_grammars()
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a{999}){1001}$"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    guide = grammars.guide({"json": schema})
    assert grammars.kept_bytes == SMALL
    tokens = family("llama3").encode('{"a":"' + "a" * 64, add_special_tokens=False)

    def answer() -> None:
        for token in tokens:
            allowed_bits([guide], len(family("llama3")) + 3)
            guide.take(token)

    with raises("structured.failed_grammar", ParameterError):
        answer()
    assert grammars.kept_bytes == 0


def test_failed_grammar_is_not_kept():
    grammars = _new_grammars()
    guide = grammars.guide({"regex": "ab"})
    assert grammars.kept_bytes == SMALL
    with pytest.raises(ParameterError):
        guide.copy().take(0)
    assert grammars.kept_bytes == 0


def test_grammars_are_cached_per_salt(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    texts = _compiled(monkeypatch)
    params = SamplingParams(max_tokens=2, n=2, structured_outputs={"regex": "[a-c]+"})
    for salt in ("a", "a", "b", None):
        llm.generate("x", params, cache_salt=salt)
    assert len(texts) == 3


def _panics(*_: object, **__: object) -> None:
    raise PanicException("called `Option::unwrap()` on a `None` value at /home/who/src/lib.rs:1")


def test_compiler_panic_is_reported_for_its_grammar(monkeypatch):
    import llguidance

    llm = model("tiny")
    monkeypatch.setattr(llguidance, "LLMatcher", _panics)
    with pytest.raises(ParameterError) as caught:
        llm.generate("x", SamplingParams(structured_outputs={"regex": "panic"}))
    assert str(caught.value) == (
        "structured_outputs['regex'] cannot be used: the grammar compiler failed; give a simpler grammar or schema."
    )
    llm.generate("x", SamplingParams(max_tokens=1))


def test_panic_in_an_answer_ends_only_that_answer():
    class Matcher:
        consume_token = staticmethod(_panics)

    with raises("structured.compiler_failed"):
        Guide(Matcher()).take(0)  # type: ignore[arg-type]


#: Its lexer soon reaches the limit of its work, if the next tokens are not computed between two tokens.
HEAVY = {"regex": r"[\s\S]*[\s\S]{901}a"}
TEXT = "The quick brown fox. The component is part of it, and there are 940 lines of code. " * 8


def exhausted(guide: Guide, ids: list[int]) -> llguidance.LLMatcher:
    """A matcher that shares the lexer of a guide, and has exceeded its limit."""
    matcher = guide.matcher.deep_copy()
    assert not all(matcher.consume_token(token) for token in ids)
    return matcher


def test_answer_goes_on_with_a_new_grammar_once_the_shared_lexer_has_failed():
    llm = LLM("demo", kv_memory="16MiB", store="off", profile="off")
    tokenizer, vocabulary = llm.loaded.tokenizer, llm.loaded.spec.vocab_size
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    guide = Grammars(tokenizer, vocabulary, [0]).guide(HEAVY)
    for token in ids[:3]:
        guide.take(token)
    expected = allowed_bits([guide], vocabulary)
    failed = exhausted(guide, ids)
    assert (allowed_bits([guide], vocabulary) == expected).all()
    assert guide.failure is None
    with raises("structured.failed_grammar"):  # drafts would do it again
        guide.branch()
    guide.take(ids[3])

    lost = Guide(failed)
    assert not allowed_bits([lost], vocabulary).any()  # the library allows end-of-sequence
    assert not lost.complete
    assert isinstance(lost.failure, ParameterError)
    assert "takes too much work" in str(lost.failure)


def test_long_drafts_stay_within_the_limit_of_a_lexer():
    llm = LLM("demo", kv_memory="16MiB", store="off", profile="off")
    ids = llm.loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    grammars = Grammars(llm.loaded.tokenizer, llm.loaded.spec.vocab_size, [0])
    exhausted(grammars.guide(HEAVY, "another"), ids)
    row = Row(SamplingParams(), 0, guide=grammars.guide(HEAVY))
    assert len(row.ahead(ids)) == len(ids)


def test_slow_grammar_has_no_drafts_for_a_while(monkeypatch):
    llm = LLM("demo", kv_memory="16MiB", store="off", profile="off")
    ids = llm.loaded.tokenizer.encode(TEXT, add_special_tokens=False)
    row = Row(SamplingParams(), 0, guide=Grammars(llm.loaded.tokenizer, llm.loaded.spec.vocab_size, [0]).guide(HEAVY))
    assert row.ahead(ids[:2])
    real = Guide.follows

    def slow(self: Guide, token: int) -> bool:
        began = time.thread_time()
        while time.thread_time() - began < 0.01:
            pass
        return real(self, token)

    monkeypatch.setattr(Guide, "follows", slow)
    assert not row.ahead(ids[:2])
    monkeypatch.setattr(Guide, "follows", real)
    for number in range(32):
        assert not row.ahead(ids[number : number + 2])
        row.take(ids[number])
    assert row.ahead(ids[32:34])


class BrokenMatcher:
    """A matcher that the library panics at while it makes a mask."""

    def __init__(self, matcher) -> None:
        self._matcher = matcher

    def deep_copy(self) -> BrokenMatcher:
        return BrokenMatcher(self._matcher.deep_copy())

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("beside", [0, 2])
def test_panic_while_making_masks_ends_only_its_answer(monkeypatch, beside):
    """beside: how many other answers of its pass have grammars."""
    import llguidance.numpy as masks

    llm, guide_of = model("tiny"), Grammars.guide
    fill, fill_all = masks.fill_next_token_bitmask, masks.fill_next_token_bitmask_par

    def guide(self, structure, salt=""):
        made = guide_of(self, structure, salt)
        return Guide(BrokenMatcher(made.matcher)) if structure == {"regex": "[cd]{8}"} else made  # type: ignore[arg-type]

    def fill_one(matcher, bits):
        return _panics() if isinstance(matcher, BrokenMatcher) else fill(matcher, bits)

    def fill_many(executor, places, bits):
        broken = any(isinstance(matcher, BrokenMatcher) for matcher, _ in places)
        return _panics() if broken else fill_all(executor, places, bits)

    monkeypatch.setattr(Grammars, "guide", guide)
    monkeypatch.setattr(masks, "fill_next_token_bitmask", fill_one)
    monkeypatch.setattr(masks, "fill_next_token_bitmask_par", fill_many)
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    others = [plain] + [replace(plain, structured_outputs={"regex": "[ab]{8}"}, ignore_eos=False)] * beside
    expected = [output.outputs[0].text for output in llm.generate(["x"] * len(others), others)]
    with raises("structured.compiler_failed") as caught:
        llm.generate(["x"] * (len(others) + 1), [replace(plain, structured_outputs={"regex": "[cd]{8}"}), *others])
    first, *rest = caught.value.outputs  # type: ignore[attr-defined]
    assert first is None
    assert [output.outputs[0].text for output in rest] == expected


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        ({"regex": "a" * 200_000}, "it takes 200,000 characters, more than the 131,072 that a grammar may have."),
        ({"json": " " * 200_000}, "it takes 200,000 characters, more than the 131,072 that a grammar may have."),
        ({"json": "[" * 100_000}, "it nests too deeply; nest it less deeply."),
        (
            {"json": {"properties": {str(i): {} for i in range(5_000)}}},
            "it has more than 4,096 keys; ask for less at once.",
        ),
        (
            {"json": {"anyOf": [{"patternProperties": {f"{i}{j}": {} for j in range(70)}} for i in range(2)]}},
            "it has more than 128 patternProperties; ask for less at once.",
        ),
        (
            {"json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(13)]}},
            "it has more than 12 patterns beside allOf or $ref; ask for fewer at once.",
        ),
        *(
            ({"json": schema}, "what multipleOf asks for has more than 10,000 remainders; write a smaller one.")
            for schema in (
                {"type": "number", "multipleOf": 9_999_991},
                {"type": "number", "multipleOf": 10**400},
                {"type": "number", "multipleOf": 3.1415926},
                {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103)]},
            )
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_structures_slow_to_compile_are_rejected(structure, sentence):
    with pytest.raises(ParameterError) as caught:
        model("tiny").generate("x", SamplingParams(structured_outputs=structure))
    assert str(caught.value) == f"structured_outputs['{next(iter(structure))}'] cannot be used: {sentence}"


def test_choice_of_thousands_of_texts_is_accepted():
    choices = [f"{word} {i}" for word in ("red", "blue") for i in range(1_500)]
    params = SamplingParams(max_tokens=64, temperature=0, structured_outputs={"choice": choices})
    assert model("tiny").generate("x", params)[0].outputs[0].text in choices


def test_many_separate_multiples_are_accepted():
    prices = {"type": "object", "properties": {str(i): {"type": "number", "multipleOf": 0.01} for i in range(50)}}
    steps = {"type": "object", "properties": {str(i): {"type": "integer", "multipleOf": 500} for i in range(50)}}
    for schema in (prices, {**prices, "allOf": [{}]}, steps):
        assert too_large(schema) is None
