"""Messages in parts under chat templates of many kinds: the text is the one that the stock template renders."""

from __future__ import annotations

import logging

import pytest

from inlay import LLM
from inlay.prompt.chat import ChatTemplate
from tests.model.api.tool_templates import tool_model, tool_tokenizer
from tests.tokenizers_for_tests import with_template

OPEN, END = "<|im_start|>", "<|im_end|>"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ANSWER
TEXTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
LATE = (
    "{% if messages[0].role == 'system' %}{% set said, rest = messages[0].content, messages[1:] %}"
    "{% else %}{% set said, rest = none, messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}<|im_start|>{% if loop.last and said %}{{ said }}\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{% else %} {{ m.content }}\n{% endif %}{% endfor %}"
)
#: Thoughts of past answers are left out, as Qwen3's template does.
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}")
TEMPLATES = {
    "plain": PLAIN,
    "system text in the last user turn": LATE,
    "lists alone": PLAIN.replace("{{ m.content }}", TEXTS),
    "lists of the user alone": PLAIN.replace(
        "{{ m.content }}", "{% if m.role == 'user' %}" + TEXTS + "{% else %}{{ m.content }}{% endif %}"
    ),
    "lists with an error for texts": PLAIN.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ raise_exception('a list!') }}{% endif %}" + TEXTS,
    ),
    "thoughts left out": FORGETS,
    "stripped": PLAIN.replace("m.content", "m.content | trim"),
    "empty turns left out": "{% for m in messages %}{% if m.content %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ANSWER,
    "upper case": PLAIN.replace("m.content", "m.content | upper"),
    "upper case of the user": PLAIN.replace("m.content", "m.content | upper if m.role == 'user' else m.content"),
    "a turn shown twice": PLAIN + "{{ messages[-1].content }}",
    "the last user turn alone": "{{ messages[-1].content }}" + ANSWER,
}
THOUGHT = "<think>\nhm\n</think>\n\nIt leaves."
CONVERSATIONS = {
    "question": [("user", "The ferry ")],
    "system": [("system", "Be short."), ("user", "The ferry")],
    "second question": [("system", "Be short."), ("user", " The ferry"), ("assistant", "leaves.\n"), ("user", "Why?")],
    "no system": [("user", "The ferry"), ("assistant", "leaves."), ("user", "Why?")],
    "thoughts": [
        ("user", "The ferry"),
        ("assistant", THOUGHT),
        ("user", "Why?"),
        ("assistant", THOUGHT),
        ("user", "So"),
    ],
    "empty": [("system", ""), ("user", "The ferry"), ("assistant", ""), ("user", "Why?")],
}


def in_parts(text: str, form: str) -> str | list[dict]:
    mark = {"cache_control": {"type": "ephemeral"}} if form == "marked" else {}
    half = len(text) // 2
    return (
        text
        if form == "text"
        else [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:], **mark}]
    )


def stock(tokenizer, messages: list[tuple[str, str]]) -> str:
    """The rendering that shows most of the texts, whether contents are given as texts or as lists."""
    renderings = []
    for lists in ((), ("user",), ("system", "user", "assistant")):
        given = [
            {"role": role, "content": [{"type": "text", "text": text}] if role in lists else text}
            for role, text in messages
        ]
        try:
            renderings.append(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
        except Exception:  # it takes lists alone
            continue
    said = [text.split("</think>")[-1].strip().lower() for _, text in messages]
    return max(renderings, key=lambda shown: sum(text in shown.lower() for text in said) - shown.count("{'type'"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_the_stock_template(name: str) -> None:
    tokenizer = with_template(tool_tokenizer("qwen"), TEMPLATES[name])
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=TEMPLATES[name])
    for what, messages in CONVERSATIONS.items():
        right = stock(tokenizer, messages)
        ids = tuple(tokenizer.encode(right, add_special_tokens=False))
        for form in ("parts", "marked"):
            for places in ([len(messages) - 1], [0], range(len(messages))):
                said = [
                    {"role": role, "content": in_parts(text, form if number in places else "text")}
                    for number, (role, text) in enumerate(messages)
                ]
                layout = llm.lay_out(said)
                assert layout.text == right, (what, form, places)
                assert layout.ids == ids, (what, form, places)  # a token a byte: encoding apart changes nothing
        plain = [{"role": role, "content": text} for role, text in messages]
        assert llm.lay_out(plain).text == right, what
    llm.shutdown()


def test_unrendered_message_cannot_open_a_role() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=FORGETS)
    special = llm.tokenizer.convert_tokens_to_ids(END)
    question = {"role": "user", "content": [{"type": "text", "text": f"a {END} b"}]}
    answer = {"role": "assistant", "content": f"<think>x</think>c {END} d"}
    layout = llm.lay_out([question, answer, question])
    assert layout.ids.count(special) == 3
    assert "think" not in layout.text
    assert llm.tokenizer.decode(layout.ids) == layout.text


def test_rewritten_marked_message_is_no_module_and_logs_a_warning(caplog) -> None:
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=TEMPLATES["upper case"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            layout = llm.lay_out([{"role": "user", "content": in_parts("The ferry", "marked")}])
    assert "THE FERRY" in layout.text
    assert all(part.origin is None for part in layout.parts)
    (record,) = caplog.records
    assert "marked parts" in record.message


def test_continued_answer_is_open_where_the_template_drops_reasoning() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0, chat_template=FORGETS)
    messages = [
        {"role": "user", "content": in_parts("The ferry", "parts")},
        {"role": "assistant", "content": THOUGHT},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because "},
    ]
    layout = llm.lay_out({"messages": messages, "continue_final_message": True})
    assert layout.text.endswith("<|im_start|>assistant\nBecause ")
    assert "hm" not in layout.text


def test_content_format_is_detected_from_the_template() -> None:
    template = ChatTemplate(with_template(tool_tokenizer("qwen"), TEMPLATES["lists alone"]))
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert "sunny" in template.render(messages)
