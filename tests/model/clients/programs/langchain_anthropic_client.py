"""LangChain's ChatAnthropic, over /v1/messages."""

from __future__ import annotations

import json
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from scenario import AGAIN, ASKED, BASE, CITY, FORM, MODEL, TOOLS, run


def model(**more: Any) -> ChatAnthropic:
    where = {"model": MODEL, "base_url": BASE.removesuffix("/v1"), "api_key": "none", "max_retries": 0}
    return ChatAnthropic(**{**where, "max_tokens": 40, **more})  # type: ignore[arg-type]


def chat() -> None:
    answered = model().invoke([HumanMessage(ASKED)])
    assert answered.usage_metadata is not None
    marked = HumanMessage([{"type": "text", "text": AGAIN, "cache_control": {"type": "ephemeral"}}])
    assert model().invoke([HumanMessage(ASKED), answered, marked]).response_metadata["stop_reason"]


def stream() -> None:
    whole = None
    for piece in model().stream([HumanMessage(ASKED)]):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert whole.usage_metadata is not None


def _called(streamed: bool) -> None:
    caller = model(max_tokens=400).bind_tools(TOOLS, tool_choice="any")
    messages: list[Any] = [HumanMessage(ASKED)]
    for _ in range(2):
        if streamed:
            pieces = list(caller.stream(messages))
            answered: Any = pieces[0]
            for piece in pieces[1:]:
                answered = answered + piece
        else:
            answered = caller.invoke(messages)
        assert answered.tool_calls
        messages.append(answered)
        for call in answered.tool_calls:
            assert call["args"]["city"] in ("Oslo", "Rome")
            messages.append(ToolMessage("Sunny.", tool_call_id=call["id"]))
    assert model().bind_tools(TOOLS).invoke(messages)


def tools() -> None:
    _called(streamed=False)


def streamed_tools() -> None:
    _called(streamed=True)


def structured() -> None:
    schema = {"title": "answer", "description": "A city.", **CITY}
    found = model(max_tokens=400).with_structured_output(schema).invoke([HumanMessage(ASKED)])
    assert json.loads(json.dumps(found))["city"] in ("Oslo", "Rome")


def tools_and_structured() -> None:
    both = model(max_tokens=400).bind_tools(TOOLS, response_format=FORM)
    messages: list[Any] = [HumanMessage(ASKED)]
    for _ in range(2):
        answered = both.invoke(messages)
        messages += [answered, *(ToolMessage("Sunny.", tool_call_id=call["id"]) for call in answered.tool_calls)]
        if not answered.tool_calls:
            assert json.loads(str(answered.content))["city"] in ("Oslo", "Rome")
            messages.append(HumanMessage(AGAIN))


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured)
