"""The OpenAI Agents SDK, over chat completions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import AGAIN, ASKED, BASE, MODEL, run

set_tracing_disabled(True)


class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather."""
    return f"Sunny in {city}."


def agent(settings: dict[str, Any] | None = None, **more: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    chosen = ModelSettings(max_tokens=200, temperature=1.0, **(settings or {}))
    return Agent(name="helper", instructions="Be brief.", model=model, model_settings=chosen, **more)


def turns(settings: dict[str, Any] | None = None, **more: Any) -> Any:
    async def both() -> Any:
        one = agent(settings, **more)
        first = await Runner.run(one, ASKED, max_turns=20)
        asked = [*first.to_input_list(), {"role": "user", "content": AGAIN}]
        return (await Runner.run(one, asked, max_turns=20)).final_output

    return asyncio.run(both())


def streamed(settings: dict[str, Any] | None = None, **more: Any) -> Any:
    async def both() -> Any:
        one, asked = agent(settings, **more), [{"role": "user", "content": ASKED}]
        for _ in range(2):
            result = Runner.run_streamed(one, asked, max_turns=20)
            assert [event.type async for event in result.stream_events()]
            asked = [*result.to_input_list(), {"role": "user", "content": AGAIN}]
        return result.final_output

    return asyncio.run(both())


def chat() -> None:
    assert isinstance(turns(), str)


def stream() -> None:
    assert isinstance(streamed(), str)


def tools() -> None:
    assert isinstance(turns({"tool_choice": "required"}, tools=[weather]), str)


def streamed_tools() -> None:
    assert isinstance(streamed({"tool_choice": "required"}, tools=[weather]), str)


def structured() -> None:
    assert turns(output_type=Answer).city


def tools_and_structured() -> None:
    assert turns(tools=[weather], output_type=Answer).city
    assert streamed({"tool_choice": "required"}, tools=[weather], output_type=Answer).city


def handoff() -> None:
    other = agent()
    other.name = "other"
    assert isinstance(turns({"tool_choice": "required"}, handoffs=[other]), str)


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured, handoff)
