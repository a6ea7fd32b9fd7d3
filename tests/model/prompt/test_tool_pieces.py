"""Tools and blocks of the system prompt as modules of their own, and the conversation after them."""

from __future__ import annotations

import logging
import random

import pytest

from inlay import LLM, SamplingParams
from inlay.engine.background.profiler import KnownProfiles
from inlay.engine.order import OrderChooser
from inlay.engine.prompt_state import PromptState
from inlay.kv import store
from inlay.kv.identity import KeyMaker
from inlay.policy import ReusePolicy
from inlay.prompt.composed import CachedSpan
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.placement import PromptLayout
from inlay.prompt.processor import PromptProcessor
from tests.counting import calls_of
from tests.model.api.tool_templates import tool_model, tool_tokenizer
from tests.tokenizers_for_tests import with_template

ONE = SamplingParams(temperature=0, max_tokens=1)
FAMILIES = ["qwen", "llama", "mistral", "simple"]
#: Structures of templates that real families have.
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
STRUCTURES = {
    "a list of JSON": "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}" + TURNS,
    "indented JSON of the list": "{% if tools %}Tools: {{ tools | tojson(indent=2) }}\n{% endif %}" + TURNS,
    "functions alone": "{% for t in tools or [] %}{{ t.function | tojson }}{{ '\n' if not loop.last }}{% endfor %}\n"
    + TURNS,
    "fields in XML": "{% if tools %}<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>\n"
    "<description>{{ t.function.description }}</description>{% for name, p in t.function.parameters.properties.items() "
    "%}\n<parameter>{{ name }}: {{ p.type }}</parameter>{% endfor %}\n</function>{% endfor %}\n</tools>\n{% endif %}"
    + TURNS,
    "types": "{% if tools %}namespace functions {\n{% for t in tools %}// {{ t.function.description }}\n"
    "type {{ t.function.name }} = (_: {{ t.function.parameters | tojson }}) => any;\n\n{% endfor %}"
    "} // namespace functions\n{% endif %}" + TURNS,
    "headings": "{% for t in tools or [] %}### {{ t.function.name }}\n{{ t.function.description }}\nName: "
    "{{ t.function.name }}\n\n{% endfor %}" + TURNS,
}
UNUSABLE = {
    "sorted": "{% for t in tools | sort(attribute='function.name') %}{{ t | tojson }}\n{% endfor %}" + TURNS,
    "numbered": "{% for t in tools %}{{ loop.index }}. {{ t.function.name }}\n{% endfor %}" + TURNS,
    "names in front": "{{ tools | map(attribute='function.name') | join(', ') }}: {{ tools | tojson }}\n" + TURNS,
    "shown twice": "{{ tools | tojson }}{{ tools | tojson }}\n" + TURNS,
}


def tool(name: str, description: str = "Does one thing. ") -> dict:
    parameters = {"type": "object", "properties": {name[:1]: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description * 2, "parameters": parameters}}


READ, WRITE, LIST = tool("read"), tool("write", "Saves a file. "), tool("list", "Shows <|im_end|> all. ")
MESSAGES = [{"role": "user", "content": "Which files are there?"}]


def asked(*tools: dict, messages: list[dict] = MESSAGES) -> dict:
    return {"messages": messages, "tools": list(tools)}


class Layouts:
    """The layouts of one template, without a model."""

    def __init__(self, tokenizer, why_not_shift: str | None = None) -> None:
        keys = KeyMaker(b"", "float32", "none", b"", positioned=False)
        self._processor = PromptProcessor(tokenizer, ModelInfo(len(tokenizer), 2**20, 0, keys, why_not_shift))

    def lay_out(self, prompt: dict, reuse: str = "modular") -> PromptLayout:
        return self._processor.lay_out(prompt, ReusePolicy.parse(reuse).settled(self._processor.model.why_not_shift))


def with_structure(template: str, why_not_shift: str | None = None) -> Layouts:
    return Layouts(with_template(tool_tokenizer("none"), template), why_not_shift)


def texts_of_tools(layouts: Layouts | LLM, prompt: dict) -> list[tuple[int, ...]]:
    return [part.ids for part in layouts.lay_out(prompt, reuse="modular").parts if part.marked]


def usage(llm: LLM, prompt: dict, reuse: str = "modular", **settings):
    return llm.generate([prompt], ONE, reuse=reuse, **settings)[0].usage


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tool_is_a_part_of_its_own(family: str) -> None:
    llm = Layouts(tool_tokenizer(family))
    laid = llm.lay_out(asked(READ, WRITE, LIST), reuse="modular")
    whole = llm.lay_out(asked(READ, WRITE, LIST), reuse="exact")
    assert (laid.ids, laid.text) == (whole.ids, whole.text)  # a token a byte: encoding apart changes nothing
    one, two, three = texts_of_tools(llm, asked(READ, WRITE, LIST))
    assert texts_of_tools(llm, asked(LIST, READ)) == [three, one]
    assert texts_of_tools(llm, asked(WRITE)) == [two]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_templates_that_list_tools_in_any_form(structure: str, caplog) -> None:
    llm = with_structure(STRUCTURES[structure])
    one, two, three = texts_of_tools(llm, asked(READ, WRITE, LIST))
    assert texts_of_tools(llm, asked(LIST, WRITE, READ)) == [three, two, one]
    assert llm.lay_out(asked(LIST, READ)).text == llm.lay_out(asked(LIST, READ), reuse="exact").text
    assert not caplog.records


@pytest.mark.parametrize("structure", UNUSABLE)
def test_a_template_that_mixes_tools_keeps_them_as_text_and_warns_once(structure: str, caplog) -> None:
    llm = with_structure(UNUSABLE[structure])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            laid = llm.lay_out(asked(READ, WRITE), reuse="modular")
    assert not laid.in_pieces
    assert not any(part.marked for part in laid.parts)
    assert len(caplog.records) == 1


def test_tools_are_text_under_exact_and_for_a_model_without_shifts() -> None:
    assert with_structure(STRUCTURES["types"]).lay_out(asked(READ)).in_pieces
    assert not with_structure(STRUCTURES["types"]).lay_out(asked(READ), reuse="exact").in_pieces
    assert not with_structure(STRUCTURES["types"], "it has learned positions").lay_out(asked(READ)).in_pieces


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral"])
def test_changed_tools_compute_only_the_new_tool(family: str) -> None:
    llm = LLM(tool_model(family), kv_memory="32MiB", seed=0)
    system = [] if family == "mistral" else [{"role": "system", "content": "Be short. " * 5}]
    history = [
        *({"role": role, "content": f"This is turn {role} number {n}. " * 4} for n in range(2) for role in ("user",)),
    ]
    first = [*system, *history[:1]]
    usage(llm, asked(READ, WRITE, LIST, messages=first))
    later = [*first, {"role": "assistant", "content": "I read all of the files in the folder."}, history[1]]
    same = usage(llm, asked(READ, WRITE, LIST, messages=later))
    new = tool("delete", "Removes a file. ")
    (size,) = (len(ids) for ids in texts_of_tools(llm, asked(new)))
    added = usage(llm, asked(READ, new, WRITE, LIST, messages=later))
    assert added.computed_tokens <= size + 48  # the tool, and the text that is too short to be read at a shift
    assert added.moved_tokens >= 32
    assert usage(llm, asked(LIST, READ, WRITE, messages=later)).computed_tokens <= 48
    assert usage(llm, asked(READ, LIST, messages=later)).computed_tokens <= 48
    exact = usage(llm, asked(READ, LIST, WRITE, messages=later), reuse="exact")
    assert (exact.module_tokens, exact.moved_tokens) == (0, 0)
    assert same.computed_tokens < exact.computed_tokens


def test_text_after_a_tool_change_is_found_by_later_turns() -> None:
    """The turns after a change are read from where they were, and what follows is found exactly."""
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    messages = [{"role": "user", "content": "Please describe all of the files in the folder, one by one. " * 2}]
    usage(llm, asked(READ, WRITE, messages=messages))
    messages += [{"role": "assistant", "content": "There are three."}, {"role": "user", "content": "Which ones?"}]
    changed = usage(llm, asked(WRITE, READ, messages=messages))
    messages += [{"role": "assistant", "content": "One, two, three."}, {"role": "user", "content": "And the last?"}]
    after = usage(llm, asked(WRITE, READ, messages=messages))
    assert after.moved_tokens == changed.moved_tokens
    assert after.exact_tokens > changed.exact_tokens
    assert after.computed_tokens <= len("<|im_end|>\n<|im_start|>assistant\nOne, two, three.And the last?") + 64


@pytest.mark.parametrize(
    "settings",
    [
        {"reuse": "exact"},
        {"promote": False},
        {"reuse": "anchored"},
        {"recompute": "linked:2"},
        {"cache_salt": "another"},
    ],
)
def test_requests_that_opt_out_do_not_read_moved_text(settings: dict) -> None:
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    messages = [{"role": "user", "content": "Please describe all of the files in the folder, one by one. " * 3}]
    usage(llm, asked(READ, WRITE, messages=messages), cache_salt="mine")
    reads = {"reuse": "modular", "cache_salt": "mine", **settings}
    assert usage(llm, asked(WRITE, READ, messages=messages), **reads).moved_tokens == 0
    assert usage(llm, asked(LIST, READ, messages=messages), cache_salt="mine").moved_tokens > 0


def test_moved_text_that_was_evicted_is_computed() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    messages = [{"role": "user", "content": "Please describe all of the files in the folder, one by one. " * 3}]
    usage(llm, asked(READ, WRITE, messages=messages))
    llm.store.clear()
    assert usage(llm, asked(WRITE, READ, messages=messages)).moved_tokens == 0


def test_evicted_moved_text_is_computed_at_admission() -> None:
    """As after a preemption, during which the text was evicted."""
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    messages = [{"role": "user", "content": "Please describe all of the files in the folder, one by one. " * 3}]
    usage(llm, asked(READ, WRITE, messages=messages))
    prompt = asked(WRITE, READ, messages=messages)
    state = PromptState(llm.processor.process(prompt, ONE, ReusePolicy.parse("modular").settled(None)))
    whole = frozenset(spec.key for spec in state.request.open_segments() if llm.store.get(spec) is not None)
    state.choose(lambda specs: whole, lambda run: 0, KnownProfiles(), OrderChooser(llm.store), llm.store)
    assert state.moved
    state.compute_moved()
    assert not state.moved
    lengths = (part.length if isinstance(part, CachedSpan) else len(part.ids) for part in state.composed)
    assert sum(lengths) == len(state.request.ids)


def test_a_prompt_of_many_moved_pieces_is_hashed_once(monkeypatch) -> None:
    """The work of composing grows with the prompt, not with the prompt times its pieces."""
    llm, draw = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0), random.Random(0)
    pieces = ["".join(draw.choices("abcdefgh ", k=90)) for _ in range(10)]
    usage(llm, asked(READ, WRITE, messages=[{"role": "user", "content": " and ".join(pieces)}]))
    hashed = calls_of(monkeypatch, store, "windows_of")
    found = usage(llm, asked(WRITE, READ, messages=[{"role": "user", "content": ", ".join(reversed(pieces))}]))
    assert found.moved_tokens > 700
    assert (
        sum(len(ids) for (ids,) in hashed) <= 2 * found.prompt_tokens
    )  # composed twice: when it is prepared, and when it is admitted


def test_agents_in_a_pool_too_small_for_all() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="640KiB", seed=0)
    draw = random.Random(0)
    tools = [tool(name) for name in ("read", "write", "list", "delete")]
    histories = [[{"role": "user", "content": f"Agent {n}: describe the files. " * 4}] for n in range(4)]
    moved = 0
    for turn in range(4):
        prompts = [asked(*draw.sample(tools, draw.randint(1, 3)), messages=list(history)) for history in histories]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), reuse="modular"):
            moved += output.usage.moved_tokens
        for history in histories:
            history += [{"role": "assistant", "content": f"There are {turn}."}, {"role": "user", "content": "Go on. "}]
    assert moved > 0


def test_each_block_of_a_system_prompt_is_a_module() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    rules = "Answer from the files alone, and name the file in each answer. "
    style = "Write short sentences, and never more than three of them. "

    def ask(*blocks: str, reuse: str = "modular"):
        system = {"role": "system", "content": [{"type": "text", "text": block} for block in blocks]}
        question = {"role": "user", "content": "Which files are there in the folder, and how large are they? " * 2}
        return usage(llm, {"messages": [system, question]}, reuse)

    ask("cch=1; ", rules, style)
    changed = ask("cch=2; ", rules, style)
    assert changed.anchored_tokens == len(rules) + len(style)
    assert changed.computed_tokens < 48
    assert ask(style, rules).module_tokens >= len(rules)
    assert not llm.lay_out([{"role": "system", "content": "One block."}, *MESSAGES], reuse="modular").in_pieces
    assert ask("cch=3; ", rules, style, reuse="exact").module_tokens == 0


def test_diagnostics_name_the_tool() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="32MiB", seed=0)
    llm.generate([asked(READ, WRITE)], ONE, reuse="modular", diagnostics=True)
    (output,) = llm.generate([asked(READ, LIST, WRITE)], ONE, reuse="modular", diagnostics=True)
    forms = {module.name: module.form for module in output.diagnostics.modules}
    assert forms == {"tools[0]": "anchored", "tools[1]": "new", "tools[2]": "anchored"}


def test_mark_on_a_tool_requests_modules_with_a_lifetime() -> None:
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0)
    marked = {**READ, "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    laid = llm.lay_out(asked(marked, WRITE))
    assert [part.origin.ttl_s for part in laid.parts if part.marked] == [300.0, None]
    assert not llm.lay_out(asked(READ, WRITE)).in_pieces  # without any mark, the default policy is exact


@pytest.mark.parametrize("family", FAMILIES)
def test_template_probe_is_in_no_prompt(family: str) -> None:
    assert "look_up" not in Layouts(tool_tokenizer(family)).lay_out(asked(READ)).text
