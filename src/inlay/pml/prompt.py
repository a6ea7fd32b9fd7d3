"""A prompt: which modules of a schema it imports, and what it says besides."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from inlay.errors import Place
from inlay.pml.nodes import Import, PromptTurn, Text
from inlay.pml.prompt_reader import read_prompt
from inlay.pml.sources import document_from_file, document_from_string


@dataclass(frozen=True)
class Prompt:
    """A prompt as written; ``resolve`` checks it against its schema.

    ``schema`` is the schema's name, ``source`` the file or label that errors name, and ``place`` where the prompt
    names its schema, if that is known.
    """

    schema: str
    children: tuple[Text | Import | PromptTurn, ...]
    source: str = "<prompt>"
    place: Place | None = field(default=None, compare=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Prompt:
        """Read a prompt from a file in UTF-8; raises PMLError."""
        source = os.fsdecode(path)
        parts = read_prompt(document_from_file(path), source, declaration_counts=True)
        return cls(parts.schema, parts.children, source, parts.place)

    @classmethod
    def from_string(cls, text: str, *, source: str = "<prompt>") -> Prompt:
        """Read a prompt from a string; errors call it ``source``. Raises PMLError."""
        parts = read_prompt(document_from_string(text, source), source, declaration_counts=False)
        return cls(parts.schema, parts.children, source, parts.place)
