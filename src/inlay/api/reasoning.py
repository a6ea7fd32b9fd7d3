"""Reasoning before an answer: its marks, one row per family, and the parser of answers.

The family is detected from the chat template. Formats have the names of vLLM's reasoning parsers. A request's effort
becomes variables of the chat template.

An answer in OpenAI's harmony format has messages, each with a channel and perhaps a recipient.

``<|channel|>analysis<|message|>…<|end|>`` is reasoning, and ``final`` is content. A ``commentary`` to
``functions.weather`` is a call of that function, whose arguments are returned as they come. Any other commentary is
content. A message to an unknown recipient is returned as it was written.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.api.failures import BodyError
from inlay.api.tools.formats import Delta, Marks
from inlay.api.tools.readers import LONGEST_HEAD, Functions
from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.inputs import template_variables

__all__ = [
    "EndMarks",
    "ModelReasoning",
    "ReasoningParser",
    "ReasoningUse",
    "Split",
    "Thought",
    "model_reasoning",
]
OFF = "off"
"""The parser name for no parsing: reasoning stays in the answer's text."""
#: Template variables that switch reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The reasoning format of one family.

    Args:
        name: of the format.
        opens: the mark before it.
        closes: the mark after it.
        assumed: an answer starts with reasoning even without the opening mark. Otherwise the template or the answer
            must have the mark.
        harmony: answers are messages in channels, which ``api.harmony`` parses.
        shown_by: texts that a template of this family has, all of them; none for the closing mark.
    """

    name: str
    opens: str
    closes: str
    assumed: bool = False
    harmony: bool = False
    shown_by: tuple[str, ...] = ()


#: The first row that fits a template decides.
FORMATS = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        harmony=True,
        shown_by=("<|channel|>", "<|message|>", "analysis"),
    ),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
)
NAMES = tuple(row.name for row in FORMATS)


@dataclass(frozen=True, slots=True, eq=False)
class ModelReasoning:
    """The reasoning of one model.

    Args:
        format: its format; None for a model without reasoning.
        variables: the variables of its chat template.
        close_id: the token of the closing mark; None if it is not one token.
        decode: returns the text of tokens.
        ends: special tokens that may end an answer. They are in the text if the format's marks are special tokens,
            because then all special tokens are; otherwise empty.
    """

    format: ReasoningFormat | None
    variables: frozenset[str]
    close_id: int | None
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[str] = frozenset()


def check_parser(name: str | None) -> None:
    """Raise ParameterError for an unknown format."""
    if name is not None and name not in (OFF, *NAMES):
        raise ParameterError(f"reasoning_parser is {name!r}; it must be one of {', '.join((OFF, *NAMES))}")


def model_reasoning(tokenizer: PreTrainedTokenizerBase, parser: str | None = None) -> ModelReasoning:
    """Return the reasoning of a model.

    Args:
        tokenizer: the model's tokenizer.
        parser: the name of a format, for a model whose template does not show it, or OFF.

    Raises:
        ParameterError: an unknown format.
    """
    check_parser(parser)
    source = ChatTemplate(tokenizer).source if tokenizer.chat_template else ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    fitting = (row for row in FORMATS if all(text in source for text in row.shown_by or (row.closes,)))
    chosen = next(fitting, None) if parser is None else next((row for row in FORMATS if row.name == parser), None)
    marked = [] if chosen is None else [one for one in special if one in chosen.opens or one in chosen.closes]
    ids = [] if chosen is None else tokenizer.encode(chosen.closes, add_special_tokens=False)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    return ModelReasoning(
        chosen,
        template_variables(tokenizer),
        ids[0] if len(ids) == 1 else None,
        decode,
        frozenset(special - set(marked)) if marked else frozenset(),
    )


USUAL = "medium"
"""Asks for the model's normal behavior."""


def effort_variables(effort: str | None, model: ModelReasoning | None) -> dict[str, Any] | None:
    """Return the template variables for an effort; None if the template does not support it.

    Args:
        effort: "none" for no reasoning, or a level such as "high". None for the template's own default.
        model: the model's reasoning.
    """
    known = frozenset[str]() if model is None else model.variables
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort == "none" and (found := _switches(model)):
        return {found[0]: False}
    if effort == USUAL or (effort == "none" and not reasons(model)):
        return {}
    return None


def switch_on(model: ModelReasoning | None) -> dict[str, Any]:
    """Return the template variables that ask for reasoning; empty for a template without a switch."""
    return dict.fromkeys(_switches(model)[:1], True)


def variables_for(effort: str | None, model: ModelReasoning | None, field: str) -> dict[str, Any]:
    """Return the template variables for an effort. Raises BodyError if the template does not support it.

    Args:
        effort: see ``effort_variables``, as for ``model``.
        field: the body's field that has the effort.
    """
    found = effort_variables(effort, model)
    if found is not None:
        return found
    allowed = f'"{USUAL}"' if reasons(model) and not _switches(model) else f'"none" or "{USUAL}"'
    message = f"{field} is {effort!r}, but this model's chat template does not support it; write {allowed}"
    raise BodyError(f"{message}, or leave it out", param=field)


def reasons(model: ModelReasoning | None) -> bool:
    """True if the model reasons before its answers."""
    return model is not None and model.format is not None


def _switches(model: ModelReasoning | None) -> list[str]:
    return [] if model is None else [name for name in SWITCHES if name in model.variables]


class _At(Enum):
    START = "start"  # of an answer that may open with reasoning
    INSIDE = "inside"
    BEHIND = "behind"  # after the closing mark, before any content
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Thought:
    """New text of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """New text of both kinds."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningUse:
    """The parsing of the answers to one request.

    Args:
        model: the model's reasoning, with a format.
        include: send the reasoning to the client.
        last: the message that the answer continues, or None.
    """

    model: ModelReasoning
    include: bool = True
    last: str | None = None

    @property
    def format(self) -> ReasoningFormat:
        assert self.model.format is not None, "there is no use of it else"
        return self.model.format

    @property
    def is_over(self) -> bool:
        """True if the answer continues a message without reasoning, or with complete reasoning."""
        return self.last is not None and self._begins("") is _At.OUTSIDE

    @property
    def may_begin(self) -> bool:
        """True if an answer may start with the opening mark, and has no reasoning otherwise."""
        return self._begins("") is _At.START

    def parser(self, prompt: str) -> ReasoningParser:
        """Return a parser for one answer. ``prompt`` is the text of the chat template."""
        return ReasoningParser(self.format, self._begins(prompt))

    def count(self, prompt: str, tokens: Sequence[int]) -> int:
        """Count the reasoning tokens of an answer, with the marks."""
        begins = self._begins(prompt)
        if begins is _At.OUTSIDE:
            return 0
        if begins is _At.START and not self.model.decode(tokens[:64]).lstrip().startswith(self.format.opens):
            return 0
        if self.model.close_id is not None:
            return tokens.index(self.model.close_id) + 1 if self.model.close_id in tokens else len(tokens)
        closed = bisect_left(range(len(tokens)), True, key=lambda n: self._closes(tokens[: n + 1]))
        return min(closed + 1, len(tokens))

    def _closes(self, tokens: Sequence[int]) -> bool:
        return self.format.closes in self.model.decode(tokens)

    def _begins(self, prompt: str) -> _At:
        said, opens, closes = prompt.rstrip(), self.format.opens, self.format.closes
        if self.last is not None and (opens in self.last or closes in self.last):
            return _At.INSIDE if self.last.rfind(opens) > self.last.rfind(closes) else _At.OUTSIDE
        if said.endswith(opens.rstrip()):
            return _At.INSIDE
        if said.endswith(closes) or self.last:
            return _At.OUTSIDE
        return _At.INSIDE if self.format.assumed else _At.START


class EndMarks:
    """Removes a special token at the end of an answer whose text has special tokens.

    Args:
        marks: the tokens.
    """

    def __init__(self, marks: frozenset[str]) -> None:
        self._marks = marks
        self._starts = {mark[:length] for mark in marks for length in range(1, len(mark) + 1)}
        self._longest = max(map(len, marks), default=0)
        self._rest = ""

    def feed(self, text: str) -> str:
        """Add text, and return the new text that is certain."""
        self._rest += text
        lengths = range(min(self._longest, len(self._rest)), 0, -1)
        held = next((length for length in lengths if self._rest[-length:] in self._starts), 0)
        certain = len(self._rest) - held
        told, self._rest = self._rest[:certain], self._rest[certain:]
        return told

    def finish(self) -> str:
        """Return the rest at the end of the answer."""
        return "" if self._rest in self._marks else self._rest


class ReasoningParser:
    """Separates reasoning from content. The result does not depend on the division of the text into pieces.

    White space around reasoning and before the content is dropped, because templates add their own.
    """

    def __init__(self, marks: ReasoningFormat, at: _At) -> None:
        self._marks = marks
        self._at = at
        self._rest = ""
        self._begun = False  # True once any reasoning was returned
        self._opened = False  # True once the optional opening mark was read

    def feed(self, text: str) -> Split:
        """Add text, and return the new parts that are certain."""
        self._rest += text
        if self._at is _At.START:
            self._start()
        reasoning = self._inside() if self._at is _At.INSIDE else ""
        if self._at is _At.BEHIND:
            self._rest = self._rest.lstrip()
            if self._rest:
                self._at = _At.OUTSIDE
        content = ""
        if self._at is _At.OUTSIDE:
            content, self._rest = self._rest, ""
        return Split(reasoning, content)

    def finish(self) -> Split:
        """Return the rest at the end of the text."""
        rest, self._rest = self._rest, ""
        if self._at is _At.INSIDE:
            return Split(reasoning=rest.rstrip() if self._begun else rest.strip())
        return Split(content=rest) if self._at is _At.START else Split()

    def _start(self) -> None:
        said, opens = self._rest.lstrip(), self._marks.opens
        if said.startswith(opens):
            self._at, self._rest = _At.INSIDE, said[len(opens) :]
        elif not opens.startswith(said):
            self._at = _At.OUTSIDE

    def _inside(self) -> str:
        opens, closes = self._marks.opens, self._marks.closes
        if not self._begun:
            self._rest = self._rest.lstrip()
            if not self._opened and self._rest.startswith(opens):  # some models repeat the mark of their template
                self._opened, self._rest = True, self._rest[len(opens) :].lstrip()
            elif not self._opened and opens.startswith(self._rest):
                return ""
        end = self._rest.find(closes)
        if end >= 0:
            told, self._rest = self._rest[:end].rstrip(), self._rest[end + len(closes) :]
            self._at = _At.BEHIND
            return told
        held = next((n for n in range(len(closes) - 1, 0, -1) if self._rest.endswith(closes[:n])), 0)
        told = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(told) :]
        self._begun = self._begun or bool(told)
        return told


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
#: The marks behind a message. The last two end the answer.
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_HEADER = re.compile(r"(?:<\|start\|>)?\s*(?:assistant)?[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?")
_BEGINNINGS = (START, CHANNEL, "assistant", " to=")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<|\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTION = "functions."


class HarmonyParser:
    """Separates reasoning, content and calls in a growing answer. The result does not depend on its division.

    Args:
        functions: the known functions.
        parallel: the answer continues after its first call.
    """

    def __init__(self, functions: Functions, *, parallel: bool) -> None:
        self._functions = functions
        self._parallel = parallel
        self._ends = Marks((*ENDS, START))
        self._rest = ""
        self._header: str | None = ""  # the header that is being read; None inside a message
        #: The current message: reasoning, a call by its number, or content.
        self._kind: type[Thought] | int | None = None
        self._thoughts = 0
        self._calls = 0
        self._over = False
        self._told: list[Thought | Delta] = []

    def feed(self, text: str) -> list[Thought | Delta]:
        """Add text, and return the new pieces that are certain."""
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Thought | Delta]:
        """Return the rest at the end of the answer."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Thought | Delta]:
        while not self._over and (self._read_header(final) if self._header is not None else self._read_body(final)):
            pass
        told, self._told = self._told, []
        return told

    def _read_header(self, final: bool) -> bool:
        """Read the header of a message, up to its mark. Text that is no header is content."""
        at = self._rest.find(MESSAGE)
        header = self._rest if at < 0 else self._rest[:at]
        if at >= 0 and header.startswith(_BEGINNINGS) and _HEADER.fullmatch(header):
            self._rest = self._rest[at + len(MESSAGE) :]
            self._open(header)
            return True
        if at < 0 and not final and len(header) <= LONGEST_HEAD and _may_begin(header):
            return False
        if final and (self._rest in ENDS or (self._rest.startswith("<|") and _HEADER.fullmatch(self._rest))):
            self._rest = ""  # the answer ends before its next message
        self._header, self._kind = None, None
        return bool(self._rest)

    def _open(self, header: str) -> None:
        """Begin the message with this header."""
        self._header = None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTION) if recipient else None
        if name is not None and name in self._functions:
            if self._calls and not self._parallel:
                self._over = True
                return
            self._kind = self._calls
            self._told.append(Delta(call=self._calls, name=name))
            self._calls += 1
        elif name is not None:
            self._kind = None
            self._say(header + MESSAGE)
        elif channel is not None and channel[1] == "analysis":
            self._kind = Thought
            self._thoughts += 1
            if self._thoughts > 1:
                self._say("\n")
        else:
            self._kind = None

    def _read_body(self, final: bool) -> bool:
        found = self._ends.find(self._rest, final)
        if found is None:
            certain = len(self._rest) - (0 if final else self._ends.held(self._rest))
            self._say(self._rest[:certain])
            self._rest = self._rest[certain:]
            return False
        self._say(self._rest[: found.start()])
        self._rest = self._rest[found.start() if found[0] == START else found.end() :]
        self._header = ""
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        last = self._told[-1] if self._told else None
        if self._kind is Thought:
            if isinstance(last, Thought):
                text = last.text + text
                self._told.pop()
            self._told.append(Thought(text))
        elif isinstance(self._kind, int):
            self._told.append(Delta(call=self._kind, arguments=text))
        else:
            self._told.append(Delta(text))


def _may_begin(header: str) -> bool:
    """True if this text is the start of a header, or may become one."""
    return any(header.startswith(one) or one.startswith(header) for one in _BEGINNINGS)


def forced(functions: Functions, form: Any = None) -> dict[str, Any]:
    """Return the structural tag of an answer that calls one of these functions.

    Args:
        functions: the functions and the schemas of their arguments.
        form: the schema of an answer without a call; None if there must be a call.
    """
    structures: list[dict[str, Any]] = [
        {"begin": f"{CHANNEL}commentary to={_FUNCTION}{name} <|constrain|>json{MESSAGE}", "schema": schema, "end": ""}
        for name, schema in functions.items()
    ]
    if form is not None:
        structures.append({"begin": f"{CHANNEL}final{MESSAGE}", "schema": form, "end": ""})
    return {"structures": structures, "triggers": [CHANNEL], "forced": True, "lead": f"{START}assistant"}
