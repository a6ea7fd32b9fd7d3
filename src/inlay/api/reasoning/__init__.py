"""Reasoning before an answer: the marks of models (formats), and the parser of answers (parser)."""

from inlay.api.reasoning.formats import ModelReasoning, model_reasoning
from inlay.api.reasoning.parser import ReasoningParser, ReasoningUse, Split

__all__ = ["ModelReasoning", "ReasoningParser", "ReasoningUse", "Split", "model_reasoning"]
