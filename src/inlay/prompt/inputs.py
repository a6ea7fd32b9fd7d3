"""Recognizes and checks the forms in which a caller may give a prompt.

``ChatOptions`` holds the options of a conversation's chat template: values of its variables, and the end of the
rendering.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from inlay.errors import ParameterError
from inlay.pml import Prompt, PromptBuilder
from inlay.sampling.params import SamplingParams
from inlay.strict_json import JSONError, read_json
from inlay.wording import lone_surrogate, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NAMES_SHOWN = 20
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag of transformers
#: Names with a field of their own, or without one because they make up the prompt.
_OWN = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))
#: Functions that transformers passes to every template.
_FUNCTIONS = frozenset(("raise_exception", "strftime_now"))


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The rendering of one conversation.

    Args:
        variables: template variables by name (``chat_template_kwargs``).
        documents: objects of texts, such as ``{"title", "text"}``, for templates that support them.
        generation: if True, the rendering opens the assistant's answer (``add_generation_prompt``).
        continues: if True, the last message, an assistant's, stays open for the answer (``continue_final_message``).

    Raises:
        ParameterError: for values of the wrong form.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, str]] | None = None
    generation: bool = True
    continues: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.variables, Mapping) or not all(isinstance(name, str) for name in self.variables):
            message = "it must be an object of the names and values of template variables"
            raise ParameterError(
                f"chat_template_kwargs is {show(self.variables)}; {message}", code="parameter.wrong_type"
            )
        if self.documents is not None and not _are_documents(self.documents):
            message = 'it must be a list of objects of texts, such as {"title": "…", "text": "…"}'
            raise ParameterError(f"documents is {show(self.documents)}; {message}", code="parameter.wrong_type")
        if self.generation and self.continues:
            raise ParameterError(
                "continue_final_message goes on with the last message, and add_generation_prompt opens a new one; set "
                "add_generation_prompt to false",
                code="parameter.conflict",
            )

    def check_last(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise ParameterError if the last message cannot be continued as requested."""
        last = messages[-1] if messages else {}
        if self.continues and (last.get("role") != "assistant" or last.get("tool_calls")):
            message = "continue_final_message is given, and the last message is no text of the assistant's"
            raise ParameterError(f"{message}; end with the one to continue", code="request.no_turn_to_continue")

    def given_to(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the variables for the tokenizer's template. Raises ParameterError for an unknown one."""
        if not self.variables and self.documents is None:
            return {}
        known = template_variables(tokenizer)
        if self.documents is not None and "documents" not in known:
            raise ParameterError(
                "documents is given, and this model's chat template has no place for documents; write them into a "
                "message",
                code="request.unsupported_documents",
            )
        for name in self.variables:
            if name in _OWN:
                raise ParameterError(
                    f"chat_template_kwargs has {name!r}, which is a field of its own; write it there",
                    code="parameter.conflict",
                )
            if name not in known or name in _reserved(tokenizer) or name in _FUNCTIONS:
                raise ParameterError(
                    f"chat_template_kwargs has {name!r:.80}, and {_offer(known, tokenizer)}", code="parameter.unknown"
                )
        given = dict(self.variables)
        return given if self.documents is None else {**given, "documents": [dict(one) for one in self.documents]}


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names that a tokenizer's chat template reads and does not define; none without a template."""
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [templates or ""]
    return frozenset().union(*map(_variables, texts))


@lru_cache(64)
def _variables(template: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", template))
    except TemplateError:  # rendering the template reports the error
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree)) - set(environment.globals)


def free_variables(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names that ``chat_template_kwargs`` may have for a tokenizer's chat template."""
    return _free(template_variables(tokenizer), tokenizer)


def _free(known: frozenset[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return sorted(known - _OWN - _reserved(tokenizer) - _FUNCTIONS)


def _reserved(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names that transformers uses: special tokens, and its own parameters."""
    return {*tokenizer.special_tokens_map, *inspect.signature(tokenizer.apply_chat_template).parameters}


def _offer(known: frozenset[str], tokenizer: PreTrainedTokenizerBase) -> str:
    free = _free(known, tokenizer)
    if not free:
        return "this model's chat template takes none; leave it out"
    return f"this model's chat template takes {', '.join(free[:_NAMES_SHOWN])}; write one of these, or leave it out"


def _are_documents(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(
            isinstance(one, Mapping) and all(isinstance(text, str) for pair in one.items() for text in pair)
            for one in value
        )
    )


#: Seconds in each unit of a lifetime.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 366 * 86_400.0

MAX_SALT = 1024  # characters; every request hashes the salt into each segment key

logger = logging.getLogger(__name__)

Message: TypeAlias = Mapping[str, Any]
PromptInput: TypeAlias = "str | Sequence[int] | Prompt | PromptBuilder | Mapping[str, Any] | Sequence[Message]"


_PLAIN = ChatOptions()
#: Keys of a mapping beside "messages" and "tools" → the fields of ChatOptions.
CHAT_OPTIONS = {
    "chat_template_kwargs": "variables",
    "documents": "documents",
    "add_generation_prompt": "generation",
    "continue_final_message": "continues",
}
#: Options of ``chat`` for its template.
TEMPLATE_OPTIONS = frozenset({"tools", *CHAT_OPTIONS})


def check_ids(ids: Sequence[Any], vocabulary: int, *, what: str = "a prompt") -> list[int]:
    """Return token ids as a list. Raises ParameterError for an id outside 0 … ``vocabulary - 1``."""
    made = list(ids)
    if set(map(type, made)) <= {int} and (not made or (min(made) >= 0 and max(made) < vocabulary)):
        return made  # fast path without a Python loop, for a million ids
    for i in made:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocabulary:
            raise ParameterError(
                f"{what} holds the token id {show(i)}; ids go from 0 to {vocabulary - 1}", code="prompt.unknown_token"
            )
    return made


def check_params(params: object) -> None:
    """Raise ParameterError unless this is a SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ParameterError(
            f"sampling_params is {show(params)}; give an inlay.SamplingParams", code="parameter.wrong_type"
        )


def check_template(text: str, where: str = "chat_template") -> str:
    """Return a Jinja chat template that shows messages. Raises ParameterError with the place."""
    if "messages" not in text:
        raise ParameterError(
            f"{where}: it shows no messages; give the text of a chat template in Jinja",
            code="parameter.invalid_chat_template",
        )
    from transformers.utils.chat_template_utils import render_jinja_template  # commands start without transformers

    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ParameterError(
            f"{where}:{error.lineno}: {error.message}; give a chat template in Jinja",
            code="parameter.invalid_chat_template",
        ) from None
    except Exception as error:  # it may need other messages, or variables of the tokenizer
        logger.debug("%s cannot show a message alone: %s", where, error)
    return text


def check_salt(cache_salt: str | None) -> str:
    """Return the cache_salt, "" for None. Raises ParameterError."""
    if cache_salt is None:
        return ""
    if not isinstance(cache_salt, str) or not cache_salt:
        raise ParameterError(
            "cache_salt is empty or no text; give a text that others cannot guess, or None",
            code="parameter.invalid_cache_salt",
        )
    if len(cache_salt) > MAX_SALT:
        raise ParameterError(
            f"cache_salt has {len(cache_salt):,} characters; give at most {MAX_SALT:,}",
            code="parameter.invalid_cache_salt",
        )
    if problem := lone_surrogate(cache_salt):
        raise ParameterError(f"cache_salt holds {problem}", code="parameter.invalid_cache_salt")
    return cache_salt


class Conversation(tuple[Message, ...]):
    """Chat messages with their tools, in OpenAI's form, and the ``options`` of their rendering."""

    tools: Sequence[Mapping[str, Any]] | None
    options: ChatOptions

    def __new__(
        cls,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatOptions = _PLAIN,
    ) -> Conversation:
        made = super().__new__(cls, messages)
        made.tools = tools
        made.options = options
        return made


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ParameterError for a message without role or content, or a tool or call without a name."""
    for message in messages:
        if not isinstance(message.get("role"), str) or not _is_content(message.get("content")):
            raise ParameterError(
                f"a chat message is {show(message)}; it needs a 'role' and a 'content' of text, or of parts "
                "{'type': 'text', 'text': …}",
                code="prompt.invalid_message",
            )
        if message.get("order") not in (None, "any"):
            raise ParameterError(
                f"order is {show(message['order'])} in a chat message; write 'any', or leave it out",
                code="prompt.invalid_message",
            )
        if not isinstance(message["content"], str) and any("order" in part for part in message["content"]):
            raise ParameterError(
                "order stands in a part of a chat message; write it beside the message's content, and cache_control on "
                "the parts that may change places",
                code="prompt.invalid_message",
            )
        for call in _listed(message.get("tool_calls"), "tool_calls"):
            if not _are_arguments(_function(call).get("arguments")):
                raise ParameterError(
                    f"a tool call is {show(call)}; write {{'id': …, 'type': 'function', 'function': "
                    "{'name': …, 'arguments': {…}}}",
                    code="prompt.invalid_tool",
                )
    if isinstance(messages, Conversation):
        for tool in _listed(messages.tools, "tools"):
            if not _function(tool):
                raise ParameterError(
                    f"a tool is {show(tool)}; write {{'type': 'function', 'function': {{'name': …, "
                    "'parameters': {…}}}",
                    code="prompt.invalid_tool",
                )


def _is_content(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _listed(value: Any, name: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ParameterError(f"{name} is {show(value)}; it must be a list", code="parameter.wrong_type")
    return value


def _function(value: Any) -> Mapping[str, Any]:
    """Return the "function" of a call or a tool; {} if it has no name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) and isinstance(function.get("name"), str) else {}


def as_prompt(prompt: Prompt | PromptBuilder) -> Prompt:
    """Return the prompt, built if it is a builder."""
    return prompt.build() if isinstance(prompt, PromptBuilder) else prompt


def unwrap(prompt: Mapping[str, Any]) -> Any:
    """Return the prompt inside a mapping. Raises ParameterError for unknown keys."""
    keys = set(prompt)
    if keys == {"prompt"} or keys == {"prompt_token_ids"} or keys == {"messages"}:
        return next(iter(prompt.values()))
    if "messages" in keys and keys <= {"messages", "tools", *CHAT_OPTIONS}:
        if not is_conversation(prompt["messages"]):
            raise ParameterError(
                f"messages is {show(prompt['messages'])}; it must be a list of chat messages",
                code="parameter.wrong_type",
            )
        return Conversation(prompt["messages"], prompt.get("tools"), _options(prompt))
    raise ParameterError(
        f"a prompt has the keys {sorted(map(str, keys))}; write {{'prompt': …}}, {{'prompt_token_ids': …}}, "
        f"{{'messages': […]}} or {{'messages': […], 'tools': […]}}, with messages also {', '.join(CHAT_OPTIONS)}",
        code="prompt.unknown_form",
    )


def _options(prompt: Mapping[str, Any]) -> ChatOptions:
    given = {field: prompt[name] for name, field in CHAT_OPTIONS.items() if prompt.get(name) is not None}
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(prompt.get(name, False), bool):
            raise ParameterError(
                f"{name} is {show(prompt[name])}; it must be True or False", code="parameter.wrong_type"
            )
    if given.get("continues") and "generation" not in given:
        given["generation"] = False  # the answer is the rest of a message
    return ChatOptions(**given)


def is_conversation(prompt: Any) -> bool:
    """True for a list of chat messages."""
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def as_conversations(messages: Any) -> list[Any]:
    """Return the argument of ``chat`` as a list of conversations. Raises ParameterError for anything else."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        if not messages or is_conversation(messages):
            return [messages] if messages else []
        if all(is_conversation(one) for one in messages):
            return list(messages)
        messages = next(one for one in messages if not is_conversation(one))
    raise ParameterError(
        f"chat takes a list of messages, or several, and this is {show(messages)}; write "
        "[{'role': 'user', 'content': …}]",
        code="parameter.wrong_type",
    )


def chat_prompts(messages: Any, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of ``chat`` as prompts of ``generate``, and the options that are not the template's.

    Raises ParameterError.
    """
    shown = {name: value for name, value in options.items() if name in TEMPLATE_OPTIONS and value is not None}
    others = {name: value for name, value in options.items() if name not in TEMPLATE_OPTIONS}
    conversations = as_conversations(messages)
    return [{"messages": one, **shown} for one in conversations] if shown else conversations, others


def has_modules(prompt: Any) -> bool:
    """True for a prompt of a schema, and for messages with a marked part or a marked tool."""
    if isinstance(prompt, (Prompt, PromptBuilder)):
        return True
    messages = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
    if not is_conversation(messages):
        return False
    tools = prompt.get("tools") if isinstance(prompt, Mapping) else getattr(messages, "tools", None)
    if isinstance(tools, list | tuple) and any(
        isinstance(tool, Mapping) and (is_marked(tool) or is_marked(_function(tool))) for tool in tools
    ):
        return True
    contents = (with_marked_parts(message).get("content") for message in messages or ())
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and is_marked(part) for part in parts)


def in_any_order(prompt: Any) -> Any:
    """Free the order of neighbouring modules, or of neighbouring marked parts of messages.

    Raises ParameterError for text and token ids, which have neither.
    """
    if isinstance(prompt, (Prompt, PromptBuilder)):
        return as_prompt(prompt).in_any_order()
    messages: Any = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
    if not is_conversation(messages):
        raise ParameterError(
            "order is 'any', and a text or token ids have no modules that could change places; leave it out",
            code="prompt.no_free_order",
        )
    # Without a mark, one message gets the order, so that the output can say why nothing is free.
    told = {id(message) for message in messages if has_modules([message])} or {id(messages[-1])}
    made = Conversation(
        [{**message, "order": "any"} if id(message) in told else message for message in messages],
        *((messages.tools, messages.options) if isinstance(messages, Conversation) else ()),
    )
    return {**prompt, "messages": made} if isinstance(prompt, Mapping) else made


def check_order(order: object) -> bool:
    """Return True if the order of all modules is free. Raises ParameterError for values other than None and 'any'."""
    if order not in (None, "any"):
        raise ParameterError(
            f"order is {show(order)}; write 'any', or None for the order in which modules are written",
            code="parameter.unknown_choice",
        )
    return order is not None


def is_marked(part: Mapping[str, Any]) -> bool:
    """True if a part of a message is marked as a module."""
    return bool(part.get("cache_control"))


def with_marked_parts(message: Message) -> Message:
    """Move a mark beside a message's content to all parts of the content, so that the whole message is marked.

    A text content becomes one marked part. A part's own mark stays. An empty part gets no mark.
    """
    mark = message.get("cache_control")
    if "cache_control" not in message:
        return message
    made = {key: value for key, value in message.items() if key != "cache_control"}
    content = made.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not mark or not isinstance(parts, Sequence) or not parts or not content:
        return made
    made["content"] = [_with_mark(part, mark) for part in parts]
    return made


def tool_ttls(tools: Any) -> list[float | None]:
    """Return the lifetime in the mark of each tool, or of its function. Raises ParameterError."""
    return [ttl_of(tool if is_marked(tool) else _function(tool)) for tool in tools or ()]


def _with_mark(part: Any, mark: Any) -> Any:
    unmarked = isinstance(part, Mapping) and part.get("text") and not is_marked(part)
    return {**part, "cache_control": mark} if unmarked else part


def without_marks(tools: Any) -> Any:
    """Return tools without marks, as chat templates expect them."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return tools
    return [_without_mark(tool) for tool in tools]


def _without_mark(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    made = {key: value for key, value in tool.items() if key != "cache_control"}
    if isinstance(made.get("function"), Mapping):
        made["function"] = {key: value for key, value in made["function"].items() if key != "cache_control"}
    return made


def ttl_of(part: Mapping[str, Any]) -> float | None:
    """Return the lifetime in a part's mark, in seconds; None without one. Raises ParameterError."""
    mark = part.get("cache_control")
    ttl = mark.get("ttl") if isinstance(mark, Mapping) else None
    return None if ttl is None else parse_ttl(ttl, "cache_control.ttl")


def is_several(prompts: Any) -> bool:
    """True for a list of prompts, False for one prompt that is a list."""
    if isinstance(prompts, (str, Mapping, Prompt, PromptBuilder)) or not isinstance(prompts, Sequence):
        return False
    return not (is_conversation(prompts) or (bool(prompts) and all(isinstance(item, int) for item in prompts)))


def parse_ttl(value: object, what: str = "ttl") -> float:
    """Parse a lifetime like '5m', '1h' or 'inf' to seconds, at most 366 days or inf. Raises ParameterError."""
    if value == "inf":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", value) if isinstance(value, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ParameterError(
            f"{what} is {show(value)}; write a lifetime such as '5m', '1h' or '1d', at most 366d, or inf",
            code="parameter.invalid_lifetime",
        )
    return float(seconds)


def _are_arguments(value: Any) -> bool:
    """Return whether a template can show these arguments: an object, or a text that is no JSON object (cut off)."""
    if not isinstance(value, str):
        return isinstance(value, Mapping)
    try:
        return not isinstance(read_json(value.encode(errors="surrogatepass"), max_depth=200, make_object=dict), dict)
    except JSONError:
        return True
