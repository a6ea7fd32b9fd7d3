"""Finds the text of each tool in the rendering of a chat template, so that each tool can be a piece of its own.

Templates write tools in many ways. A probe tool with secret digits in its name shows how a template separates them.
The tools are then rendered once more with a probe between each two. The text between two probes is that of one tool.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from inlay.errors import ModelError
from inlay.prompt.tokens import common_length

_DIGITS = f"{secrets.randbelow(10**18):018d}"  # clients cannot guess them, and no template changes digits
_PROBE_NAME = re.compile(_DIGITS + r"\d{4}")
_ANY_PROBE = _DIGITS + "0000"


@dataclass(frozen=True, slots=True)
class ToolTexts:
    """The texts of a request's tools, in the order of the rendering.

    Args:
        texts: one for each tool. They depend on the tool alone.
        glue: the text between two tools.
        ttls: the lifetime of each tool in seconds. None for no limit.
    """

    texts: tuple[str, ...]
    glue: str
    ttls: tuple[float | None, ...]

    @property
    def block(self) -> str:
        """The text of all tools."""
        return self.glue.join(self.texts)


@dataclass(frozen=True, slots=True)
class _ToolForm:
    """The form of a template's tools: the text of the probe tool, and the text between two tools."""

    probe: str
    glue: str


class ToolFinder:
    """Finds the texts of tools under one chat template.

    Args:
        render: renders one question with these tools.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        self._render = render
        self._form: _ToolForm | None = None
        self._asked = False

    def find(self, tools: Sequence[Mapping[str, Any]], ttls: Sequence[float | None]) -> ToolTexts | None:
        """Return the texts of tools. None if the template does not write them one by one, in this order."""
        if not self._asked:
            self._form, self._asked = self._find_form(), True
        form = self._form
        if form is None:
            return None
        probes = [_probe(number) for number in range(len(tools) + 1)]
        try:
            rendered = self._render([probes[0], *chain.from_iterable(zip(tools, probes[1:], strict=True))])
        except ModelError:
            return None
        ends = 0
        texts: list[str] = []
        for number in range(len(probes)):
            probe = form.probe.replace(_ANY_PROBE, _name(number))
            start = rendered.find(probe, ends)
            if start < 0:
                return None
            between = rendered[ends:start]
            if number:
                inner = len(between) - 2 * len(form.glue)
                if inner <= 0 or not (between.startswith(form.glue) and between.endswith(form.glue)):
                    return None
                texts.append(between[len(form.glue) : len(form.glue) + inner])
            ends = start + len(probe)
        return ToolTexts(tuple(texts), form.glue, tuple(ttls))

    def _find_form(self) -> _ToolForm | None:
        """Compare what stands in front of, between and behind three probe tools."""
        try:
            rendered = self._render([_probe(number) for number in range(3)])
        except ModelError:
            return None
        firsts = [rendered.find(_name(number)) for number in range(3)]
        lasts = [rendered.rfind(_name(number)) for number in range(3)]
        if min(firsts) < 0 or lasts[0] > firsts[1] or lasts[1] > firsts[2]:
            return None  # the texts of two tools overlap
        plain = _PROBE_NAME.sub(_ANY_PROBE, rendered)
        one, two, three = firsts
        period = plain[one:two]  # from one probe's name to that of the next
        if plain[two:three] != period:
            return None
        behind = common_length(plain[three:], period)
        before = min(common_length(plain[:one][::-1], period[::-1]), len(period) - behind)
        rest = len(period) - before
        return _ToolForm(period[rest:] + period[:behind], period[behind:rest])


def _name(number: int) -> str:
    return f"{_DIGITS}{number:04d}"


def _probe(number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": f"look_up_{_name(number)}",
            "description": "Finds a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "Which one."}},
                "required": ["word"],
            },
        },
    }
