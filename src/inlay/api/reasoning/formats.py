"""How models mark what they think before they answer: one row a family, told from the chat template.

The names of formats are those of vLLM's reasoning parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.chat_options import template_variables

OFF = "off"
"""The name that turns it off: what a model thinks is a part of its answer's text."""

#: Variables by which templates switch thinking on and off.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family writes it.

    opens, closes: the marks around it. assumed: whether an answer begins with it even where nobody has written the
    first mark; else only behind that mark, the template's or the answer's own.
    """

    name: str
    opens: str
    closes: str
    assumed: bool = False


#: In this order: the first row whose marks a template holds decides.
FORMATS = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
)

NAMES = tuple(row.name for row in FORMATS)


@dataclass(frozen=True, slots=True, eq=False)
class ModelReasoning:
    """What one model does with reasoning.

    format: how its answers write it; None where they do not. variables: what its chat template takes.
    close_id: the token that is the closing mark, if one is. decode: the text of tokens.
    """

    format: ReasoningFormat | None
    variables: frozenset[str]
    close_id: int | None
    decode: Callable[[Sequence[int]], str]


def check_parser(name: str | None) -> None:
    """Raises ParameterError for a name that no format has."""
    if name is not None and name not in (OFF, *NAMES):
        raise ParameterError(f"reasoning_parser is {name!r}; it must be one of {', '.join((OFF, *NAMES))}")


def model_reasoning(tokenizer: PreTrainedTokenizerBase, parser: str | None = None) -> ModelReasoning:
    """What a model does with reasoning.

    parser: the name of a format, for a model whose template does not tell it, or OFF.
    Raises ParameterError for a name that no format has, and for a format whose marks this model's texts do not show.
    """
    check_parser(parser)
    source = ChatTemplate(tokenizer).source if tokenizer.chat_template else ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    told = (row for row in FORMATS if row.closes in source and row.closes not in special)
    chosen = next(told, None) if parser is None else next((row for row in FORMATS if row.name == parser), None)
    if chosen is not None and special & {chosen.opens, chosen.closes}:
        raise ParameterError(
            f"reasoning_parser is {parser!r}, and this model's tokenizer leaves {chosen.closes} out of texts, as a "
            f"special token; choose another one, or {OFF}"
        )
    ids = [] if chosen is None else tokenizer.encode(chosen.closes, add_special_tokens=False)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    return ModelReasoning(chosen, template_variables(tokenizer), ids[0] if len(ids) == 1 else None, decode)
