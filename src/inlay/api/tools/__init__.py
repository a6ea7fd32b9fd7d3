"""Calls of tools: how a model writes them (formats), how answers are held to them (schema) and read (parsers)."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.api.tools.formats import ModelTools
from inlay.api.tools.free_parser import FreeParser
from inlay.api.tools.parsers import AnswerParser, Delta, EitherParser, HeldParser

__all__ = ["AnswerParser", "Delta", "ToolUse"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request does with tools.

    model: how the model writes calls. names: of the functions that it may call.
    held: whether a grammar holds the answer to calls. parallel: whether there may be more than one.
    formed: whether what is held may be text of its own form in place of calls.
    """

    model: ModelTools
    names: frozenset[str]
    held: bool
    parallel: bool
    formed: bool = False

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        if self.held:
            return EitherParser(self.names, self.model.format.key) if self.formed else HeldParser(self.names)
        return FreeParser(self.model, self.names, parallel=self.parallel)
