"""The formats of tool calls in answers, one row per family, detected from the chat template.

A format is the marks around calls, and the syntax of a call (readers, tagged). Formats have the names of
vLLM's tool parsers, except for the last.

If a grammar forces an answer to be calls or JSON of a known form, its text is split into content and calls. The calls
are returned in pieces, as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from inlay.api.tools.readers import KEYS, JSONEnd, JSONSyntax, PythonSyntax, QuotedSyntax, Syntax
from inlay.api.tools.tagged import TagSyntax
from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its text, or of a call.

    Args:
        content: text; "" in a piece of a call.
        call: the number of the call, from 0; None in a piece of text.
        name: of the function, only in the first piece of a call.
        arguments: a piece of JSON text.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class AnswerParser(Protocol):
    """Separates calls from text in a growing answer. The result does not depend on the division into pieces."""

    def feed(self, text: str) -> list[Delta]:
        """Add text, and return the new parts that are certain."""

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text."""


_BEHIND = r"[\s\]},]*"  # after a call: the end of the call and its list, and the comma before the next
_HEAD = re.compile(rf'{_BEHIND}\[?\s*\{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:{"|".join(KEYS)})"\s*:\s*(?=\{{)')


# A call that ends after its name starts and before its arguments.
_CUT = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]*)(?P<closed>"\s*(?:,\s*(?:"\w*(?:"\s*:?\s*)?)?)?)?$')
_OPENING = '{"name":"'  # of a call, without white space


class HeldParser:
    """An AnswerParser for calls that a grammar enforces. A truncated answer ends in a truncated call, as at OpenAI.

    Args:
        names: the known functions. A call that ends within its name is returned if only one function fits.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._rest = ""  # pending text
        self._arguments: str | None = None  # of the current call
        self._sent = 0
        self._end = JSONEnd()
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        told: list[Delta] = []
        self._rest += text
        while self._in_arguments(told) if self._arguments is not None else self._at_head(told):
            pass
        return told

    def finish(self) -> list[Delta]:
        left, self._rest = self._rest, ""
        if self._calls:
            left = re.sub(f"^{_BEHIND}", "", left)
        cut = re.sub(r"^\s*\[?\s*", "", left)
        found = _CUT.match(cut)
        if found is None:
            # The start of a call, before any name, counts as a call if there is only one function.
            began = left != "" and _OPENING.startswith("".join(cut.split()))
            return self._named("", whole=False) if began else ([Delta(left)] if left else [])
        return self._named(found["name"], whole=found["closed"] is not None)

    def _named(self, name: str, *, whole: bool) -> list[Delta]:
        """Return the call of the only function with this name or prefix; nothing if several fit."""
        fitting = [each for each in self._names if (each == name if whole else each.startswith(name))]
        return [Delta(call=self._calls, name=fitting[0])] if len(fitting) == 1 else []

    def _at_head(self, told: list[Delta]) -> bool:
        head = _HEAD.match(self._rest)
        if head is None:
            return False
        told.append(Delta(call=self._calls, name=head[1]))
        self._rest = self._rest[head.end() :]
        self._arguments, self._sent, self._end = "", 0, JSONEnd()
        return True

    def _in_arguments(self, told: list[Delta]) -> bool:
        assert self._arguments is not None, "a head was found"
        whole = self._arguments + self._rest
        end = self._end.find(whole)
        piece = whole[self._sent : end]
        if piece:
            told.append(Delta(call=self._calls, arguments=piece))
        if end is None:
            self._arguments, self._rest, self._sent = whole, "", len(whole)
            return False
        self._arguments, self._rest = None, whole[end:]
        self._calls += 1
        return True


class EitherParser:
    """An AnswerParser for calls or another form that a grammar enforces. The start of the answer decides.

    Args:
        names: the known functions.
        key: the key of a call's arguments.
    """

    def __init__(self, names: Collection[str], key: str) -> None:
        # ``calls_schema`` writes calls with the white space of Python's json
        self._names = names
        heads = [f'{{"name": {json.dumps(name)}, "{key}": {{' for name in names]
        self._heads = [*heads, *(f"[{head}" for head in heads)]
        self._start = ""
        self._calls: HeldParser | None = None
        self._text = False

    def feed(self, text: str) -> list[Delta]:
        if self._calls is not None:
            return self._calls.feed(text)
        if self._text:
            return [Delta(text)] if text else []
        self._start += text
        if self._start.startswith(tuple(self._heads)):
            self._calls = HeldParser(self._names)
            return self._calls.feed(self._start)
        if any(head.startswith(self._start) for head in self._heads):
            return []
        self._text = True
        return [Delta(self._start)]

    def finish(self) -> list[Delta]:
        if self._calls is not None:
            return self._calls.finish()
        if self._text or not self._start:
            return []
        named = re.match(r'\[?\{"name": "[\w.-]+"', self._start)  # enough to tell a call from another form
        parser = HeldParser(self._names)
        told = [*parser.feed(self._start), *parser.finish()] if named else []
        return told or [Delta(self._start)]


_JSON = JSONSyntax()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls in one family.

    Args:
        name: of the format.
        opens: the mark before a call, or before a list of calls.
        closes: the marks behind a call or a section of calls. They may be missing.
        key: the key of the arguments of calls in JSON, one of KEYS.
        syntax: the form of a call between the marks.
        section: the mark before the first call of several, in families that have one.
        inside: further marks between these.
        bare: an answer that starts with a call needs no mark.
        ids: the form of ids in its templates: "numbered" for Kimi's ``functions.weather:0``, "nine" for Mistral's nine
            letters and digits; None for any.
        harmony: answers are messages in channels, which ``api.harmony`` parses.
        shown_by: texts that a template of this family has, all of them.
        not_by: texts that it does not have.
    """

    name: str
    opens: str | None
    closes: tuple[str, ...] = ()
    key: str = "arguments"
    syntax: Syntax = _JSON
    section: str | None = None
    inside: tuple[str, ...] = ()
    bare: bool = False
    ids: Literal["numbered", "nine"] | None = None
    harmony: bool = False
    shown_by: tuple[str, ...] = ()
    not_by: tuple[str, ...] = ()

    @property
    def marks(self) -> frozenset[str]:
        """All marks of calls."""
        return frozenset(filter(None, (self.opens, self.section, *self.closes, *self.inside)))


def _deepseek(name: str, head: str, closes: str, shown_by: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        name,
        "<｜tool▁call▁begin｜>",
        (closes, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        syntax=JSONSyntax(head=head),
        section="<｜tool▁calls▁begin｜>",
        inside=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        shown_by=shown_by,
    )


#: The first row that fits a template decides. The last row fits every template.
FORMATS = (
    # Nous Hermes, Qwen 2.5 and 3, Granite 4; not families with XML inside (Qwen 3 Coder, GLM 4.5)
    ToolFormat(
        "hermes", "<tool_call>", ("</tool_call>",), shown_by=("<tool_call>",), not_by=("<function=", "<arg_key>")
    ),
    # Qwen 3 Coder and Next, Nemotron 3; they may leave out the mark of the section
    ToolFormat(
        "qwen3_coder",
        "<function=",
        ("</function>", "</tool_call>"),
        syntax=TagSyntax(r"([\w.-]+)\s*>", r"<parameter=([^>\n]+)>", "</parameter>", ("</function>", "</tool_call>")),
        section="<tool_call>",
        shown_by=("<tool_call>", "<function="),
    ),
    ToolFormat(
        "seed_oss",
        "<function=",
        ("</function>", "</seed:tool_call>"),
        syntax=TagSyntax(
            r"([\w.-]+)\s*>", r"<parameter=([^>\n]+)>", "</parameter>", ("</function>", "</seed:tool_call>")
        ),
        section="<seed:tool_call>",
        shown_by=("<seed:tool_call>",),
    ),
    # GLM 4.5 to 4.7
    ToolFormat(
        "glm45",
        "<tool_call>",
        ("</tool_call>",),
        syntax=TagSyntax(
            r"([\w.-]+)", r"<arg_key>\s*([^<]+?)\s*</arg_key>\s*<arg_value>", "</arg_value>", ("</tool_call>",)
        ),
        inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        shown_by=("<tool_call>", "<arg_key>"),
    ),
    ToolFormat(
        "minimax_m2",
        '<invoke name="',
        ("</invoke>", "</minimax:tool_call>"),
        syntax=TagSyntax(
            r'([\w.-]+)"\s*>', r'<parameter name="([^"\n]+)"\s*>', "</parameter>", ("</invoke>", "</minimax:tool_call>")
        ),
        section="<minimax:tool_call>",
        shown_by=("<minimax:tool_call>",),
    ),
    ToolFormat(
        "deepseek_v32",
        '<｜DSML｜invoke name="',
        ("</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
        syntax=TagSyntax(
            r'([\w.-]+)"\s*>',
            r'<｜DSML｜parameter name="([^"\n]+)"(?: string="(?P<text>true|false)")?\s*>',
            "</｜DSML｜parameter>",
            ("</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
        ),
        section="<｜DSML｜function_calls>",
        shown_by=("<｜DSML｜",),
    ),
    # DeepSeek V3 and R1
    _deepseek(
        "deepseek_v3",
        r"function<｜tool▁sep｜>([\w.-]+)\s*```json",
        "```<｜tool▁call▁end｜>",
        shown_by=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    _deepseek("deepseek_v31", r"([\w.-]+)<｜tool▁sep｜>", "<｜tool▁call▁end｜>", shown_by=("<｜tool▁calls▁begin｜>",)),
    ToolFormat(
        "kimi_k2",
        "<|tool_call_begin|>",
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        syntax=JSONSyntax(head=r"(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"),
        section="<|tool_calls_section_begin|>",
        inside=("<|tool_call_argument_begin|>",),
        ids="numbered",
        shown_by=("<|tool_calls_section_begin|>",),
    ),
    # from version 11 of its tokenizer, the name is before the object
    ToolFormat(
        "mistral",
        "[TOOL_CALLS]",
        syntax=JSONSyntax(head=r"([\w.-]+)(?:\[CALL_ID\][^\s\[{]*)?(?:\[ARGS\])?"),
        inside=("[CALL_ID]", "[ARGS]"),
        ids="nine",
        shown_by=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        "lfm2",
        "<|tool_call_start|>",
        ("<|tool_call_end|>",),
        syntax=PythonSyntax(),
        shown_by=("<|tool_list_start|>",),
    ),
    ToolFormat(
        "gemma4",
        "<|tool_call>",
        ("<tool_call|>",),
        syntax=QuotedSyntax('<|"|>', "<tool_call|>"),
        inside=('<|"|>',),
        shown_by=("<|tool_call>call:",),
    ),
    ToolFormat(
        "functiongemma",
        "<start_function_call>",
        ("<end_function_call>",),
        syntax=QuotedSyntax("<escape>", "<end_function_call>"),
        inside=("<escape>",),
        shown_by=("<start_function_call>",),
    ),
    # gpt-oss
    ToolFormat(
        "openai",
        "<|channel|>",
        ("<|call|>",),
        inside=("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>"),
        harmony=True,
        shown_by=("<|channel|>", "<|message|>", "commentary"),
    ),
    # Llama 4, which calls in JSON or in Python
    ToolFormat(
        "llama4_pythonic",
        "<|python_start|>",
        ("<|python_end|>",),
        key="parameters",
        syntax=PythonSyntax("parameters"),
        bare=True,
        shown_by=("<|header_start|>",),
    ),
    # Llama 3.2 and others that are told to answer in Python
    ToolFormat("pythonic", None, syntax=PythonSyntax(), bare=True, shown_by=("[func_name1(",)),
    # Llama 3.1 and 3.2
    ToolFormat(
        "llama3_json",
        "<|python_tag|>",
        key="parameters",
        syntax=JSONSyntax("parameters"),
        bare=True,
        shown_by=("<|start_header_id|>", '"parameters": '),
    ),
    # Granite 3, Phi 4 mini
    ToolFormat("granite", "<|tool_call|>", ("<|/tool_call|>",), shown_by=("<|tool_call|>",)),
    ToolFormat("json", None, bare=True),
)


@dataclass(frozen=True, slots=True)
class ModelTools:
    """The tool calls of one model.

    Args:
        format: the format of calls.
        history: its template shows past calls and results.
        parallel: an answer may have several calls. False if the template cannot show several in a conversation.
        ends: special tokens that may end an answer. They are in the text if the format's marks are special tokens,
            because then all special tokens are; otherwise empty.
    """

    format: ToolFormat
    history: bool = True
    parallel: bool = True
    ends: frozenset[str] = frozenset()


def named_format(name: str | None) -> ToolFormat | None:
    """Return the format of this name; None for None. Raises ParameterError for an unknown name."""
    known = {row.name: row for row in FORMATS}
    if name is not None and name not in known:
        raise ParameterError(f"tool_parser is {name!r}; it must be one of {', '.join(known)}")
    return known[name] if name is not None else None


def model_tools(tokenizer: PreTrainedTokenizerBase, parser: str | None = None) -> ModelTools | None:
    """Return the tool calls of a model; None if its chat template does not show tools.

    Args:
        tokenizer: the model's tokenizer.
        parser: the name of a format, for a model whose template does not show it.

    Raises:
        ParameterError: an unknown format.
    """
    named = named_format(parser)
    template = ChatTemplate(tokenizer)
    if not template.shows_tools:
        return None
    source = template.source_with_tools
    chosen = named or next(row for row in FORMATS if _fits(row, source))
    if chosen.name == "json" and all(f'"{key}"' in source for key in KEYS[1:]) and f'"{KEYS[0]}"' not in source:
        chosen = replace(chosen, key=KEYS[1], syntax=JSONSyntax(KEYS[1]))
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    seen = special & chosen.marks
    return ModelTools(
        format=chosen,
        history=template.shows_calls,
        parallel=template.shows_several_calls or not template.shows_calls,
        ends=frozenset(special - seen) if seen else frozenset(),
    )


def _fits(row: ToolFormat, source: str) -> bool:
    return all(text in source for text in row.shown_by) and not any(text in source for text in row.not_by)
