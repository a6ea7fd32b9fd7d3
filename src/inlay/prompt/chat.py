"""Chat turns in the model's own template.

A template is rendered whole, with a sentinel for the body of every turn. The rendering is split at the sentinels into
the pieces before, between and after the turns. So inlay supports any template without knowing it.

Tools and tool calls are rendered unchanged, since a template may write them in any way. Results of tools may be, too.
Seams (see ``tokens.Seams``) keep their texts from becoming special tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cached_property, lru_cache
from itertools import accumulate, chain, combinations, pairwise, product
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.errors import ModelError
from inlay.prompt.inputs import ChatOptions, free_variables
from inlay.prompt.tokens import Seams, at_seams, common_length
from inlay.prompt.tool_texts import ToolFinder, ToolTexts

logger = logging.getLogger(__name__)


_NAME = "arguments"  # under which a template that lists arguments by name sees such a text


class VerbatimArguments:
    """Arguments of calls that are texts, not objects. Each is replaced by a mark while the template renders.

    A template writes arguments as JSON, as they are, or each by its name. A text would come out quoted, or not at all.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._messages = messages
        found = [_arguments(call) for message in messages for call in message.get("tool_calls") or ()]
        self.texts = {_mark(text): text for text in found if isinstance(text, str)}

    def as_texts(self) -> list[dict[str, Any]]:
        """The messages with marks as arguments."""
        return self._with(lambda mark: mark)

    def as_objects(self) -> list[dict[str, Any]]:
        """Return the messages with an object that contains the mark as arguments."""
        return self._with(lambda mark: {_NAME: mark})

    def all_as_texts(self) -> list[dict[str, Any]]:
        """The messages with marks as arguments, and objects as JSON, for templates that join texts."""
        return self._with(lambda mark: mark, objects=True)

    def are_shown(self, rendered: str) -> bool:
        """Return whether a rendering has all marks."""
        return all(mark in rendered for mark in self.texts)

    def put(self, rendered: str) -> str:
        """The rendering with the texts in place of their marks, and of the JSON that these stand in."""
        for mark, text in self.texts.items():
            written = rf'\{{\s*"{_NAME}":\s*"{mark}"\s*\}}|"{mark}"|{mark}'
            rendered = text.join(re.split(written, rendered))
        return rendered

    def _with(self, form: Callable[[str], Any], *, objects: bool = False) -> list[dict[str, Any]]:
        return [
            {**message, "tool_calls": [_replaced(call, form, objects=objects) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else dict(message)
            for message in self._messages
        ]


def _replaced(call: Mapping[str, Any], form: Callable[[str], Any], *, objects: bool) -> Mapping[str, Any]:
    given = _arguments(call)
    if isinstance(given, str):
        made = form(_mark(given))
    elif objects:
        made = json.dumps(given, ensure_ascii=False)
    else:
        return call
    return {**call, "function": {**call["function"], "arguments": made}}


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments")


def _mark(text: str) -> str:
    return f"@arguments-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:24]}@"


_SENTINEL = "7310946{:04d}9512683"  # digits survive a template that changes letter case
_SENTINELS = re.compile(r"7310946([0-9]{4,6})9512683")
_BEFORE, _AFTER = "\n\t\n", "\n \n"  # white space around a body shows what the template strips
_STRIPPED = ("", "\n", None)
_END = f"{secrets.randbelow(10**24):024d}"  # behind a continued message; the digits are secret
_CLOCK = "strftime_now"  # transformers gives templates the time only under this name
_DAYS = (date(2001, 2, 3), date(2014, 11, 25))  # they differ in each part of a date
_DATE_CODES = [f"%-{code}" for code in "dmyHIMSj"] + [f"%{code}" for code in "aAbBcdDeFgGHIjmMpRSTuUVwWxXyYzZ"]
#: Put in front of a template, because transformers gives templates no functions of a caller.
_STOPPED_CLOCK = (
    "{{% macro strftime_now(format) %}}{{% set found = namespace(text=format) %}}{{% for code, text in {shown} %}}"
    "{{% set found.text = found.text.replace(code, text) %}}{{% endfor %}}{{{{ found.text }}}}{{% endmacro %}}\n"
)
_DATE_MARK = "7310946"
_DATE_CHECKS = 64  # kinds of conversations
_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
_ROLES_SHOWN = 20  # roles listed in a message
_REMEMBERED_TURNS = 256  # longer conversations are not cached, because any client can send many

Turn = str | Mapping[str, Any]
"""A turn without its body (a role, or a message without content), or a whole message that is rendered unchanged."""

Tools = Sequence[Mapping[str, Any]]
"""The tools of the model in OpenAI's form: ``{"type": "function", "function": {"name", "parameters"?, …}}``."""

# Probes for a template's handling of tools. Mistral's template needs ids of nine letters and digits.
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "Which one."}}},
    },
}
_QUESTION = {"role": "user", "content": "What is it?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "arbalest"}}}
_ANSWERED = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "7310946"}
#: Probes for the form of message contents. Some templates refuse system turns or answers.
_PROBES = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
_RESULT = '"A bow\\", of steel.\n'


@dataclass(frozen=True, slots=True)
class Cut:
    """A rendering of turns without the bodies that were cut out.

    Args:
        pieces: the texts around the bodies, one more than there are bodies.
        order: the turn numbers of these bodies in the order of the rendering. Templates may move system turns.
    """

    pieces: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """The characters that a template strips from the ends of a turn's body; None for all white space."""

    left: str | None = ""
    right: str | None = ""

    def start(self, text: str) -> str:
        return text.lstrip(self.left)

    def end(self, text: str) -> str:
        return text.rstrip(self.right)


class ChatTemplate:
    """The chat template of one tokenizer, as pieces around the bodies of turns.

    Args:
        variables: the template's variables beside messages and tools.
        day: the date that the template writes. None for today's.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None, day: date | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._day = day
        added = tokenizer.added_tokens_decoder.values()
        self._seams = Seams(token.content for token in added)
        # Templates look for the model's own tokens, such as </think>, in past answers.
        self._answer_seams = Seams(token.content for token in added if token.special)
        self._variables: dict[str, Any] = {} if variables is None else self._seams.put(variables)
        #: The kinds of warnings that were logged: each is once.
        self.warned: set[str] = set()
        #: The kinds of conversations that were checked for the date.
        self._dated: set[tuple[object, ...]] = set()
        self._cuts = lru_cache(maxsize=1024)(self._find_cut)
        self._trims = lru_cache(maxsize=1024)(self._find_trims)

    @property
    def exists(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    def told(self, options: ChatOptions) -> ChatTemplate:
        """Return this template with a conversation's variables. Raises ParameterError for an unknown variable."""
        variables = options.given_to(self._tokenizer)
        if not variables:
            return self
        # Not cached: faster requests would reveal that another tenant uses these variables.
        return self._with(variables, self._day)

    def _with(self, variables: Mapping[str, Any], day: date | None) -> ChatTemplate:
        made = ChatTemplate(self._tokenizer, variables, day)
        made.warned, made._dated = self.warned, self._dated
        return made

    @property
    def source(self) -> str:
        """The template's text. Of several templates, the one for conversations without tools."""
        return str(self._tokenizer.get_chat_template())

    @property
    def source_with_tools(self) -> str:
        """The template's text. Of several templates, the one for conversations with tools."""
        return str(self._tokenizer.get_chat_template(tools=[_TOOL]))

    @cached_property
    def tells_time(self) -> bool:
        """True if the template asks for today's date or the time, so that its text may change from day to day."""
        if self._day is not None:
            return False
        templates = self._tokenizer.chat_template
        texts = templates.values() if isinstance(templates, Mapping) else [templates]
        return any(_CLOCK in str(text) for text in texts)

    def warn_of_date(self, first: Mapping[str, Any], tools: Tools | None) -> None:
        """Warn once if the template writes today's date into a conversation.

        Args:
            first: its first message. Templates write the date beside the system text.
        """
        if not self.tells_time:
            return
        system = first["role"] in ("system", "developer")
        kind = (system, tools is not None, *sorted(self._variables))
        if kind in self._dated or len(self._dated) >= _DATE_CHECKS:
            return
        self._dated.add(kind)
        messages = [first, _QUESTION] if system else [_QUESTION]
        try:
            if not self._changes_daily(messages, tools, self._variables):
                return
        except ModelError:  # the real conversation tells why
            return
        name = self._date_variable(messages, tools)
        given = "set template_date" if name is None else f"set template_date, or give {name} in chat_template_kwargs"
        self.warn_once(
            "the chat template writes today's date into the conversation, so the stored text behind it is of no use "
            f"on the next day: {given}, and write the date into the last message"
        )

    def _date_variable(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> str | None:
        """Return the variable that the template shows in place of the date. None without one."""
        for name in free_variables(self._tokenizer):
            given = {**self._variables, name: _DATE_MARK}
            try:
                shown = _DATE_MARK in self._with(given, None).render(messages, tools=tools)
                if shown and not self._changes_daily(messages, tools, given):
                    return name
            except ModelError:  # the variable is no text
                continue
        return None

    def _changes_daily(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, variables: Mapping[str, Any]
    ) -> bool:
        """True if the rendering differs between two days."""
        one, other = (self._with(variables, day).render(messages, tools=tools) for day in _DAYS)
        return one != other

    @cached_property
    def _reads_thinking(self) -> bool:
        """True if the template shows reasoning that a message has as ``thinking``, as that of gpt-oss does."""
        templates = self._tokenizer.chat_template
        texts = templates.values() if isinstance(templates, Mapping) else [templates]
        return any(_THINKING.search(str(text)) for text in texts)

    @cached_property
    def _in_lists(self) -> frozenset[str]:
        """The roles whose content must be a list of parts, because the template does not show a plain text."""
        for probe in _PROBES:
            roles = sorted(set(probe))
            for lists in chain.from_iterable(combinations(roles, count) for count in range(len(roles) + 1)):
                messages = [{"role": role, "content": _SENTINEL.format(n)} for n, role in enumerate(probe)]
                if not self._shows(messages, lists):
                    continue
                results: list[Mapping[str, Any]] = [
                    _QUESTION,
                    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                    _ANSWERED,
                ]
                tool = lists and not self._shows(results, lists) and self._shows(results, [*lists, "tool"])
                return frozenset((*lists, "tool") if tool else lists)
        return frozenset()

    def _shows(self, messages: Sequence[Mapping[str, Any]], lists: Container[str]) -> bool:
        """True if a rendering shows the texts of all messages. ``lists`` holds the roles whose contents are lists."""
        try:
            rendering = self._apply(messages, lists, generation=True, tools=None)
        except Exception:  # templates can fail in any way
            return False
        return all(message["content"] in rendering for message in messages)

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template shows the tools to the model."""
        try:
            return self.render([_QUESTION], tools=[_TOOL]) != self.render([_QUESTION])
        except ModelError:
            return False

    @cached_property
    def shows_calls(self) -> bool:
        """True if the template shows past tool calls and their results."""
        return all(word in self._called for word in ("look_up", "arbalest", "A bow"))

    @cached_property
    def shows_several_calls(self) -> bool:
        """True if the template shows several calls of one turn. Some refuse them."""
        return "ballista" in self._with_calls("arbalest", "ballista")

    @cached_property
    def shows_results_verbatim(self) -> bool:
        """True if the template shows tool results unchanged, not as JSON. Only then can they be cut out."""
        return _RESULT.strip() in self._called

    @cached_property
    def _called(self) -> str:
        return self._with_calls("arbalest")

    def _with_calls(self, *words: str) -> str:
        """Render a conversation in which one turn calls the tool for each word; "" if the template refuses it."""
        called = [
            {"id": f"call{n:05}", "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
            for n, word in enumerate(words)
        ]
        results = [
            {"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": _RESULT} for call in called
        ]
        try:
            answer = {"role": "assistant", "content": "", "tool_calls": called}
            return self.render([_QUESTION, answer, *results], tools=[_TOOL])
        except ModelError:
            return ""

    @cached_property
    def _tool_finder(self) -> ToolFinder:
        return ToolFinder(lambda tools: self.render([_QUESTION], tools=tools))

    def tool_texts(self, tools: Tools, ttls: Sequence[float | None]) -> ToolTexts | None:
        """Return the text of each tool in a rendering, with seams. None if the template mixes the texts of tools.

        Args:
            ttls: the lifetime of each tool in seconds. None for no limit.
        """
        return self._tool_finder.find(self._seams.put(tools), ttls)

    def pieces(self, turns: Sequence[Turn], *, generation: bool, tools: Tools | None = None) -> tuple[str, ...]:
        """Return the texts around the bodies that are cut out of these turns, one more than there are bodies.

        With tools or whole messages, pieces can have seams: split them with ``at_seams``.

        Args:
            generation: if True, the last piece opens the assistant's answer.

        Raises:
            ModelError: if there is no template, or it refuses the turns, drops a body or changes the order of bodies.
        """
        cut = self.cut(turns, generation=generation, tools=tools)
        ranks = {number: rank for rank, number in enumerate(cut.order)}
        for before, number in pairwise(sorted(ranks)):
            if ranks[number] < ranks[before]:
                turn = f"the body of turn {number + 1} ({_role(turns[number])})"
                raise ModelError(
                    f"the chat template moves {turn} in front of another one, for turns in the order {_roles(turns)}",
                    code="model.unusable_chat_template",
                )
        return cut.pieces

    def cut(self, turns: Sequence[Turn], *, generation: bool, tools: Tools | None = None) -> Cut:
        """Return these turns without their bodies, in the order of the rendering. Arguments as of ``pieces``.

        Raises:
            ModelError: if there is no template, or it refuses the turns or drops a body.
        """
        if _is_short(turns, tools) and not self.tells_time:
            return self._cuts(tuple(turns), generation)  # the cache holds no text of users
        return self._split(turns, generation, tools)

    def trims(self, turns: Sequence[Turn], *, generation: bool, tools: Tools | None = None) -> tuple[Trim, ...]:
        """Return the template's trim of each body. Arguments and errors as of ``pieces``."""
        if _is_short(turns, tools):
            return self._trims(tuple(turns), generation)
        return self._find_trims(turns, generation, tools)

    def opening_pieces(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Return the pieces before and between the turns of a schema, without the piece that closes the last one.

        Some templates refuse such turns, or fold a system turn into the next user turn. They are rendered again with
        a user turn added.
        """
        return self.pieces(self._accepted(roles), generation=False)[: len(roles)]

    def opening_trims(self, roles: Sequence[str]) -> tuple[Trim, ...]:
        """Return the template's trims of the bodies of a schema's turns. See ``opening_pieces``."""
        return self.trims(self._accepted(roles), generation=False)[: len(roles)]

    def verify(
        self,
        turns: Sequence[Turn],
        bodies: Sequence[str],
        pieces: Sequence[str],
        *,
        generation: bool = True,
        tools: Tools | None = None,
    ) -> None:
        """Render again with the real bodies, and warn once if the pieces and bodies give another text."""
        parts = ["".join(at_seams(part)) for pair in zip(pieces, [*bodies, ""], strict=True) for part in pair]
        built = "".join(parts)
        try:
            real = self.rendered(turns, bodies, generation=generation, tools=tools)
        except ModelError as error:
            self.warn_once(f"the chat template refuses the text of this prompt: {error}")
            return
        if real != built:
            at = common_length(real, built)
            ends = list(accumulate(map(len, parts)))[1::2]  # ends of the bodies
            cut = _cut_out(turns)
            turn = next((number for number, end in zip(cut, ends, strict=False) if at < end), len(turns) - 1)
            self.warn_once(
                "the chat template changes the text of turns (it strips, merges or rewrites them): the prompt differs "
                f"from its rendering, first at turn {turn + 1} ({_role(turns[turn])}), near "
                f"{built[max(0, at - 20) : at + 20]!r}; inlay keeps the text as written"
            )

    def rendered(self, turns: Sequence[Turn], bodies: Sequence[str], *, generation: bool, tools: Tools | None) -> str:
        """Render turns with these bodies, given in the order of the turns. Raises ModelError if the template
        refuses.
        """
        return "".join(at_seams(self._render(turns, bodies, generation, tools)))

    def warn_once(self, message: str) -> None:
        """Log a warning once for each kind of message. The text before its first colon is the kind."""
        kind = message.split(":")[0]
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s", message)

    def _accepted(self, roles: Sequence[str]) -> Sequence[str]:
        """Return these roles, with a user turn added if the template needs one. Raises ModelError."""
        try:
            self.pieces(roles, generation=False)
        except ModelError as error:
            try:
                self.pieces([*roles, "user"], generation=False)
            except ModelError:
                raise error from None  # the first error names the schema's own turns
            return [*roles, "user"]
        return roles

    def _find_cut(self, roles: tuple[str, ...], generation: bool) -> Cut:
        return self._split(roles, generation, None)

    def _find_trims(self, turns: Sequence[Turn], generation: bool, tools: Tools | None = None) -> tuple[Trim, ...]:
        cut = self.cut(turns, generation=generation, tools=tools)
        bare, none = cut.pieces, (Trim(),) * len(cut.order)
        try:
            padded_cut = self._split(turns, generation, tools, _BEFORE, _AFTER)
        except ModelError:
            return none
        if padded_cut.order != cut.order:
            return none
        padded = padded_cut.pieces
        whole = [_AFTER + padded[0], *padded[1:-1], padded[-1] + _BEFORE] if len(bare) > 1 else []
        stripped = list(chain.from_iterable(map(_stripped, bare, whole)))[1:-1]
        trims = dict(zip(cut.order, zip(stripped[::2], stripped[1::2], strict=True), strict=True))
        return tuple(Trim(*trims[number]) for number in sorted(trims))

    def _split(
        self, turns: Sequence[Turn], generation: bool, tools: Tools | None, before: str = "", after: str = ""
    ) -> Cut:
        """Render sentinels between ``before`` and ``after``, and split the rendering at the sentinels."""
        numbers = _cut_out(turns)
        bodies = [before + _SENTINEL.format(number) + after for number in numbers]
        rendering = self._render(turns, bodies, generation, tools)
        shown = [(int(found[1]), found.span()) for found in _SENTINELS.finditer(rendering)]
        spans, times = dict(shown), Counter(number for number, _ in shown)
        for number in numbers:
            if times[number] != 1:
                turn = f"the body of turn {number + 1} ({_role(turns[number])})"
                raise ModelError(
                    f"the chat template does not show {turn} once, for turns in the order {_roles(turns)}",
                    code="model.unusable_chat_template",
                )
        order = tuple(sorted(numbers, key=lambda number: spans[number]))
        borders = [0, *chain.from_iterable(spans[number] for number in order), len(rendering)]
        pieces = (rendering[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True))
        return Cut(tuple(pieces), order)

    def _render(self, turns: Sequence[Turn], bodies: Sequence[str], generation: bool, tools: Tools | None) -> str:
        """Render turns with these bodies. All other texts get seams."""
        left = iter(bodies)
        messages = []
        for turn in turns:
            message = {"role": turn} if isinstance(turn, str) else self._with_seams(turn)
            messages.append(message if "content" in message else {**message, "content": next(left)})
        return self.render(messages, generation=generation, tools=self._seams.put(tools))

    def render_with_seams(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        generation: bool = True,
        continues: bool = False,
    ) -> str:
        """Render like ``render``, with seams in texts of messages and tools that spell a special token.

        If ``continues``, the rendering ends with the unchanged text of the last message.
        """
        seamed, tools = [self._with_seams(message) for message in messages], self._seams.put(tools)
        if not continues:
            return self.render(seamed, generation=generation, tools=tools)
        seamed[-1]["content"] += _END
        before, *behind = self.render(seamed, generation=False, tools=tools).split(_END)
        if len(behind) != 1:
            raise ModelError(
                "the chat template does not show the last message once, so it cannot be continued",
                code="model.unusable_chat_template",
            )
        return before

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
        """Return the text that opens the answer to these messages; "" if the template writes none behind them."""
        plain = [{**message, "content": "x"} if message.get("content") else message for message in messages]
        try:
            with_opening, without = (self.render(plain, generation=opens, tools=tools) for opens in (True, False))
        except ModelError:
            return ""
        return with_opening.removeprefix(without) if with_opening.startswith(without) else ""

    def _with_seams(self, message: Mapping[str, Any]) -> dict[str, Any]:
        seamed: dict[str, Any] = self._seams.put(message)
        if message["role"] == "assistant" and "content" in message:
            seamed["content"] = self._answer_seams.put(message["content"])
        return seamed

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, generation: bool = True, tools: Tools | None = None
    ) -> str:
        """Render chat messages with the template. Raises ModelError if it refuses them."""
        if not self.exists:
            raise ModelError(
                "the model's tokenizer has no chat template; write prompts without chat turns",
                code="model.no_chat_template",
            )
        arguments = VerbatimArguments(messages)
        forms = [arguments.as_texts(), arguments.as_objects()] if arguments.texts else [messages]
        if any(message.get("tool_calls") for message in messages):
            forms.append(arguments.all_as_texts())
        rendered, failure = None, None
        for form in forms:
            try:
                rendered = self._apply(form, self._in_lists, generation=generation, tools=tools)
            except Exception as error:  # a template is a program that came with the model: it can fail in any way
                failure = failure or error
            else:
                if arguments.are_shown(rendered):
                    break
        if rendered is None:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            message = f"the chat template refuses turns in the order {_roles(messages)}: {reason}"
            raise ModelError(message, code="model.chat_template_refusal") from failure
        return arguments.put(rendered)

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], lists: Container[str], *, generation: bool, tools: Tools | None
    ) -> str:
        """Apply the template. Text contents of the roles in ``lists`` are passed as lists of one part."""
        if self._reads_thinking:
            messages = list(map(_with_thinking, messages))
        given = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if message["role"] in lists and isinstance(message.get("content"), str)
            else dict(message)
            for message in messages
        ]
        return str(
            self._tokenizer.apply_chat_template(
                given,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._with_clock(tools),
                tokenize=False,
                add_generation_prompt=generation,
                **self._variables,
            )
        )

    def _with_clock(self, tools: Tools | None) -> str | None:
        """Return the template with a clock that stands at the chosen date. None for the template as it is."""
        if self._day is None:
            return None
        return _stopped_clock(self._day) + str(self._tokenizer.get_chat_template(tools=[_TOOL] if tools else None))


@lru_cache(maxsize=4)  # a server writes one date, and a check for today's two others
def _stopped_clock(day: date) -> str:
    midnight = datetime.combine(day, time())
    return _STOPPED_CLOCK.format(shown=[(code, midnight.strftime(code)) for code in _DATE_CODES])


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning as ``thinking``.

    gpt-oss's template refuses a call with both reasoning and content, so its content becomes the end of its reasoning.
    """
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if not isinstance(thoughts, str) or "thinking" in message:
        return message
    if message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, "thinking": f"{thoughts}\n{content}", "content": ""}
    return {**message, "thinking": thoughts}


def _is_short(turns: Sequence[Turn], tools: Tools | None) -> bool:
    """True for a few roles without any text of users."""
    return tools is None and len(turns) <= _REMEMBERED_TURNS and all(isinstance(turn, str) for turn in turns)


def _cut_out(turns: Sequence[Turn]) -> list[int]:
    """Return the numbers of the turns whose bodies are cut out."""
    return [number for number, turn in enumerate(turns) if isinstance(turn, str) or "content" not in turn]


def _role(turn: Turn) -> str:
    return turn if isinstance(turn, str) else str(turn.get("role"))


def _roles(turns: Sequence[Turn]) -> str:
    shown = ", ".join(map(_role, turns[:_ROLES_SHOWN]))
    return shown if len(turns) <= _ROLES_SHOWN else f"{shown}, … ({len(turns):,} turns)"


def _stripped(bare: str, padded: str) -> tuple[str | None, str | None]:
    """Return the characters stripped behind the body before a piece, and before the body behind it."""
    for right, left in product(_STRIPPED, repeat=2):
        if padded == _AFTER.rstrip(right) + bare + _BEFORE.lstrip(left):
            return right, left
    return "", ""
