"""Prompts of programs in the engine: their texts come from the cache, and their arguments are counted."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import pytest

from inlay import LLM, PMLError, SamplingParams
from inlay.pml.program import Length, program, system, user
from tests.conftest import tiny

TWO = SamplingParams(temperature=0, max_tokens=2)


@program
def advice(
    place: Literal["Miami", "Tokyo"], days: Annotated[str, Length(6)] = "a week", frugal: bool = False
) -> Iterator[str]:
    with system():
        yield "You plan trips. "
    with user():
        yield f"We have {days} of time. "
        if frugal:
            yield "We have little money. "
        yield f"Tell us about {place}. "


@program
def too_short(name: Annotated[str, Length(2)] = "Ada") -> Iterator[str]:
    yield name


def test_texts_are_cached_and_arguments_are_not() -> None:
    llm = LLM(tiny("llama"))
    llm.add_schema(advice.schema)
    plain, given = llm.generate([advice("Tokyo"), advice("Miami", "2 days", frugal=True)], TWO)
    closing = plain.usage.computed_tokens  # of the chat template
    assert given.usage.computed_tokens == closing + len("2 days")
    assert given.usage.cached_tokens == plain.usage.cached_tokens - len("a week") + len("We have little money. ")
    for output, arguments in ((plain, ("Tokyo",)), (given, ("Miami", "2 days", True))):
        assert output.prompt is not None
        assert all(message["content"] in output.prompt for message in advice.messages(*arguments))


def test_overlong_arguments_are_located_in_the_source() -> None:
    llm = LLM(tiny("llama"))
    llm.add_schema(advice.schema)
    with pytest.raises(PMLError) as error:
        llm.generate(advice("Tokyo", "seven days"), TWO)
    assert re.match(
        r"tests/model/pml/test_program_engine.py:\d+: the argument 'days' is 10 tokens long", str(error.value)
    )
    with pytest.raises(PMLError) as error:
        llm.add_schema(too_short.schema)
    assert re.match(
        r"tests/model/pml/test_program_engine.py:\d+:11: the default of 'name' is 3 tokens", str(error.value)
    )
