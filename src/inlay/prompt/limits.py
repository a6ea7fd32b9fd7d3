"""What no prompt for a model may go beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from inlay.errors import ContextError, ParameterError, Place, PMLError, Problem
from inlay.pml.scopes import path_of
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.placed import PromptLayout
from inlay.prompt.tokens import beyond_vocabulary
from inlay.sampling_params import SamplingParams
from inlay.wording import show


def check_prompt(layout: PromptLayout, model: ModelInfo, tokenizer: PreTrainedTokenizerBase, *, answered: bool) -> None:
    """Whatever a prompt was made of, an id beyond the vocabulary would end the pass of everybody.

    answered: whether there has to be room for a token behind it. Raises ContextError and ParameterError.
    """
    where = f"{layout.place}: " if layout.place else ""
    longest, end = model.max_positions, layout.end - 1
    if end + answered >= longest:  # first: what cannot fit may be of any length
        raise ContextError(
            f"{where}the prompt ends at position {end} and the model's context is {longest} tokens long, "
            "answer included; shorten the prompt, or import fewer modules"
        )
    if unknown := beyond_vocabulary(layout.ids, model.vocab_size, tokenizer.convert_ids_to_tokens):
        raise ParameterError(f"{where}the prompt holds {unknown}")
    if not layout.ids:
        raise ParameterError("a prompt is empty; give at least one token")


def check_forced(layout: PromptLayout, model: ModelInfo, forced: Sequence[int]) -> None:
    """Refuse a continuation that there is no room for. Raises ContextError."""
    limit = model.max_positions - layout.positions[-1] - 1
    if limit < len(forced):
        raise ContextError(
            f"a prompt of {len(layout.ids)} tokens and its continuation of {len(forced)} are "
            f"{len(forced) - limit} too long for the model's context; shorten one of them"
        )


def check_tokens(params: SamplingParams, model: ModelInfo) -> None:
    """Refuse sampling parameters that name tokens which the model does not know. Raises ParameterError."""
    last = model.vocab_size - 1
    for name, token in params.largest_ids.items():
        if token > last:
            raise ParameterError(f"{name} holds token {show(token)}, and the model knows tokens 0 to {last}")


def check_weight(weight: float) -> float:
    """Raises ParameterError."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ParameterError(f"weight is {weight!r:.100}; it must be a number above 0")
    return weight


def check_lengths(layout: SchemaLayout, longest: int) -> None:
    """Refuse what no prompt can hold. longest: the model's context, in tokens. Raises PMLError."""
    tokens: dict[str, int] = {}
    for run in layout.runs:
        path = path_of(run.owner)
        tokens[path] = tokens.get(path, 0) + len(run.ids)
    problems = []
    for path, count in tokens.items():
        place = layout.schema.modules[path].place if path else Place(layout.schema.source)
        what = f"module '{path}'" if path else "the text outside modules"
        if count >= longest:
            message = (
                f"{what} is {count} tokens long and the model's context is {longest} tokens long, answer included; "
                "shorten it, or cut it into modules of which prompts import some"
            )
            problems.append(Problem(place, message))
    if problems:
        raise PMLError(problems)
