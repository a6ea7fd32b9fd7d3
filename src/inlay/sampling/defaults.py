"""The sampling defaults of a checkpoint's ``generation_config.json``, for requests that leave a field out."""

from __future__ import annotations

from typing import Any

from inlay.errors import ModelError, ParameterError
from inlay.models.load import LoadedModel
from inlay.sampling.params import SamplingParams

#: Its names → ours. ``do_sample`` is left out: ``temperature=0`` asks for the most probable token.
_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that the model's generation configuration sets. Raises ModelError."""
    generation = getattr(loaded.model, "generation_config", None)
    said = {ours: getattr(generation, name, None) for name, ours in _FIELDS.items()}
    defaults = {name: value for name, value in said.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        remedy = "correct that, or leave it out with generation_config='off'"
        raise ModelError(
            f"{loaded.name}: in its generation configuration {str(error).rstrip('.')}; {remedy}",
            code="model.invalid_generation_config",
        ) from None
    return defaults
