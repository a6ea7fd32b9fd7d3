"""The marks around a model's reasoning, one row per family, detected from the chat template, and its effort.

Formats have the names of vLLM's reasoning parsers. A request's effort becomes variables of the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.api.failures import BodyError
from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.chat_options import template_variables

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
