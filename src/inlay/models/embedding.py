"""Embedding models: encoders and decoders of transformers that turn token ids into vectors, without a KV cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from inlay.errors import InlayError, ModelError
from inlay.models.fill import check_complete
from inlay.models.formats.reading import quiet_transformers
from inlay.models.load import load_tokenizer, whole_config
from inlay.models.location import check_location, check_weights, model_name, public_name
from inlay.wording import first_line

EmbeddingPooling = Literal["mean", "last", "cls"]

#: The longest text, in tokens, if the model allows more. One text is one pass, so this bounds its memory and time.
LONGEST = 8_192

#: The file in which sentence-transformers declares the pooling of a model, and its fields.
_DECLARATION = "1_Pooling/config.json"
_DECLARED: dict[str, EmbeddingPooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class EmbeddingModel:
    """A model of transformers in fp32 on the CPU, with its tokenizer.

    Args:
        name: a folder or a hub name.
        pooling: "mean", "last" or "cls". None for the checkpoint's own. Without one it is "last" for decoders, and
            "mean" for others.

    Attributes:
        name: the public name.
        pooling: the pooling of requests without one.
        max_tokens: the longest text.
        vocab_size: the number of known token ids.

    Raises:
        ModelError: the model cannot be loaded, or gives no vectors.
    """

    def __init__(self, name: str, pooling: EmbeddingPooling | None = None) -> None:
        place = model_name(name)
        check_location(place)
        check_weights(place)
        config = whole_config(place)
        self.name = public_name(place)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(place)
        self._model = _load(place, config)
        self.pooling: EmbeddingPooling = pooling or _declared_pooling(place) or _usual_pooling(config)
        self.max_tokens = _longest(self._model, self.tokenizer)
        self.vocab_size = cast("nn.Embedding", self._model.get_input_embeddings()).num_embeddings
        self._pad = self.tokenizer.pad_token_id or 0
        self._check(place)

    def tokenize(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of a text with the tokenizer's special tokens.

        Args:
            most: keep this many tokens at the end of the text, special tokens included. None keeps all.
        """
        made = self.tokenizer(text, return_special_tokens_mask=True, verbose=False)
        ids, special = list(made["input_ids"]), list(made["special_tokens_mask"])
        if most is None or len(ids) <= most:
            return ids
        first = special.index(0) if 0 in special else len(ids)
        kept = max(0, most - first)
        return ids[:first][:most] + (ids[-kept:] if kept else [])

    def vectors(self, rows: Sequence[Sequence[int]], pooling: EmbeddingPooling) -> Tensor:
        """Return the pooled last hidden states of texts, without normalization: [rows, hidden] fp32.

        Args:
            rows: the ids of each text, at least one.

        Raises:
            InlayError: the vectors hold NaN or inf.
        """
        lengths = torch.tensor([len(row) for row in rows])
        longest = int(lengths.max())
        ids = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in rows])
        mask = torch.arange(longest) < lengths[:, None]  # [rows, longest]
        # without padding, attention needs no mask of [longest, longest]
        given = {} if bool(mask.all()) else {"attention_mask": mask.long()}
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, **given).last_hidden_state
            if pooling == "mean":
                pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
            else:
                pooled = hidden[torch.arange(len(rows)), lengths - 1 if pooling == "last" else 0]
        if not bool(pooled.isfinite().all()):
            raise InlayError(
                f"the vectors of the embedding model {self.name} hold NaN or inf; its weights are damaged",
                code="model.invalid_numbers",
            )
        return cast("Tensor", pooled)

    def _check(self, place: str) -> None:
        """Embed one token as a trial. Raises ModelError if the model gives no hidden states, or NaN or inf.

        Args:
            place: The folder of the model, for errors.
        """
        self.tokenize("a")  # resets the padding and truncation of tokenizer.json, which a second thread could not
        try:
            self.vectors([[self._pad]], self.pooling)
        except InlayError as error:
            raise ModelError(f"{place}: {error}", code="model.invalid_numbers") from error
        except Exception as error:
            raise ModelError(
                f"{place}: models of type '{self._model.config.model_type}' give no vectors of texts; give an encoder "
                "such as BERT, or a decoder",
                code="model.no_embeddings",
            ) from error


def _load(place: str, config: PretrainedConfig) -> PreTrainedModel:
    try:
        with quiet_transformers():
            read: Any = AutoModel.from_pretrained(
                place,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            f"{place}: the weights cannot be loaded: {first_line(error)}", code="model.unreadable_weights"
        ) from error
    model: PreTrainedModel
    model, report = read
    # BERT's pooler is not used here, and checkpoints may lack it
    missing = [key for key in report["missing_keys"] if not key.startswith("pooler.")]
    check_complete(place, {"missing_keys": missing})
    model.config.use_cache = False
    return model.eval()


def _declared_pooling(place: str) -> EmbeddingPooling | None:
    """Return the pooling that the checkpoint declares, or None if it declares none.

    Raises ModelError if it declares a pooling that inlay does not support.
    """
    file = cached_file(
        place,
        _DECLARATION,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8") as opened:
            declared = json.load(opened)
        chosen = [key for key, value in declared.items() if key.startswith("pooling_mode_") and value is True]
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{place}/{_DECLARATION} cannot be read; give --embedding-pooling, or download the checkpoint again",
            code="model.unreadable_config",
        ) from error
    if len(chosen) == 1 and chosen[0] in _DECLARED:
        return _DECLARED[chosen[0]]
    raise ModelError(
        f"{place}/{_DECLARATION} asks for {' and '.join(chosen)[:200] or 'no pooling'}; give --embedding-pooling mean, "
        "last or cls",
        code="model.unreadable_config",
    )


def _usual_pooling(config: PretrainedConfig) -> EmbeddingPooling:
    kind = config.model_type
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "last" if decoder else "mean"


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest number of tokens that a text may have."""
    places = getattr(model.config, "max_position_embeddings", None) or LONGEST
    for name, module in model.named_modules():
        # RoBERTa's positions start behind the index of padding
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            places -= int(module.padding_idx) + 1
    return int(min(places, tokenizer.model_max_length, LONGEST))
