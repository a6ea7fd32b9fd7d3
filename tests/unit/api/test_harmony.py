"""Answers in OpenAI's harmony format are separated into reasoning, content and calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.pieces import CalledTool, WholeAnswer
from inlay.api.reasoning import HarmonyParser, Thought, forced
from inlay.sampling.grammar_forms import read_tags

ANALYSIS = "<|channel|>analysis<|message|>The user asks for the weather.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|>"
FINAL = "<|channel|>final<|message|>Sunny.<|return|>"
THOUGHT = Thought("The user asks for the weather.")
WEATHER = CalledTool(0, "weather", '{"city": "Rome"}')
NEXT = "<|start|>assistant"

CASES: dict[str, tuple[str, list[Thought | str | CalledTool]]] = {
    "an answer": (f"{ANALYSIS}{NEXT}{FINAL}", [THOUGHT, "Sunny."]),
    "a call": (f"{ANALYSIS}{NEXT}{CALL}", [THOUGHT, WEATHER]),
    "a preamble and a call": (f"{ANALYSIS}{NEXT}{PREAMBLE}{NEXT}{CALL}", [THOUGHT, "I look it up.", WEATHER]),
    "the recipient first": (
        f'{ANALYSIS}{NEXT} to=functions.weather<|channel|>commentary json<|message|>{{"city": "Rome"}}<|call|>',
        [THOUGHT, WEATHER],
    ),
    "the channel first in the opened turn": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        [WEATHER],
    ),
    "two thoughts": (
        f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}{FINAL}",
        [Thought(f"{THOUGHT.text}\n{THOUGHT.text}"), "Sunny."],
    ),
    "two calls": (f"{CALL}{NEXT}{CALL}", [WEATHER, CalledTool(1, "weather", WEATHER.arguments)]),
    "no thought": (FINAL, ["Sunny."]),
    "without an end": (FINAL.removesuffix("<|return|>"), ["Sunny."]),
    "cut in a thought": ("<|channel|>analysis<|message|>The us", [Thought("The us")]),
    "cut in the arguments": (CALL[: CALL.index("Rome") + 2], [CalledTool(0, "weather", '{"city": "Ro')]),
    "cut in a header": (f"{ANALYSIS}{NEXT}<|channel|>fin", [THOUGHT]),
    "malformed arguments": (CALL.replace('"Rome"}', "Rome"), [CalledTool(0, "weather", '{"city": Rome')]),
    "an unknown function": (
        CALL.replace("weather", "rain"),
        ['<|channel|>commentary to=functions.rain <|constrain|>json<|message|>{"city": "Rome"}'],
    ),
    "no harmony": ("assistants are good. So it is.", ["assistants are good. So it is."]),
    "JSON": ('{"a": 1}', ['{"a": 1}']),
    "a mark in a text": ("Hello<|message|>you", ["Hello<|message|>you"]),
    "half a mark": ("<|channel", ["<|channel"]),
    "nothing": ("", []),
}


def parts(pieces: list[str], *, parallel: bool = True) -> list[Thought | str | CalledTool]:
    parser = HarmonyParser({"weather": {}, "time": {}}, parallel=parallel)
    return WholeAnswer.of([*(new for piece in pieces for new in parser.feed(piece)), *parser.finish()]).parts


@pytest.mark.parametrize(("answer", "expected"), CASES.values(), ids=CASES.keys())
def test_answer_in_channels_is_separated(answer: str, expected: list[Thought | str | CalledTool]) -> None:
    assert parts([answer]) == expected
    assert parts(list(answer)) == expected


@given(st.sampled_from([answer for answer, _ in CASES.values()]), st.lists(st.integers(0, 300), max_size=6))
def test_splitting_the_answer_does_not_change_the_result(answer: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    assert parts([answer[first:last] for first, last in pairwise(edges)]) == parts([answer])


def test_single_call_ends_the_answer() -> None:
    assert parts([f"{CALL}{NEXT}{CALL}"], parallel=False) == [WEATHER]


def test_arguments_are_streamed() -> None:
    parser = HarmonyParser({"weather": {}}, parallel=True)
    parser.feed(CALL[: CALL.index("{")])
    told = "".join(piece.arguments for piece in parser.feed('{"city": "Ro') if not isinstance(piece, Thought))
    assert told == '{"city": "Ro'


def test_a_forced_call_has_the_header_of_its_function() -> None:
    tags = read_tags(forced({"weather": {"type": "object"}}, {"type": "object"}))
    assert tags.forced
    assert [one["begin"] for one in tags.structures] == [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>final<|message|>",
    ]
