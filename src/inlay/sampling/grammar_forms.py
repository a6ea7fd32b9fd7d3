"""Converts grammars to llguidance's forms, and rejects those that would take too long to compile.

The forms are JSON Schemas, choices, patterns, Lark, llama.cpp's GBNF, and vLLM's structural tags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from inlay.errors import ParameterError
from inlay.sampling.json_schemas import GrammarError, bounded_document, holdable

__all__ = [
    "GrammarError",
    "Tags",
    "as_text",
    "lark_of",
    "lark_of_tags",
    "lark_of_text",
    "least_work",
    "read_tags",
    "too_large",
]

#: Directives that embed another grammar in Lark. The checks here do not cover such grammars.
_HOLDS_OTHERS = re.compile(r"%(json|regex|lark|llguidance)\b|<\[|@")
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*')
_MAX_TAGS = 129  # per request: as many tools as a request may have, and another form
_MAX_TAG_TEXT = 1_024  # characters of a begin, an end or a trigger
_LONGEST = 2**17  # characters of a grammar
_MAX_KEYS = 4_096  # of all objects of a schema; compile time grows with the square of an object's properties
_MAX_PATTERNS = 128  # patternProperties of a schema; each is compared with all others
_MAX_TOGETHER = 12  # patterns that one text may have to match; each doubles the time to check them
_MAX_REMAINDERS = 10_000  # remainders of multipleOf; each is a state, and the time grows with the square
_MAX_OPTIONAL = 512  # optional parts of a pattern; compile time grows with the square
_MAX_OPTIONAL_RULES = 1_000  # optional parts of a grammar; the time of a step grows with the square

# White space between the parts of JSON: a space, or a line break with indentation. JSON allows any amount. A model that
# starts on white space would continue until max_tokens.
_WHITE_SPACE = r" |\n {0,32}"


# In a pattern: escapes, character classes, group heads, and the marks of optional parts.
_OPTIONAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?|([?*]|\{0*,|\{0+\})", re.DOTALL)


def as_text(kind: str, value: Any) -> tuple[str, str]:
    """Return llguidance's name for a kind of grammar, and the grammar's text.

    The text is JSON for schemas and choices. Patterns, grammars and the engine's own "text" stay unchanged.

    Raises:
        GrammarError: if the grammar is too large.
        ParameterError: if the value is not JSON.
    """
    if kind == "text":
        return kind, str(value)
    if kind in ("regex", "grammar"):
        text, most = _short(str(value)), _MAX_OPTIONAL if kind == "regex" else _MAX_OPTIONAL_RULES
        if _optional_parts(text) > most:
            raise GrammarError(f"it has more than {most:,} optional parts; write fewer of ?, * and {{0,…}}")
        return kind, text
    try:
        parsed = json.loads(_short(value)) if isinstance(value, str) else value
        if kind == "choice":
            return kind, _short(json.dumps(list(parsed)))
        if kind == "structural_tag":
            tags = read_tags(parsed)
            if problem := too_large([one["schema"] for one in tags.structures]):
                raise GrammarError(problem)
            structures = [{**one, "schema": bounded_document(holdable(one["schema"]))} for one in tags.structures]
            return kind, _short(json.dumps({**tags._asdict(), "structures": structures}))
        schema = {"type": "object"} if kind == "json_object" else parsed
        if problem := too_large(schema):
            raise GrammarError(problem)
        schema = holdable(schema)
        if kind == "json" and isinstance(schema, Mapping):
            schema = bounded_document(schema)
        options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}  # a schema may override these
        return "json", _short(json.dumps(options | dict(schema) if isinstance(schema, Mapping) else schema))
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"structured_outputs['{kind}'] is no JSON: {error}.", code="structured.not_json"
        ) from error
    except RecursionError as error:
        raise GrammarError("it nests too deeply; nest it less deeply") from error


def _short(text: str) -> str:
    if len(text) > _LONGEST:
        raise GrammarError(f"it takes {len(text):,} characters, more than the {_LONGEST:,} that a grammar may have")
    return text


def lark_of(text: str) -> str:
    """Convert a grammar in Lark or GBNF to Lark. Raises GrammarError."""
    from llguidance.gbnf_to_lark import any_to_lark

    found = _HOLDS_OTHERS.search(_TEXTS.sub('""', text))
    if found is not None:
        raise GrammarError(f"it has {found[0]!r}, and a grammar may not hold others; write all of it as rules")
    try:
        return str(any_to_lark(text))
    except RecursionError as error:
        raise GrammarError("it nests too deeply; nest it less deeply") from error
    except Exception as error:  # the converter raises bare Exceptions too
        raise GrammarError(f"it is neither Lark nor GBNF: {error}") from error


class Tags(NamedTuple):
    """A structural tag.

    Args:
        structures: objects with the text before a JSON value, the value's schema, and the text behind it.
        triggers: the beginnings of structures, which start one within free text.
        forced: the answer is one of the structures, without free text.
        lead: a text that may stand in front of a forced structure.
    """

    structures: list[Mapping[str, Any]]
    triggers: list[str]
    forced: bool = False
    lead: str = ""


def read_tags(value: Any) -> Tags:
    """Return a parsed structural tag. Raises GrammarError."""
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
    lead = value.get("lead", "")
    if not _is_text(lead):
        raise GrammarError('"lead" must be a text')
    return Tags(list(structures), list(triggers), value.get("forced") is True, lead)


def lark_of_tags(tags: Tags, special: Mapping[str, int]) -> str:
    """Return a grammar of free text in which each trigger starts one of the structures, or of forced structures.

    Args:
        tags: the structural tag.
        special: the contents and ids of the tokenizer's special tokens.

    Raises:
        GrammarError: if a structure begins with no trigger.
    """
    from llguidance import StructTag

    if tags.forced:
        return _lark_of_forced(tags, special)
    made = []
    for number, one in enumerate(tags.structures):
        begin = one["begin"]
        trigger = next((each for each in tags.triggers if begin.startswith(each)), None)
        if trigger is None:
            raise GrammarError(f'"structures"[{number}] begins with {begin!r:.60}, and no trigger is its beginning')
        made.append(StructTag(trigger=trigger, begin=begin, grammar=dict(one["schema"]), end=one["end"]))
    named = [tag.trigger for tag in made if tag.trigger.startswith("<") and tag.trigger.endswith(">")]
    return str(StructTag.to_grammar(made, assume_special=all(name in special for name in named)))


def _lark_of_forced(tags: Tags, special: Mapping[str, int]) -> str:
    choices = " | ".join(f"tag{number}" for number in range(len(tags.structures)))
    rules = [f"start: lead? ({choices})" if tags.lead else f"start: {choices}"]
    if tags.lead:
        rules.append(f"lead: {lark_of_text(tags.lead, special)}")
    for number, one in enumerate(tags.structures):
        begin, end = (lark_of_text(one[name], special) for name in ("begin", "end"))
        rules += [f"tag{number}: {begin} json{number} {end}", f"json{number}: %json {json.dumps(one['schema'])}"]
    return "\n".join(rules)


def lark_of_text(text: str, special: Mapping[str, int]) -> str:
    """Return a sequence of Lark's terminals for a text, in which special tokens are tokens."""
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    pieces = re.split(f"({marks})", text)
    return " ".join(
        f"<[{special[one]}]>" if one in special else json.dumps(one, ensure_ascii=False) for one in pieces if one
    )


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


def too_large(schema: Any) -> str | None:
    """Return the reason why a JSON Schema would take too long to compile, or None."""
    keys = by_pattern = patterns = optional = states = 0
    together, largest, product = False, 1, 1
    left = [schema]
    while left and keys <= _MAX_KEYS:
        one = left.pop()
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, Mapping):
            keys += len(one)
            left += one.values()
            named = one.get("patternProperties")
            by_pattern += len(named) if isinstance(named, Mapping) else 0
            given = [
                text for text in (one.get("pattern"), *(named if isinstance(named, Mapping) else ())) if _is_str(text)
            ]
            patterns += isinstance(one.get("pattern"), str)
            optional += sum(_optional_parts(text) ** 2 for text in given)
            multiple = _remainders(one.get("multipleOf"))
            states += multiple**2
            largest, product = max(largest, multiple), min(product * multiple, _MAX_REMAINDERS + 1)
            together = together or "allOf" in one or ("$ref" in one and len(one) > 1)
    if keys > _MAX_KEYS:
        return f"it has more than {_MAX_KEYS:,} keys; ask for less at once"
    if by_pattern > _MAX_PATTERNS:
        return f"it has more than {_MAX_PATTERNS} patternProperties; ask for less at once"
    if together and patterns > _MAX_TOGETHER:
        return f"it has more than {_MAX_TOGETHER} patterns beside allOf or $ref; ask for fewer at once"
    if optional > _MAX_OPTIONAL**2:
        return f"its patterns have more than {_MAX_OPTIONAL} optional parts; write fewer of ?, * and {{0,…}}"
    if max(largest, product if together else 1) > _MAX_REMAINDERS or states > _MAX_REMAINDERS**2 + _MAX_KEYS:
        return f"what multipleOf asks for has more than {_MAX_REMAINDERS:,} remainders; write a smaller one"
    return None


def least_work(kind: str, text: str) -> int:
    """Return a lower bound of the lexer fuel that a grammar needs, for its texts and for ``multipleOf``."""
    multiples = kind == "json" and '"multipleOf"' in text  # their states take memory, not fuel
    return max(len(text) // 2, 12_000 if multiples else 0)


def _optional_parts(pattern: str) -> int:
    return sum(found[1] is not None for found in _OPTIONAL.finditer(pattern))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _remainders(multiple: Any) -> int:
    """The number of states that count multiples of this number, at most one above the limit."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or not 0 < multiple < math.inf:
        return 1
    if multiple > _MAX_REMAINDERS:
        return _MAX_REMAINDERS + 1
    digits = Decimal(repr(multiple)).normalize()
    return min(int(digits.scaleb(max(0, -int(digits.as_tuple().exponent)))), _MAX_REMAINDERS + 1)
