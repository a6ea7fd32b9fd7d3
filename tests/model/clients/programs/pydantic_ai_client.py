"""pydantic-ai: agents with tools and outputs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from scenario import AGAIN, ASKED, BASE, MODEL, run


class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]


def agent(**more: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    return Agent(model, instructions="Be brief.", model_settings={"max_tokens": 400, "temperature": 1.0}, **more)


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather."""
    return f"Sunny in {city}."


def turns(one: Agent[None, Any]) -> Any:
    first = one.run_sync(ASKED, usage_limits=LIMITS)
    return one.run_sync(AGAIN, message_history=first.all_messages(), usage_limits=LIMITS).output


LIMITS = UsageLimits(request_limit=20)


def chat() -> None:
    assert isinstance(turns(agent()), str)


def stream() -> None:
    async def both() -> None:
        one, history = agent(), None
        for asked in (ASKED, AGAIN):
            async with one.run_stream(asked, message_history=history) as result:
                assert "".join([piece async for piece in result.stream_text(delta=True)]) == await result.get_output()
                history = result.all_messages()

    asyncio.run(both())


def tools() -> None:
    assert turns(agent(tools=[weather], output_type=Answer)).city


def streamed_tools() -> None:
    async def both() -> None:
        one = agent(tools=[weather], output_type=Answer)
        async with one.run_stream(ASKED, usage_limits=LIMITS) as result:
            assert (await result.get_output()).city

    asyncio.run(both())


def structured() -> None:
    assert turns(agent(output_type=NativeOutput(Answer))).city


def tools_and_structured() -> None:
    assert turns(agent(tools=[weather], output_type=NativeOutput(Answer))).city


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured)
