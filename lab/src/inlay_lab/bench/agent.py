"""Plays an agent: turn after turn with tools and files in the prompt, and counts the tokens that each turn computes.

Answers are scripted, because a small model cannot drive an agent. Each is forced behind its prompt, so it is stored as
a generated answer is. In the second run a tool is added and a file changes its place in the middle.

llama.cpp's server, where there is one, gets the same token ids, and each answer behind its prompt. It reads the prefix
that a prompt shares with the last one. It runs a random model of the same shape.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inlay import LLM, SamplingParams
from inlay.errors import ContextError
from inlay.models.spec import dtype_name
from inlay_lab.bench.engines.gguf_file import why_not
from inlay_lab.bench.engines.llama_server import LlamaServer, find_server, llama_server
from inlay_lab.bench.machine import Progress, describe_machine
from inlay_lab.options import check_least

#: The structure of Qwen's template: the system text, then each tool on a line of its own.
TEMPLATE = """\
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return a JSON object with the name and the arguments.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[1:] %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
POLICIES = ("exact", "modular")
_END = "<|im_end|>\n"
_FILES = 3  # blocks of the system prompt
_WORDS = ("file", "folder", "line", "value", "path", "name", "time", "size", "user", "error", "result", "table")


@dataclass(frozen=True, kw_only=True)
class AgentSetting:
    """Options of the agent benchmark. Raises ParameterError.

    Attributes:
        turns: questions of one conversation.
        tools: functions that the agent may call.
        tokens: of the tools' definitions and the files together; half of them each.
        new: tokens of each question, and half as many of each answer.
        thinking: tokens of reasoning in front of each answer, which later prompts leave out.
        added_at: the turn, from 1, at which the second run adds a tool.
        moved_at: the turn at which it moves the first file to the end.
        llama_server: llama.cpp's server. None for the one on PATH.
    """

    model: str
    turns: int = 20
    tools: int = 12
    tokens: int = 6000
    new: int = 80
    thinking: int = 0
    added_at: int = 10
    moved_at: int = 15
    dtype: str = "auto"
    quantization: str | None = None
    llama_server: Path | None = None

    def __post_init__(self) -> None:
        check_least(1, turns=self.turns, tools=self.tools)
        check_least(100 * self.tools, tokens=self.tokens)
        check_least(16, new=self.new)
        check_least(0, thinking=self.thinking)


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn: its prompt, its scripted answer, and the tokens of both."""

    prompt: dict[str, Any]
    answer: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def measure_agent(setting: AgentSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Return computed tokens and seconds to the first token, for each turn and column of both runs."""
    program = find_server(setting.llama_server)
    llm = LLM(setting.model, dtype=setting.dtype, quantization=setting.quantization, chat_template=TEMPLATE, seed=0)
    try:
        runs = {name: _turns(llm, setting, changes=name == "changed") for name in ("same", "changed")}
        _check_fits(llm, runs["changed"])
        config, dtype = llm.loaded.model.config, dtype_name(llm.loaded.model.dtype)
        why = why_not(config, dtype, setting.quantization, ["gguf"])
        if program is None:
            why = "there is no llama-server on PATH; give one with --llama-server PATH"
        policies = POLICIES if llm.client.model.highest is None else ("exact",)
        steps = _Steps(progress, (len(policies) + (why is None)) * sum(map(len, runs.values())))
        tables: dict[str, dict[str, Any]] = {name: {} for name in runs}
        for name, turns in runs.items():
            for policy in policies:
                llm.reset_prefix_cache()
                tables[name][policy] = [_played(llm, turn, policy) for turn in steps(turns)]
        if program is not None and why is None:
            longest = max(len(turn.prompt_ids) + len(turn.answer_ids) for turns in runs.values() for turn in turns)
            for name, turns in runs.items():  # a new server for each, because it keeps earlier prompts
                with llama_server(program, config, longest + 1, setting.quantization) as server:
                    tables[name]["llama-server"] = [_asked(server, turn) for turn in steps(turns)]
        lengths = {name: [len(turn.prompt_ids) for turn in turns] for name, turns in runs.items()}
    finally:
        llm.shutdown()
    return {
        "setting": asdict(setting) | {"llama_server": None if program is None else str(program)},
        "prompt_tokens": lengths,
        "runs": tables,
        "without_llama": why,
        "machine": describe_machine(),
    }


class _Steps:
    """Reports progress over several loops."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, turns: Sequence[AgentTurn]) -> Iterator[AgentTurn]:
        for turn in turns:
            yield turn
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)


def _played(llm: LLM, turn: AgentTurn, policy: str) -> dict[str, float]:
    """Ask for the first token, and force the answer."""
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    (output,) = llm.generate([turn.prompt], one, reuse=policy)
    llm.distributions([turn.prompt], [list(turn.answer_ids)], reuse=policy)
    return {"computed_tokens": output.usage.computed_tokens, "ttft_s": output.metrics.ttft_s or 0.0}


def _asked(server: LlamaServer, turn: AgentTurn) -> dict[str, float]:
    """Ask for the first token, and give the answer."""
    found = server.first_token(turn.prompt_ids)
    server.keep(turn.prompt_ids + turn.answer_ids)
    return {"computed_tokens": found.computed_tokens, "ttft_s": found.seconds}


def _turns(llm: LLM, setting: AgentSetting, *, changes: bool) -> list[AgentTurn]:
    """Write the conversation."""
    draw = random.Random(0)
    share = setting.tokens // 2
    tools = [_tool(draw, number, share // setting.tools) for number in range(setting.tools + 1)]
    tools, added = tools[:-1], tools[-1]
    files = [f"File {number}.\n{_text(draw, share // _FILES)}\n" for number in range(_FILES)]
    history: list[dict[str, str]] = []
    turns: list[AgentTurn] = []
    for number in range(1, setting.turns + 1):
        if changes and number == setting.added_at:
            tools = [*tools[: len(tools) // 2], added, *tools[len(tools) // 2 :]]
        if changes and number == setting.moved_at:
            files = [*files[1:], files[0]]
        blocks = ["You work on the files below. Answer in one sentence.\n", *files]
        system = {"role": "system", "content": [{"type": "text", "text": block} for block in blocks]}
        history.append({"role": "user", "content": f"Step {number}. {_text(draw, setting.new)}"})
        prompt = {"messages": [system, *history], "tools": tools}
        answer = f"Step {number} is done. {_text(draw, setting.new // 2)}"
        thought = f"<think>{_text(random.Random(number), setting.thinking)}</think>" if setting.thinking else ""
        ids = llm.lay_out(prompt, reuse="exact").ids
        said = llm.encoder.text(thought + answer) + llm.encoder.template(_END)
        turns.append(AgentTurn(prompt, answer, ids, said))
        history.append({"role": "assistant", "content": answer})
    return turns


def _check_fits(llm: LLM, turns: Sequence[AgentTurn]) -> None:
    needed, most = len(turns[-1].prompt_ids) + len(turns[-1].answer_ids), llm.loaded.spec.max_positions
    if needed > most:
        raise ContextError(f"the last turn has {needed:,} tokens and the model's context {most:,}; use fewer tokens")


def _tool(draw: random.Random, number: int, tokens: int) -> dict[str, Any]:
    """Return a tool with a definition of about this many bytes as JSON."""
    name = f"{draw.choice(_WORDS)}_{number}"
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    function = {"name": name, "description": "", "parameters": parameters}
    function["description"] = _text(draw, max(16, tokens - len(json.dumps(function)) - 40))
    return {"type": "function", "function": function}


def _text(draw: random.Random, tokens: int) -> str:
    """Return words of about this many bytes, which are the tokens of a random model."""
    words: list[str] = []
    while sum(map(len, words)) + len(words) < tokens:
        words.append(draw.choice(_WORDS))
    return " ".join(words) + "."
