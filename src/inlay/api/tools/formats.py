"""The formats of tool calls in answers, one row per family, detected from the chat template.

A format is the marks around calls, and the syntax of a call (readers, tagged). Formats have the names of
vLLM's tool parsers, except for the last.

If a grammar forces an answer to be calls or JSON of a known form, its text is split into content and calls. The calls
are returned in pieces, as they arrive.

An answer without a grammar has text, and calls in the format of the model's family. White space around calls is
dropped, because chat templates add their own. So the next turn of the conversation finds its history in the cache. Text
that looked like a call and is none is returned unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from inlay.api.tools.readers import KEYS, CallReader, Functions, JSONEnd, JSONSyntax, PythonSyntax, QuotedSyntax, Syntax
from inlay.api.tools.tagged import TagSyntax
from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate


class Marks:
    """Finds marks in a growing text."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {mark[:length] for mark in longest_first for length in range(1, len(mark))}
        self._longest = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, final: bool) -> re.Match[str] | None:
        """Return the first mark in a text; None if it may be the start of a longer one."""
        found = self._any.search(text)
        unsure = found is not None and found.end() == len(text) and found[0] in self._beginnings and not final
        return None if unsure else found

    def held(self, text: str) -> int:
        """Return the number of last characters that may be the start of a mark."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)


class FreeParser:
    """An AnswerParser for answers without a grammar.

    Each step reads the pending text, and returns True if more can be done.

    Args:
        tools: the model's format of calls.
        functions: the known functions.
        parallel: the answer continues after its first call.
    """

    def __init__(self, tools: ModelTools, functions: Functions, *, parallel: bool) -> None:
        self._format = tools.format
        self._functions = functions
        self._parallel = parallel
        self._starts = frozenset(filter(None, (tools.format.section, tools.format.opens)))
        self._marks = Marks({*tools.ends, *self._starts})
        self._rest = ""
        self._white = ""  # white space before _rest; returned if text follows
        self._before = ""  # text before a possible call; returned if it is no call
        self._reader: CallReader | None = None
        self._begun = False  # True once the reader has begun a call
        self._calls = 0
        self._called = False  # True if the last returned piece is a call
        self._told: list[Delta] = []
        self._step: Callable[[bool], bool] = self._begin if tools.format.bare else self._text

    def feed(self, text: str) -> list[Delta]:
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        told = self._run(final=True)
        return told if self._called or not self._white else [*told, Delta(self._white)]

    def _run(self, *, final: bool) -> list[Delta]:
        while self._step(final):
            pass
        told, self._told = self._told, []
        return told

    def _begin(self, final: bool) -> bool:
        """Read the start of an answer that may be a call without a mark."""
        start = self._rest.lstrip()
        if not start and not final:
            return False
        if start[:1] in ("{", "["):
            self._open(self._rest[: len(self._rest) - len(start)], start)
        else:
            self._step = self._text
        return True

    def _text(self, final: bool) -> bool:
        """Read text up to the next mark. A special token that is no mark of a call may be the end of the answer."""
        found = self._marks.find(self._rest, final)
        if found is None:
            return self._say_up_to(len(self._rest) - (0 if final else self._marks.held(self._rest)))
        if found[0] in self._starts:
            self._say_up_to(found.start())
            self._rest = self._rest[len(found[0]) :]
            if found[0] == self._format.opens:
                self._open(found[0], self._rest)
            else:
                self._before, self._step = found[0], self._section
            return True
        if found.end() < len(self._rest):
            self._say_up_to(found.end())
            return True
        self._say_up_to(found.start())
        if final:
            self._rest = ""
        return False

    def _section(self, final: bool) -> bool:
        """Read the mark that begins a call, behind the mark that begins a section of calls."""
        rest, opens = self._rest.lstrip(), self._format.opens or ""
        if rest.startswith(opens):
            self._open(self._before + self._rest[: len(self._rest) - len(rest)] + opens, rest[len(opens) :])
            return True
        if opens.startswith(rest) and not final:
            return False
        return self._refuse()

    def _say_up_to(self, index: int) -> bool:
        self._say(self._rest[:index])
        self._rest = self._rest[index:]
        return False

    def _open(self, before: str, rest: str) -> None:
        """Start a possible call. ``before`` is the text before it."""
        self._before, self._rest, self._begun = before, rest, False
        self._reader = self._format.syntax.reader(self._functions)
        self._step = self._call

    def _call(self, final: bool) -> bool:
        """Read calls after a mark, up to their end."""
        assert self._reader is not None, "it was opened"
        reading = self._reader.read(self._rest, final)
        self._rest = self._rest[reading.used :]
        for name, arguments in reading.pieces:
            if name is not None and self._begun and not self._parallel:
                self._step = self._over
                return True
            self._tell(name, arguments)
        if not reading.over:
            return False
        if not self._begun:
            return self._refuse()
        self._step = self._behind if self._parallel else self._over
        return True

    def _refuse(self) -> bool:
        """Return to text, which may hold marks, because this is no call."""
        self._step = self._text
        self._say(self._before)
        return True

    def _tell(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self._calls += 1
            self._begun = self._called = True
            self._white = ""
            self._told.append(Delta(call=self._calls - 1, name=name))
        elif arguments:
            last = self._told[-1] if self._told else None
            if last is not None and last.call == self._calls - 1 and last.name is None:
                arguments = self._told.pop().arguments + arguments
            self._told.append(Delta(call=self._calls - 1, arguments=arguments))

    def _behind(self, final: bool) -> bool:
        """Read the closing marks or another call, after a call."""
        self._rest = self._rest.lstrip()
        closes = self._format.closes
        if found := next((mark for mark in closes if self._rest.startswith(mark)), None):
            self._rest = self._rest[len(found) :]
            return True
        if not final and (not self._rest or any(mark.startswith(self._rest) for mark in closes)):
            return False
        if self._format.bare and self._rest[:1] == ";":  # Llama separates calls so
            following = self._rest[1:].lstrip()
            if not following and not final:
                return False
            if following[:1] in ("{", "["):
                self._open(self._rest[: len(self._rest) - len(following)], following)
                return True
        self._step = self._text
        return True

    def _over(self, final: bool) -> bool:
        self._rest = ""
        return False

    def _say(self, text: str) -> None:
        if self._called:
            text = text.lstrip()
        text = self._white + text
        said = text.rstrip()
        self._white = text[len(said) :]
        if not said:
            return
        self._called = False
        if self._told and self._told[-1].call is None:
            said = self._told.pop().content + said
        self._told.append(Delta(said))


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
