"""How models write calls of tools into their answers: one row a family, told from the chat template.

A call is a JSON object with a name and its arguments, or a list of them; families differ in what they put around it.
The names of formats are those of vLLM's tool parsers, but for the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from inlay.errors import ParameterError
from inlay.prompt.chat import ChatTemplate

KEYS = ("arguments", "parameters")
"""What the arguments of a call stand under, in one family or another."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls.

    opens: a mark in front of a call, or of a list of calls. closes: the mark behind it, which may be missing.
    key: the one of KEYS that its calls have.
    bare: whether an answer that begins with a call needs no mark.
    inside: marks between the name of a call and its arguments, in families that write it so: ``name[ARGS]{…}``.
    shown_by, not_by: what a template of this family holds, all of it, and what it does not.
    """

    name: str
    opens: str | None
    closes: str | None = None
    key: str = "arguments"
    bare: bool = False
    inside: tuple[str, ...] = ()
    shown_by: tuple[str, ...] = ()
    not_by: tuple[str, ...] = ()


#: In this order: the first row that fits a template decides; the last fits every one.
FORMATS = (
    # Nous Hermes, Qwen 2.5 and 3; not those that write XML inside (Qwen 3 Coder, GLM 4.5)
    ToolFormat("hermes", "<tool_call>", "</tool_call>", shown_by=("<tool_call>",), not_by=("<function=", "<arg_key>")),
    # from version 11 of its tokenizer on, the name stands in front of the object
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
    """What one model does with tools.

    format: how its answers write calls.
    history: whether its template shows calls and results of past turns.
    parallel: whether an answer may call more than one: not where a conversation could not go on behind that.
    ends: the special tokens one of which may end an answer's text, where those of the format have to be seen and so
        all of them are in the text; empty where the format has none.
    """

    format: ToolFormat
    history: bool = True
    parallel: bool = True
    ends: frozenset[str] = frozenset()


def named_format(name: str | None) -> ToolFormat | None:
    """The format of that name; None for None. Raises ParameterError for a name that no format has."""
    known = {row.name: row for row in FORMATS}
    if name is not None and name not in known:
        raise ParameterError(f"tool_parser is {name!r}; it must be one of {', '.join(known)}")
    return known[name] if name is not None else None


def model_tools(tokenizer: PreTrainedTokenizerBase, parser: str | None = None) -> ModelTools | None:
    """What a model does with tools; None where its chat template has no place for them.

    parser: the name of a format, for a model whose template does not tell it.
    Raises ParameterError for a name that no format has.
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
