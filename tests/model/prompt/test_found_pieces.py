"""Unmarked text that comes again is read as modules under ``find="content"``, wherever it stands."""

from __future__ import annotations

import random

import pytest

from inlay import LLM, SamplingParams
from inlay.errors import PolicyError
from inlay.kv.identity import KeyMaker
from inlay.policy import PolicyFields, ReusePolicy
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.request import EngineRequest
from inlay.prompt.seen_pieces import content_ranges, token_ranges
from inlay.types import EVERYONE, Scope, Usage
from tests.model.api.tool_templates import tool_tokenizer
from tests.model.prompt.test_borders import prose

ONE = SamplingParams(temperature=0, max_tokens=1)
POLICY = PolicyFields("modular", find="content").policy("packed")
KEYS = KeyMaker(b"", "float32", "none", b"", positioned=False)
DOCUMENTS = [f"# Part {n}\n{prose(n, 12)}".replace("\n\n", " ") + "\n\n" for n in range(6)]
assert POLICY is not None


def processor(family: str) -> PromptProcessor:
    tokenizer = tool_tokenizer(family)
    return PromptProcessor(tokenizer, ModelInfo(len(tokenizer), 2**20, 0, KEYS, None))


def processed(
    made: PromptProcessor, prompt: object, scope: Scope = EVERYONE, policy: ReusePolicy = POLICY
) -> EngineRequest:
    return made.process(prompt, ONE, policy, scope)


def found(made: PromptProcessor, prompt: object, **given) -> list[str]:
    """Return the texts of the prompt's found pieces."""
    decode = made.tokenizer.decode
    return [str(decode(list(part.ids))) for part in processed(made, prompt, **given).parts if part.found]


def chat(*texts: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def after_call(result: str, question: str) -> dict:
    """Return a conversation with a tool's result."""
    call = {"id": "call00000", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "read", "tool_call_id": "call00000", "content": result},
    ]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": parameters}}
    return {"messages": messages, "tools": [tool]}


def test_documents_in_any_order_are_found_after_a_few_prompts() -> None:
    made, rng = processor("qwen"), random.Random(0)
    for number in range(6):
        rng.shuffle(DOCUMENTS)
        texts = found(made, chat("".join(DOCUMENTS) + f"\n\nQuestion {number}: why?"))
        if number > 2:
            assert sum(map(len, texts)) >= 0.8 * sum(map(len, DOCUMENTS))


def test_documents_of_two_short_paragraphs_without_a_title_are_found() -> None:
    made, rng = processor("qwen"), random.Random(0)
    paragraphs = [prose(200 + n, 1).strip(". \n")[:55].ljust(50, "y") + ".\n\n" for n in range(24)]
    documents = ["".join(paragraphs[at : at + 2]) for at in range(0, 24, 2)]
    shares = []
    for number in range(24):
        chosen = rng.sample(documents, 4)
        texts = found(made, chat("".join(chosen) + f"Question {number}: why?"))
        shares.append(sum(map(len, texts)) / sum(map(len, chosen)))
    assert sum(shares[-8:]) / 8 >= 0.8


def test_prompts_with_a_common_prefix_have_no_found_pieces() -> None:
    made = processor("qwen")
    for question in ("Why?", "When?", "Where?"):
        assert found(made, chat("".join(DOCUMENTS), "Yes.", question)) == []


def test_system_prompt_after_a_date_is_found() -> None:
    made, rules = processor("qwen"), prose(8, 40)
    texts = []
    for day in range(1, 4):
        system = {"role": "system", "content": f"Today is 2026-11-{day:02}.\n\n{rules}"}
        texts = found(made, [system, *chat("Hello.")])
    assert sum(map(len, texts)) >= 0.8 * len(rules)


def test_pasted_file_is_found_at_another_position() -> None:
    made, file = processor("qwen"), prose(9, 40)
    found(made, chat(f"Here is a file:\n\n{file}\n\nWhat is it?"))
    found(made, chat("Hello.", "Yes?", f"Read this.\n\n{file}"))
    assert sum(map(len, found(made, chat(f"{prose(1, 3)}\n\n{file}\n\nAnd this?")))) >= 0.7 * len(file)


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral"])
def test_the_result_of_a_tool_is_found_in_another_conversation(family: str) -> None:
    made, result = processor(family), prose(7, 40).replace("\n", " ")
    for question in ("What is in it?", "Please read the file.", "Is it there?"):
        texts = found(made, after_call(result, question))
    assert sum(map(len, texts)) >= 0.6 * len(result)


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral", "simple"])
def test_ids_equal_the_plain_prompt_and_pieces_have_no_template_text(family: str) -> None:
    made, exact = processor(family), ReusePolicy.parse("exact").settled(None)
    spelled = f"{prose(4, 12)}<|im_end|> [INST] <|eot_id|>{prose(5, 12)}"
    for front in ("One. ", "Two? ", "Three: "):
        prompt = chat(front + spelled, "Well.", prose(6, 12))
        request = processed(made, prompt)
        assert request.ids == processed(made, prompt, policy=exact).ids
        assert request.positions == tuple(range(len(request.ids)))
        said = "".join(message["content"] for message in prompt)
        texts = found(made, prompt)
        assert all(text in said for text in texts)
    assert texts


def test_text_and_token_ids_are_found_too() -> None:
    made = processor("qwen")
    ids = [list(made.tokenizer.encode(front + "".join(DOCUMENTS))) for front in ("a", "bc", "def")]
    for each in ids[:2]:
        found(made, each)
    assert found(made, ids[2]) == found(made, "def" + "".join(DOCUMENTS))


def test_pieces_are_kept_apart_by_salt_and_forgotten_with_it() -> None:
    made = processor("qwen")
    for front in ("a", "bc"):
        found(made, front + "".join(DOCUMENTS), scope=Scope("mine"))
    assert found(made, "d" + "".join(DOCUMENTS), scope=Scope("other")) == []
    assert found(made, "d" + "".join(DOCUMENTS), scope=Scope("mine"))
    made.forget_texts("mine")
    assert found(made, "e" + "".join(DOCUMENTS), scope=Scope("mine")) == []


def test_a_request_with_found_pieces_survives_its_serialization() -> None:
    made = processor("qwen")
    for front in ("a", "bc"):
        found(made, front + "".join(DOCUMENTS))
    request = processed(made, "d" + "".join(DOCUMENTS))
    again = EngineRequest.from_bytes(request.to_bytes(), KEYS)
    assert [part.found for part in again.parts] == [part.found for part in request.parts]
    assert again.policy == request.policy
    assert any(part.found for part in again.parts)


def test_contents_are_found_in_a_rendering_as_text_or_as_json() -> None:
    plain, quoted = "Plain text with enough letters. " * 4, 'Text with "quotes" and\nlines, of enough letters. ' * 3
    written = '{"content": "' + quoted.strip().replace('"', '\\"').replace("\n", "\\n") + '"}'
    rendered = f"<user>{plain.strip()}<tool>{written}<end>"
    ranges = content_ranges(
        rendered, [plain, "short", "not shown at all, but long enough to be looked for " * 2, quoted]
    )
    assert [rendered[first:end] for first, end in ranges] == [plain.strip(), written[13:-2]]
    assert token_ranges([(0, 2), (2, 5), (5, 5), (5, 9)], [(1, 9), (0, 4)]) == ((1, 4), (0, 1))


@pytest.mark.parametrize("reuse", ["exact", "off"])
def test_find_is_rejected_for_policies_without_modules(reuse: str) -> None:
    with pytest.raises(PolicyError) as caught:
        PolicyFields(reuse, find="content").policy()
    assert (caught.value.code, caught.value.field) == ("policy.conflict", "find")


def test_unknown_find_mode_and_models_without_shifts_are_rejected() -> None:
    with pytest.raises(PolicyError) as caught:
        PolicyFields("modular", find="magic").policy()
    assert (caught.value.code, caught.value.field) == ("policy.bad_find", "find")
    with pytest.raises(PolicyError) as caught:
        ReusePolicy.parse("modular+content").settled("it has learned positions")
    assert (caught.value.code, caught.value.field) == ("policy.unsupported", "find")


def test_found_text_is_partly_recomputed_by_default() -> None:
    assert str(PolicyFields("modular", find="content").policy()) == "modular+content+profiled:0.1"
    assert str(PolicyFields("modular", "linked:8", find="content").policy()) == "modular+content+linked:8"
    assert str(PolicyFields("auto", find="content").policy()) == "auto+content"
    assert not ReusePolicy.parse("modular").finds
    exact = ReusePolicy.parse("auto+content").resolved([], None)
    assert (str(exact), exact.finds) == ("exact", False)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_memory="256MiB", seed=0)


def test_usage_counts_found_read_and_recomputed_tokens(llm: LLM) -> None:
    outputs = [
        llm.generate([chat(front + prose(3, 40))], ONE, reuse="modular", find="content", diagnostics=True)[0]
        for front in ("One.\n\n", "Two two.\n\n", "Three three three.\n\n")
    ]
    first, second, third = (output.usage for output in outputs)
    assert (first.found_tokens, first.module_tokens) == (0, 0)
    assert second.found_tokens > 0 == second.module_tokens
    assert third.found_tokens == second.found_tokens
    assert third.module_tokens + third.recomputed_tokens == third.found_tokens
    assert 0 < third.recomputed_tokens <= 0.15 * third.found_tokens
    diagnostics = outputs[2].diagnostics
    assert diagnostics is not None
    pieces = [module for module in diagnostics.modules if module.name.startswith("tokens[")]
    assert sum(module.tokens for module in pieces) == third.found_tokens
    assert sum(module.recomputed_tokens for module in pieces) == third.recomputed_tokens


def asked(llm: LLM, prompt: object, salt: str, **given: object) -> Usage:
    """Return the usage of a prompt whose repeated text may be found."""
    return llm.generate([prompt], ONE, reuse="modular", find="content", cache_salt=salt, **given)[0].usage


def test_third_prompt_with_the_same_text_reads_it(llm: LLM) -> None:
    fronts = ("One.\n\n", "Two two.\n\n", "Three three three.\n\n")
    text = prose(21, 40)
    first, second = (asked(llm, chat(front + text), "sightings") for front in fronts[:2])
    full = llm.generate([chat(fronts[1] + text)], ONE, reuse="off")[0].usage
    assert second.computed_tokens <= full.computed_tokens
    assert second.computed_tokens + second.cached_tokens == full.prompt_tokens
    third = asked(llm, chat(fronts[2] + text), "sightings")
    assert first.found_tokens == 0 < second.found_tokens
    assert third.computed_tokens <= full.computed_tokens - 0.85 * third.found_tokens
    assert third.linked_tokens == 0  # each piece has a deviation profile


@pytest.mark.parametrize("recompute", ["profiled:0.1", "linked:4"])
def test_without_idle_time_the_fourth_prompt_reads_the_text(llm: LLM, recompute: str) -> None:
    salt, text = f"busy {recompute}", prose(22, 40)
    prompts = [chat(f"{front}\n\n{text}") for front in ("One.", "Two two.", "Three three three.", "Four.")]
    given = {"reuse": "modular", "find": "content", "recompute": recompute, "cache_salt": salt}
    outputs = llm.generate(prompts[:3], ONE, **given)  # no idle time between them
    assert [output.usage.module_tokens for output in outputs] == [0, 0, 0]
    before = llm.stats().profiled_tokens
    llm.local.engine.profiler.forget_salt(salt)
    (fourth,) = llm.generate(prompts[3:], ONE, **given)
    assert fourth.usage.module_tokens > 0.8 * fourth.usage.found_tokens > 0
    if recompute == "linked:4":
        assert llm.stats().profiled_tokens == before


def test_new_text_and_continued_conversations_are_not_encoded_as_found(llm: LLM) -> None:
    before = llm.stats().profiled_tokens
    for number in range(20):
        asked(llm, prose(7000 + number, 20), "new")
    turns = [f"Hello.\n\n{prose(23, 20)}", "Yes.", "Why?", "So.", "When?"]
    for count in (1, 3, 5):
        asked(llm, chat(*turns[:count]), "new")
    assert llm.stats().profiled_tokens == before


def test_conversation_with_found_text_continues_from_its_prefix(llm: LLM) -> None:
    text = prose(24, 40)
    asked(llm, chat(f"One.\n\n{text}"), "turns")
    turns = [f"Two two.\n\n{text}", "Yes.", "Why?"]
    first = asked(llm, chat(*turns[:1]), "turns")
    again = asked(llm, chat(*turns), "turns")  # the pieces are stored as modules by now
    assert first.found_tokens > 0
    assert (again.module_tokens, again.recomputed_tokens) == (0, 0)
    assert again.computed_tokens <= again.prompt_tokens - first.prompt_tokens + 16


@pytest.mark.long
def test_reuse_does_not_decay_after_100_new_prompts(llm: LLM) -> None:
    text = prose(11, 40)
    for front in ("One.\n\n", "Two two.\n\n"):
        asked(llm, front + text, "decay")
    before = asked(llm, "Three.\n\n" + text, "decay")
    for number in range(100):
        asked(llm, f"New {number}.\n\n" + prose(5000 + number, 20), "decay")
    after = asked(llm, "Four.\n\n" + text, "decay")
    assert before.module_tokens > 0
    assert after.module_tokens >= before.module_tokens
