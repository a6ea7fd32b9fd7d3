"""Reasoning before an answer: the marks of models (formats), and the parser of answers (parser)."""

from inlay.api.reasoning.formats import ModelReasoning, model_reasoning
from inlay.api.reasoning.parser import EndMarks, ReasoningParser, ReasoningUse, Split, Thought

__all__ = [
    "EndMarks",
    "ModelReasoning",
    "ReasoningParser",
    "ReasoningUse",
    "Split",
    "Thought",
    "model_reasoning",
]
