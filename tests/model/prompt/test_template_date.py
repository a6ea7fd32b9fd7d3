"""Dates that real chat templates write: the warning names the remedy, and ``template_date`` fixes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from inlay import LLM, ParameterError, SamplingParams
from tests.conftest import tiny
from tests.raising import raises
from tests.unit.prompt import dated_templates as templates

ONE = SamplingParams(temperature=0, max_tokens=1)
RULES = "Answer from the documents alone, in one short sentence, and name the document that you answer from."
USER = {"role": "user", "content": "Where does the island lie, and how far is it from the coast?"}
SYSTEM = {"role": "system", "content": RULES}
SEARCH = {"type": "function", "function": {"name": "search", "description": "It searches.", "parameters": {}}}


class Clock(datetime):
    """In place of the clock that transformers gives to templates."""

    day = 1

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2026, 6, cls.day)


@pytest.fixture
def clock(monkeypatch) -> type[Clock]:
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)  # transformers has no other seam for its clock
    monkeypatch.setattr(Clock, "day", 1)
    return Clock


def model(template: str, **settings: Any) -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0, chat_template=template, **settings)


def warnings(caplog) -> list[str]:
    return [found.getMessage() for found in caplog.records if "writes today's date" in found.getMessage()]


@pytest.mark.parametrize(
    ("template", "messages", "remedy"),
    [
        (templates.LLAMA_3_2, [USER], "set template_date, or give date_string in chat_template_kwargs, and"),
        (templates.LLAMA_3_2, [SYSTEM, USER], "set template_date, or give date_string in chat_template_kwargs, and"),
        (templates.GPT_OSS, [USER], "set template_date, and"),
        (templates.GPT_OSS, [SYSTEM, USER], "set template_date, and"),
        (templates.SMOLLM3, [SYSTEM, USER], "set template_date, and"),
        (templates.MISTRAL_SMALL_3, [USER], "set template_date, and"),
    ],
)
def test_a_plain_conversation_is_warned_once_of_the_date(caplog, template: str, messages: list, remedy: str):
    llm = model(template)
    for tools in (None, [SEARCH], None):
        llm.chat(messages, ONE, tools=tools)
    (warning,) = warnings(caplog)
    assert remedy in warning


@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (templates.LLAMA_3_1, [USER], {}),
        (templates.LLAMA_3_2, [USER], {"date_string": "31 Jan 2026"}),
        (templates.SMOLLM3, [{"role": "system", "content": "/system_override Be brief."}, USER], {}),
        (templates.MISTRAL_SMALL_3, [SYSTEM, USER], {}),
        (templates.QWEN_3, [SYSTEM, USER], {}),
    ],
)
def test_date_without_todays_value_logs_no_warning(caplog, template: str, messages: list, variables: dict):
    model(template).chat(messages, ONE, chat_template_kwargs=variables)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (templates.LLAMA_3_2, "Today Date: 31 Jan 2026"),
        (templates.GPT_OSS, "Current date: 2026-01-31"),
        (templates.SMOLLM3, "Today Date: 31 January 2026"),
    ],
)
def test_a_fixed_date_keeps_the_cache_on_the_next_day(clock, caplog, template: str, text: str):
    llm = model(template, template_date="2026-01-31")
    (today,) = llm.chat([SYSTEM, USER], ONE, reuse="exact")
    assert text in (today.prompt or "")
    clock.day = 2
    (tomorrow,) = llm.chat([SYSTEM, USER], ONE, reuse="exact")
    assert tomorrow.usage.computed_tokens == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("template", [templates.LLAMA_3_2, templates.GPT_OSS, templates.SMOLLM3])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER]])
def test_diagnostics_name_the_date_of_the_template(clock, template: str, messages: list):
    llm = model(template)
    llm.chat(messages, ONE, reuse="exact")
    clock.day = 2
    (output,) = llm.chat(messages, ONE, reuse="exact", diagnostics=True)
    assert output.diagnostics is not None
    cause = output.diagnostics.causes[0]
    assert (cause.kind, cause.place) == ("template date", "template")
    assert "template_date" in cause.remedy


@pytest.mark.parametrize("value", ["tomorrow", "31 Jan 2026", "2026-02-30", "", 20260131, "20260131", "2026-W05-6"])
def test_invalid_date_is_rejected(value):
    with raises("parameter.invalid_date", ParameterError, names="template_date"):
        model(templates.GPT_OSS, template_date=value)
