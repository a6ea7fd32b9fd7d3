"""Seams: where a text must be cut before it is encoded, so that what users wrote cannot become a special token.

A chat template may write a user's text anywhere and in any way: as JSON, stripped, inside other text. So a seam is put
into the text before it is rendered, and found again in the rendering.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

# Nobody outside knows these digits; and digits alone survive whatever a template does to text.
_SEAM = f"{secrets.randbelow(10**24):024d}"


class Seams:
    """Puts seams into texts that spell a special token. names: the special tokens as the tokenizer finds them in text.

    The seam stands behind the first character of such a spelling; a special token of one character is left out.
    """

    def __init__(self, names: Iterable[str]) -> None:
        # plain added tokens of white space cannot open a role; models have them for code
        self._names = [name for name in names if name.strip()]
        self._initials = {name[0] for name in self._names}

    def put(self, value: Any) -> Any:
        """The same value of JSON with seams in its texts, keys of objects included."""
        if isinstance(value, str):
            return self._in_text(value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(inner) for key, inner in value.items()}
        return [self.put(inner) for inner in value] if isinstance(value, Sequence) else value

    def _in_text(self, text: str) -> str:
        if not any(initial in text for initial in self._initials):
            return text  # most are such, and some models have a thousand special tokens
        spelled = [name for name in self._names if name in text]
        for name in (name for name in spelled if len(name) == 1):
            text = text.replace(name, _SEAM)
        longer = [name for name in spelled if len(name) > 1]
        if not longer:
            return text
        # a lookahead finds spellings that overlap as well
        cuts = {found.start() + 1 for name in longer for found in re.finditer(f"(?={re.escape(name)})", text)}
        edges = [0, *sorted(cuts), len(text)]
        return _SEAM.join(text[first:last] for first, last in pairwise(edges))


def at_seams(text: str) -> list[str]:
    """What stands between the seams of a rendering: one text where there are none."""
    return text.split(_SEAM)
