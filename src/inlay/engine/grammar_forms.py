"""Grammars that users write out, as llguidance takes them: Lark, llama.cpp's GBNF, and vLLM's structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

#: Directives by which a grammar in Lark holds others, whose cost nobody has looked at.
_HOLDS_OTHERS = re.compile(r"%(json|regex|lark|llguidance)\b|<\[|@")
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*')
_MAX_TAGS = 64  # of one request
_MAX_TAG_TEXT = 1_024  # characters of a begin, an end or a trigger


class GrammarError(Exception):
    """What is wrong with a grammar."""


def lark_of(text: str) -> str:
    """A grammar in Lark or GBNF as Lark. Raises GrammarError."""
    from llguidance.gbnf_to_lark import any_to_lark

    found = _HOLDS_OTHERS.search(_TEXTS.sub('""', text))
    if found is not None:
        raise GrammarError(f"it has {found[0]!r}, and a grammar may not hold others; write all of it as rules")
    try:
        return str(any_to_lark(text))
    except RecursionError as error:
        raise GrammarError("it nests too deeply; nest it less deeply") from error
    except Exception as error:  # the converter raises plain ones, too
        raise GrammarError(f"it is neither Lark nor GBNF: {error}") from error


def read_tags(value: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The structures and triggers of a structural tag, as an object. Raises GrammarError."""
    if not isinstance(value, Mapping) or value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError('it must be an object {"type": "structural_tag", "structures": […], "triggers": […]}')
    if "format" in value:
        raise GrammarError('"format" is the form of another library; write "structures" and "triggers"')
    structures: Any = value.get("structures")
    triggers: Any = value.get("triggers")
    if not _is_list(structures) or not all(map(_is_structure, structures)):
        raise GrammarError('"structures" must be a list of {"begin": "…", "schema": {a JSON Schema}, "end": "…"}')
    if not _is_list(triggers) or not all(_is_text(trigger) and trigger for trigger in triggers):
        raise GrammarError('"triggers" must be a list of texts, none of them empty')
    return list(structures), list(triggers)


def lark_of_tags(structures: Sequence[Mapping[str, Any]], triggers: Sequence[str], special: Collection[str]) -> str:
    """A grammar of free text in which what begins with a trigger is one of the structures.

    special: the tokenizer's special tokens, by name. Raises GrammarError.
    """
    from llguidance import StructTag

    tags = []
    for number, one in enumerate(structures):
        begin = one["begin"]
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise GrammarError(f'"structures"[{number}] begins with {begin!r:.60}, and no trigger is its beginning')
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=dict(one["schema"]), end=one["end"]))
    named = [tag.trigger for tag in tags if tag.trigger.startswith("<") and tag.trigger.endswith(">")]
    return str(StructTag.to_grammar(tags, assume_special=all(name in special for name in named)))


def tags_text(structures: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> str:
    """The same in one form, to compare."""
    return json.dumps({"structures": [dict(one) for one in structures], "triggers": list(triggers)})


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= _MAX_TAGS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TAG_TEXT


def _is_structure(one: Any) -> bool:
    return (
        isinstance(one, Mapping)
        and one.keys() == {"begin", "schema", "end"}
        and _is_text(one["begin"])
        and _is_text(one["end"])
        and isinstance(one["schema"], Mapping)
    )
