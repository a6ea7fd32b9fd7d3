"""Calls of tools: how a model writes them (formats), how answers are held to them (schema) and read (parsers)."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.api.tools.formats import ModelTools
from inlay.api.tools.free_parser import FreeParser
from inlay.api.tools.parsers import AnswerParser, Delta, HeldParser

__all__ = ["AnswerParser", "Delta", "ToolUse"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request does with tools.

    model: how the model writes calls. names: of the functions that it may call.
    held: whether a grammar holds the answer to calls. parallel: whether there may be more than one.
    """

    model: ModelTools
    names: frozenset[str]
    held: bool
    parallel: bool

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return HeldParser() if self.held else FreeParser(self.model, self.names, parallel=self.parallel)
