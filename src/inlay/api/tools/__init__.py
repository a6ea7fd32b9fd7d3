"""Tool calls: the tools of a request (offer), the formats of models and the parsing of answers (formats).

Without a grammar, ``FreeParser`` separates text from calls, and a reader of the format's syntax reads each call
(readers, tagged).
"""

from __future__ import annotations

from dataclasses import dataclass

from inlay.api.tools.formats import AnswerParser, Delta, EitherParser, FreeParser, HeldParser, ModelTools
from inlay.api.tools.readers import Functions

__all__ = ["AnswerParser", "Delta", "ToolUse"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use of tools in one request.

    Args:
        model: the model's format of calls.
        functions: the functions that it may call, and their parameters.
        held: a grammar forces the answer to be calls.
        parallel: an answer may have several calls.
        formed: the grammar also allows an answer of another form instead of calls.
    """

    model: ModelTools
    functions: Functions
    held: bool
    parallel: bool
    formed: bool = False

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        if self.held:
            return EitherParser(self.functions, self.model.format.key) if self.formed else HeldParser(self.functions)
        return FreeParser(self.model, self.functions, parallel=self.parallel)
