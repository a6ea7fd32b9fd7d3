"""Options of a conversation's chat template: values of its variables, and the end of the rendering."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from inlay.errors import ParameterError
from inlay.wording import show

if TYPE_CHECKING:  # transformers takes longer to load than the command line
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
