"""A prompt: which modules of a schema it imports, and what it says besides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import Place
from inlay.pml.json_text import is_json
from inlay.pml.nodes import Import, PromptTurn, Text
from inlay.pml.prompt_reader import read_prompt
from inlay.pml.sources import document_from_file, document_from_string
from inlay.pml.writer import write_prompt


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
        """Read a prompt from a file in UTF-8: as JSON if its name ends in ``.json``, and else as PML.

        Raises PMLError.
        """
        source = os.fsdecode(path)
        if is_json(source):
            from inlay.pml.json_form import read_prompt_json

            parts = read_prompt_json(document_from_file(path), source)
        else:
            parts = read_prompt(document_from_file(path), source, declaration_counts=True)
        return cls(parts.schema, parts.children, source, parts.place)

    @classmethod
    def from_string(cls, text: str, *, source: str = "<prompt>") -> Prompt:
        """Read a prompt from a string; errors call it ``source``. Raises PMLError."""
        parts = read_prompt(document_from_string(text, source), source, declaration_counts=False)
        return cls(parts.schema, parts.children, source, parts.place)

    @classmethod
    def from_json(cls, document: str | bytes | Mapping[str, Any], *, source: str = "<prompt>") -> Prompt:
        """Read a prompt in its JSON form; errors call it ``source``.

        Raises PMLError, and ParameterError for a mapping that is no JSON.
        """
        from inlay.pml.json_form import document_from_json, read_prompt_json

        parts = read_prompt_json(document_from_json(document, source), source)
        return cls(parts.schema, parts.children, source, parts.place)

    def to_pml(self) -> str:
        """The prompt as PML; raises ParameterError for what PML cannot express. See ``writer.write_prompt``."""
        return write_prompt(self)

    def to_json(self) -> str:
        """The prompt in its JSON form; raises ParameterError for nodes that break the rules of PML."""
        from inlay.pml.json_form import write_prompt_json

        return write_prompt_json(self)
