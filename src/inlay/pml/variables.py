"""Finds variables of other template languages, such as ``{{ name }}``, in a schema. PML does not replace them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from inlay.errors import Place
from inlay.pml.attributes import is_name
from inlay.pml.nodes import Module, Param, Text, Turn, Union
from inlay.pml.problems import JSONPlace
from inlay.pml.schema import Schema
from inlay.wording import clip

#: A name in braces, with a default or a filter behind it, as Jinja, Mustache and Handlebars have it.
_PLACE = re.compile(r"\{\{[{\-~&>#/^]?\s*([^\s{}|\-~]+)[^{}]*\}\}")


class TemplateVariable(NamedTuple):
    """A variable of another language. ``place``: of its text. ``advice``: the remedy, such as a parameter."""

    place: Place
    advice: str


def template_variables(schema: Schema) -> list[TemplateVariable]:
    """Return the variables in a schema, in its order. A name that a text has twice is returned once."""
    return [
        TemplateVariable(text.place, _sentence(name, whole, text))
        for text in texts_of(schema.children)
        for name, whole in {match[1]: match[0] for match in _PLACE.finditer(text.text)}.items()
    ]


def texts_of(children: Iterable[Text | Param | Module | Union | Turn]) -> Iterator[Text]:
    """All texts below these nodes, in order."""
    for child in children:
        if isinstance(child, Text):
            yield child
        elif not isinstance(child, Param):
            yield from texts_of(child.members if isinstance(child, Union) else child.children)


def params_of(children: Iterable[Text | Param | Module | Union | Turn]) -> Iterator[Param]:
    """All parameters below these nodes, in order."""
    for child in children:
        if isinstance(child, Param):
            yield child
        elif not isinstance(child, Text):
            yield from params_of(child.members if isinstance(child, Union) else child.children)


def _sentence(name: str, whole: str, text: Text) -> str:
    written = clip(name) if is_name(name) else "name"
    param = f'{{"param": "{written}", "len": …}}' if isinstance(text.place, JSONPlace) else _tag(written)
    return f"{clip(' '.join(whole.split()))} stays text as it is, and nothing fills it; write {param}, in a module"


def _tag(name: str) -> str:
    return f'<param name="{name}" len="…"/>'
