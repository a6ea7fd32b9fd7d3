"""langchain-openai."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from scenario import AGAIN, ASKED, BASE, MODEL, run

SERVER: dict[str, Any] = {"model": MODEL, "base_url": BASE, "api_key": "none", "max_retries": 0}
model = ChatOpenAI(**SERVER, max_tokens=400)


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather."""
    return f"Sunny in {city}."


class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]


def chat() -> None:
    messages: list[Any] = [HumanMessage(ASKED)]
    messages += [model.invoke(messages, max_tokens=20), HumanMessage(AGAIN)]
    assert model.invoke(messages, max_tokens=20).usage_metadata


def stream() -> None:
    messages: list[Any] = [HumanMessage(ASKED)]
    for again in (AGAIN, ASKED):
        whole = reduce(add, model.stream(messages, max_tokens=20, stream_usage=True))
        assert whole.usage_metadata
        messages += [whole, HumanMessage(again)]


def tools() -> None:
    messages: list[Any] = [HumanMessage(ASKED)]
    for choice in ("any", "weather"):
        answer = model.bind_tools([weather], tool_choice=choice).invoke(messages)
        assert answer.tool_calls
        messages += [answer, *(weather.invoke(call) for call in answer.tool_calls)]
    assert model.bind_tools([weather]).invoke(messages, max_tokens=20)


def streamed_tools() -> None:
    messages: list[Any] = [HumanMessage(ASKED)]
    answer: Any = reduce(add, model.bind_tools([weather], tool_choice="required").stream(messages))
    assert answer.tool_calls
    messages += [answer, *(weather.invoke(call) for call in answer.tool_calls)]
    assert list(model.bind_tools([weather]).stream(messages, max_tokens=20))


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Answer, method=method).invoke(ASKED), Answer)


def tools_and_structured() -> None:
    both = model.bind_tools([weather], response_format=Answer, strict=True)
    messages: list[Any] = [HumanMessage(ASKED)]
    for _ in range(2):
        answer = both.invoke(messages)
        messages += [answer, *(weather.invoke(call) for call in answer.tool_calls)]
        assert answer.tool_calls or answer.additional_kwargs["parsed"]


def completions() -> None:
    assert OpenAI(**SERVER, max_tokens=8).invoke(ASKED) is not None
    found = OpenAI(**SERVER, max_tokens=8, n=2, best_of=2).generate([ASKED])
    assert len(found.generations[0]) == 2


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured, completions)
