"""instructor: answers as pydantic models, by tools and by formats."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel
from scenario import AGAIN, ASKED, BASE, MODEL, run

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)


class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]


def ask(mode: instructor.Mode) -> None:
    with_mode = instructor.from_openai(client, mode=mode)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(2):
        answer, raw = with_mode.chat.completions.create_with_completion(
            model=MODEL, messages=messages, response_model=Answer, max_retries=1, max_tokens=400
        )
        assert answer.city in ("Oslo", "Rome")
        message = raw.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls or ()]
        messages += [message.model_dump(), *results, {"role": "user", "content": AGAIN}]


def chat() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    plain = instructor.from_openai(client)
    for _ in range(2):
        raw = plain.chat.completions.create(model=MODEL, messages=messages, response_model=None, max_tokens=20)
        messages += [raw.choices[0].message.model_dump(), {"role": "user", "content": AGAIN}]


def tools() -> None:
    ask(instructor.Mode.TOOLS)


def strict_tools() -> None:
    ask(instructor.Mode.TOOLS_STRICT)


def structured() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


def streamed_tools() -> None:
    partial = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=[{"role": "user", "content": ASKED}], response_model=Answer, max_tokens=400
    )
    *_, last = partial
    assert last.city in ("Oslo", "Rome")


if __name__ == "__main__":
    run(chat, tools, strict_tools, streamed_tools, structured)
