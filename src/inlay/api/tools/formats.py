"""The formats of tool calls in answers, one row per family, detected from the chat template.

A call is a JSON object with a name and arguments, or a list of such objects. Families differ in the text around it.
Formats have the names of vLLM's tool parsers, except for the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate

KEYS = ("arguments", "parameters")
"""The keys of a call's arguments, in different families."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls in one family.

    Args:
        name: of the format.
        opens: the mark before a call, or before a list of calls.
        closes: the mark after it, which may be missing.
        key: the key of the arguments, one of KEYS.
        bare: an answer that starts with a call needs no mark.
        inside: the marks between the name and the arguments, in families that write ``name[ARGS]{…}``.
        shown_by: texts that a template of this family has, all of them.
        not_by: texts that it does not have.
    """

    name: str
    opens: str | None
    closes: str | None = None
    key: str = "arguments"
    bare: bool = False
    inside: tuple[str, ...] = ()
    shown_by: tuple[str, ...] = ()
    not_by: tuple[str, ...] = ()


#: The first row that fits a template decides. The last row fits every template.
FORMATS = (
    # Nous Hermes, Qwen 2.5 and 3; not families with XML inside (Qwen 3 Coder, GLM 4.5)
    ToolFormat("hermes", "<tool_call>", "</tool_call>", shown_by=("<tool_call>",), not_by=("<function=", "<arg_key>")),
    # from version 11 of its tokenizer, the name is before the object
    ToolFormat("mistral", "[TOOL_CALLS]", inside=("[CALL_ID]", "[ARGS]"), shown_by=("[TOOL_CALLS]",)),
    # Llama 3.1 and 3.2
    ToolFormat(
        "llama3_json",
        "<|python_tag|>",
        key="parameters",
        bare=True,
        shown_by=("<|start_header_id|>", '"parameters": '),
    ),
    ToolFormat("granite", "<|tool_call|>", shown_by=("<|tool_call|>",)),
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
        chosen = replace(chosen, key=KEYS[1])
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    seen = special & {chosen.opens, chosen.closes, *chosen.inside}
    return ModelTools(
        format=chosen,
        history=template.shows_calls,
        parallel=template.shows_several_calls or not template.shows_calls,
        ends=frozenset(special - seen) if seen else frozenset(),
    )


def _fits(row: ToolFormat, source: str) -> bool:
    return all(text in source for text in row.shown_by) and not any(text in source for text in row.not_by)
