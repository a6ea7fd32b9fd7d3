"""The text models of multimodal checkpoints.

A checkpoint that was published as ``…ForConditionalGeneration`` holds a text model beside the parts for images, video
and sound. Its text model is loaded alone, as the stock class of the text model. Answers to texts are the same.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from inlay.models.family import body_name
from inlay.models.fill import on_meta
from inlay.models.quantized import renamed
from inlay.wording import counted, listed

#: Types of multimodal checkpoints with a text model that is served alone.
MULTIMODAL = (
    *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "idefics3", "llama4", "mistral3", "qwen2_5_vl", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)

#: Types of text models without a causal class of their own, and the settings of one with the same computation. They
#: rotate by three positions for each token, and those of a text are equal.
_SAME: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
#: Settings of those three positions.
_OF_POSITIONS = ("mrope_section", "mrope_interleaved")

_TEMPLATE_FILE = "chat_template.json"

#: Names of weights in multimodal checkpoints, as patterns, and the beginnings of their names in the text model.
NAMES: dict[str, str] = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}


def is_multimodal(config: PretrainedConfig) -> bool:
    """True if a checkpoint of this configuration holds a text model that is served alone."""
    return config.model_type in MULTIMODAL


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text model of a multimodal checkpoint, and any other configuration as it is.

    Tied weights, the dtype, quantized weights and the ends of a text are settings of the whole checkpoint.
    """
    if not is_multimodal(config):
        return config
    text: PretrainedConfig = config.get_text_config(decoder=True)
    if text.model_type in _SAME:
        text = _same_computation(text)
    for name in ("tie_word_embeddings", "dtype", "quantization_config", "eos_token_id"):
        value = getattr(config, name, None)
        if value is not None:
            setattr(text, name, value)
    for name in ("bos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    text.name_or_path = config.name_or_path
    return text


def processor_template(folder: Path) -> str | None:
    """Return the chat template that older multimodal checkpoints keep beside their tokenizer. None if there is none."""
    try:
        found = json.loads((folder / _TEMPLATE_FILE).read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


class TextWeights:
    """The weights in a multimodal checkpoint that belong to its text model.

    Args:
        kind: The model type of the whole checkpoint.
        config: The configuration of its text model.
    """

    def __init__(self, kind: str, config: PretrainedConfig) -> None:
        self._kind, self._type = kind, config.model_type
        self._model = on_meta(copy.deepcopy(config), torch.bfloat16)
        self._body = body_name(self._model)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block, transformers reads the text model, and lists no weights that are left out.

        Some checkpoints have their experts in another order of dimensions than the text model. The stock class of the
        whole checkpoint knows how to convert them.
        """
        log = logging.getLogger("transformers.modeling_utils")
        known, whole = map(get_checkpoint_conversion_mapping, (self._type, self._kind))
        converters = [each for each in whole or () if isinstance(each, WeightConverter)]
        log.addFilter(_is_no_report)
        if converters:
            register_checkpoint_conversion_mapping(self._type, [*(known or ()), *converters], overwrite=True)
        try:
            yield
        finally:
            if converters:
                register_checkpoint_conversion_mapping(self._type, known or [], overwrite=True)
            log.removeFilter(_is_no_report)

    @property
    def sentence(self) -> str:
        """A sentence for users that names the text model."""
        return f"only the text model ({self._type}) of this {self._kind} checkpoint is served"

    def __contains__(self, name: object) -> bool:
        return self.other_part(str(name)) is None

    def other_part(self, name: str) -> str | None:
        """Return the part of the checkpoint that a weight belongs to. None if it is the text model."""
        first, *rest = renamed(name, NAMES).split(".")
        if first == self._body and rest:
            return None if hasattr(getattr(self._model, self._body), rest[0]) else rest[0]
        return None if hasattr(self._model, first) else first

    def note(self, names: Iterable[str]) -> str:
        """Return a note for users about the text model and the parts that are left out.

        Args:
            names: The names of all weights in the checkpoint.
        """
        parts = Counter(filter(None, map(self.other_part, names)))
        if not parts:
            return self.sentence
        return (
            f"{self.sentence}; {counted(parts.total(), 'weight')} of other parts are left out: {listed(sorted(parts))}"
        )


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _same_computation(text: PretrainedConfig) -> PretrainedConfig:
    settings = text.to_dict()
    rotary = {name: value for name, value in (text.rope_parameters or {}).items() if name not in _OF_POSITIONS}
    if rotary.get("rope_type") == "mrope":
        rotary["rope_type"] = "default"
    settings |= {"rope_parameters": rotary}
    for name in ("architectures", "transformers_version", "rope_scaling"):
        settings.pop(name, None)
    made: PretrainedConfig = AutoConfig.for_model(**settings | _SAME[text.model_type])
    return made
