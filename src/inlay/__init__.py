"""inlay serves language models and computes the attention states of every piece of text once.

Names are loaded when they are first used, so that reading a schema does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.client.llm import LLM
    from inlay.errors import (
        AbortedError,
        CapacityError,
        ContextError,
        DeadlineError,
        EngineDeadError,
        InlayError,
        ModelError,
        ParameterError,
        PMLError,
        QueueFullError,
    )
    from inlay.logprobs import Logprob
    from inlay.pml import Prompt, Schema, any_order, use
    from inlay.pml.program import Length, Program, ProgramPrompt, assistant, program, system, user
    from inlay.sampling.params import SamplingParams
    from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, SetOrder, Usage

_HOMES = {
    "QueueFullError": "inlay.errors",
    "DeadlineError": "inlay.errors",
    "AsyncLLM": "inlay.client.async_llm",
    "AbortedError": "inlay.errors",
    "CapacityError": "inlay.errors",
    "CompletionOutput": "inlay.types",
    "ContextError": "inlay.errors",
    "EngineDeadError": "inlay.errors",
    "InlayError": "inlay.errors",
    "LLM": "inlay.client.llm",
    "Length": "inlay.pml.program",
    "Logprob": "inlay.logprobs",
    "ModelError": "inlay.errors",
    "PMLError": "inlay.errors",
    "ParameterError": "inlay.errors",
    "Program": "inlay.pml.program",
    "ProgramPrompt": "inlay.pml.program",
    "Prompt": "inlay.pml",
    "RequestMetrics": "inlay.types",
    "RequestOutput": "inlay.types",
    "SamplingParams": "inlay.sampling.params",
    "Schema": "inlay.pml",
    "Usage": "inlay.types",
    "SetOrder": "inlay.types",
    "any_order": "inlay.pml",
    "assistant": "inlay.pml.program",
    "program": "inlay.pml.program",
    "system": "inlay.pml.program",
    "use": "inlay.pml",
    "user": "inlay.pml.program",
}

__all__ = [
    "LLM",
    "AbortedError",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ContextError",
    "DeadlineError",
    "EngineDeadError",
    "InlayError",
    "Length",
    "Logprob",
    "ModelError",
    "PMLError",
    "ParameterError",
    "Program",
    "ProgramPrompt",
    "Prompt",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Schema",
    "SetOrder",
    "Usage",
    "any_order",
    "assistant",
    "program",
    "system",
    "use",
    "user",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'inlay' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
