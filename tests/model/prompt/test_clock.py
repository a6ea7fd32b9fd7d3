"""Chat templates that write the date: the cached text of one day is not used on the next."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.prompt.chat import ChatTemplate
from tests.conftest import tiny
from tests.tokenizers_for_tests import gpt2, with_template

DATED = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.first %}Today is {{ strftime_now('%d %B') }}. {% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = Schema.from_string(
    '<schema name="s"><system>Rules.</system><user><module name="a">Miami has beaches.</module></user></schema>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=2)


class Clock:
    """In place of the time that transformers gives templates."""

    day = "01 May"


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made, render = Clock(), ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *args, **kwargs: _at(render(*args, **kwargs), made.day), raising=True
    )
    return made


def _at(text: str, day: str) -> str:
    before, is_there, rest = text.partition("Today is ")
    return f"{before}{is_there}{day}.{rest.partition('.')[2]}" if is_there else text


def test_template_with_a_clock_is_detected():
    assert ChatTemplate(with_template(gpt2(), DATED)).tells_time
    assert not ChatTemplate(with_template(gpt2(), "{{ messages[0].content }}")).tells_time


def test_pieces_are_rendered_again_when_the_date_changes(clock):
    chat = ChatTemplate(with_template(gpt2(), DATED))
    assert chat.pieces(["user"], generation=True)[0] == "<user>Today is 01 May. "
    clock.day = "02 May"
    assert chat.pieces(["user"], generation=True)[0] == "<user>Today is 02 May. "


def test_schemas_follow_the_date_and_log_a_warning(clock, caplog):
    loaded = tiny("llama")
    llm = LLM(replace(loaded, tokenizer=with_template(loaded.tokenizer, DATED)), kv_memory="16MiB", chunk_size=8)
    with caplog.at_level(logging.WARNING):
        llm.add_schema(SCHEMA)
    assert any("writes today's date in front of a schema" in record.getMessage() for record in caplog.records)
    prompt = SCHEMA.prompt().use("a").text("Well?")
    (today,) = llm.generate(prompt, GREEDY)
    assert "Today is 01 May. Rules." in (today.prompt or "")
    assert today.usage.cached_tokens > len("Miami has beaches.")
    clock.day = "02 May"
    (tomorrow,) = llm.generate(prompt, GREEDY)
    (full,) = llm.generate(prompt, GREEDY, reuse="off")
    assert "Today is 02 May. Rules." in (tomorrow.prompt or "")
    assert tomorrow.prompt_token_ids == full.prompt_token_ids
    assert tomorrow.metrics.encode_s > 0, "what stands behind the date is another day's"
    llm.shutdown()


@pytest.mark.parametrize("reuse", ["exact", "modular"])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_text_of_earlier_days_is_evicted_with_a_schema(clock, tmp_path, reuse, restarts):
    def made() -> LLM:
        loaded = tiny("llama")
        loaded = replace(loaded, tokenizer=with_template(loaded.tokenizer, DATED))
        llm = LLM(loaded, kv_memory="16MiB", chunk_size=8, store=tmp_path)
        llm.add_schema(SCHEMA, encode=False)
        return llm

    def cached() -> int:
        (output,) = llm.generate(SCHEMA.prompt().use("a").text("Well?"), GREEDY, reuse=reuse)
        return output.usage.cached_tokens

    llm = made()
    if not restarts:
        llm.pin("s", reuse="anchored")
    for clock.day in ("01 May", "02 May"):
        cached()
        assert cached() > 40
    if restarts:
        llm.shutdown()
        llm = made()
    clock.day = "03 May"
    cached()
    llm.evict("s")
    assert not llm.schemas.has_pinned("s")
    assert llm.stats().pinned_bytes == 0
    for clock.day in ("01 May", "02 May"):
        assert cached() <= len("<system>Today is 0"), "all days begin alike"
    llm.evict("s")
    llm.shutdown()
    assert not list(tmp_path.glob("v1/*.safetensors"))
