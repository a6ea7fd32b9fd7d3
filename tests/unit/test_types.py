import dataclasses
import math

import pytest

from inlay.errors import ParameterError
from inlay.sampling.params import SamplingParams
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage
from inlay.wording import show


def usage(**changes: int) -> Usage:
    counts = {
        "prompt_tokens": 10,
        "cached_tokens": 6,
        "computed_tokens": 4,
        "exact_tokens": 5,
        "module_tokens": 1,
        "shifted_tokens": 1,
    }
    return Usage(**(counts | changes))


def test_stop_tokens_are_few():
    assert len(SamplingParams(stop_token_ids=range(1024)).stop_ids) == 1024
    with pytest.raises(ParameterError) as caught:
        SamplingParams(stop_token_ids=[-1] * 2_000_000)
    assert str(caught.value) == "stop_token_ids has 2,000,000 tokens, and at most 1,024 may end an answer; give fewer."


def test_stop_strings_are_few():
    assert len(SamplingParams(stop=[str(number) for number in range(256)]).stops) == 256
    with pytest.raises(ParameterError) as caught:
        SamplingParams(stop=["x"] * 100_000)
    assert str(caught.value) == "stop has 100,000 texts, and at most 256 may end an answer; give fewer."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", 2**31),
        ("repetition_penalty", 1e-300),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("typical_p", 0),
        ("typical_p", 1.5),
        ("typical_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", True),
        ("presence_penalty", 2.5),
        ("presence_penalty", math.nan),
        ("presence_penalty", None),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", "1"),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [1]),
        ("n", 0),
        ("n", 129),
        ("n", 2.0),
        ("n", True),
        ("structured_outputs", {}),
        ("structured_outputs", {"xml": "a"}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", "a+"),
        ("structured_outputs", ["json"]),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", False),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", b"a"),
        ("stop", 7),
        ("stop", {"a"}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", None),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("include_stop_str_in_output", 1),
        ("ignore_eos", None),
        ("skip_special_tokens", "yes"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} is {value!r}; it must be ")
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": math.nan}, "temperature is nan; it must be a number from 0 to 100."),
        ({"top_p": 0.0}, "top_p is 0.0; it must be a number above 0 and at most 1."),
        ({"seed": 2**64}, f"seed is {2**64}; it must be None or a whole number from 0 to 2**64 - 1."),
        ({"stop": [""]}, "stop is ['']; it must be None, a string or a list of strings, none of them empty."),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be a whole number from 0 to max_tokens=4."),
        ({"n": 2, "temperature": 0}, "n is 2; it must be 1 where temperature is 0, since all answers would be equal."),
        (
            {"logit_bias": {1: 101}},
            "logit_bias is {1: 101}; it must be None or a dict of token ids to numbers from -100 to 100.",
        ),
        ({"presence_penalty": 3}, "presence_penalty is 3; it must be a number from -2 to 2."),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number from 0.01 to 100."),
        (
            {"structured_outputs": {"xml": 1}},
            "structured_outputs is {'xml': 1}; it must be None or a dict with exactly one of "
            "json, json_object, regex, choice, grammar, structural_tag.",
        ),
        (
            {"structured_outputs": {"json": 3}},
            "structured_outputs['json'] is 3; it must be a JSON Schema, as a dict or as text.",
        ),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs['json_object'] is False; it must be True.",
        ),
        (
            {"structured_outputs": {"regex": ""}},
            "structured_outputs['regex'] is ''; it must be a pattern, and not an empty one.",
        ),
        (
            {"structured_outputs": {"choice": ["a", ""]}},
            "structured_outputs['choice'] is ['a', '']; "
            "it must be a list of strings, at least one and none of them empty.",
        ),
        ({"min_tokens": -5, "max_tokens": None}, "min_tokens is -5; it must be a whole number from 0 up."),
    ],
)
def test_the_sentence_names_the_allowed_range(changes, sentence):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**changes)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop": []},
        {"stop_token_ids": range(3)},
        {"max_tokens": None, "min_tokens": 10**6},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"logprobs": 20},
        {"typical_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100}},
        {"logit_bias": {}},
        {"n": 128},
        {"structured_outputs": {"json": {}}},
        {"structured_outputs": {"choice": ("a",)}},
    ],
)
def test_the_ends_of_every_range_are_allowed(changes):
    SamplingParams(**changes)


def test_unknown_and_positional_parameters_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(temprature=0.5)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


@pytest.mark.parametrize(
    ("given", "stops"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
)
def test_stop_strings_are_read_as_a_tuple(given, stops):
    assert SamplingParams(stop=given).stops == stops


def test_stop_tokens_are_read_as_a_tuple():
    assert SamplingParams(stop_token_ids=[3, 1]).stop_ids == (3, 1)
    assert SamplingParams().stop_ids == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_of_nearly_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_sampling_params_are_frozen_and_replaceable():
    params = SamplingParams(top_k=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 4
    assert dataclasses.replace(params, top_k=4) == SamplingParams(top_k=4)
    with pytest.raises(ParameterError):
        dataclasses.replace(params, top_k=-4)


def test_parameters_with_dicts_are_compared_and_hashed():
    one = SamplingParams(logit_bias={1: 2.0}, structured_outputs={"json": {"type": "object"}})
    same = SamplingParams(logit_bias={1: 2.0}, structured_outputs={"json": {"type": "object"}})
    assert one == same
    assert hash(one) == hash(same)
    assert one != SamplingParams(logit_bias={1: 3.0})


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": 11},
        {"exact_tokens": 4},
        {"shifted_tokens": 7},
        {"shifted_tokens": -1},
        {"exact_tokens": 7, "module_tokens": -1},
        {"prompt_tokens": 5, "computed_tokens": -1},
    ],
)
def test_usage_adds_up(changes):
    usage()
    with pytest.raises(AssertionError):
        usage(**changes)


def test_a_request_reports_its_cached_tokens():
    answer = CompletionOutput(0, "b", (2,))
    output = RequestOutput("r", None, (1,) * 10, tuple(range(10)), [answer], True, usage(), RequestMetrics())
    assert output.num_cached_tokens == 6
    assert (answer.logprobs, answer.finish_reason, answer.stop_reason) == (None, None, None)
    with pytest.raises(AssertionError):
        dataclasses.replace(output, prompt_positions=(0,))


def test_long_values_are_truncated():
    class Odd:
        def __repr__(self) -> str:
            return "x" * 1_000 + "\n"

    assert show("a") == "'a'"
    assert show({"b": [1, 2.5, None], "a": True}) == "{'b': [1, 2.5, None], 'a': True}"
    assert show(10**5_000) == "a huge number"
    for large in ("x" * 9_999_999, b"x" * 9_999_999, [1] * 1_000_000, {str(i): i for i in range(100_000)}, Odd()):
        assert len(show(large)) == 101
        assert show(large).endswith("…")
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert len(show(deep)) < 100
