"""What models think before they answer: how they mark it (formats), and how answers are read (parser)."""

from inlay.api.reasoning.formats import ModelReasoning, model_reasoning
from inlay.api.reasoning.parser import ReasoningParser, ReasoningUse, Split

__all__ = ["ModelReasoning", "ReasoningParser", "ReasoningUse", "Split", "model_reasoning"]
