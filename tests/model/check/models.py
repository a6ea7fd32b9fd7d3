"""A small llama of random weights with the bundled model's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from inlay.models.families import describe
from inlay.models.load import LoadedModel, fingerprint
from inlay_lab.train.architecture import new_model
from inlay_lab.train.tokenizer import train_tokenizer


@cache
def small_tokenizer() -> PreTrainedTokenizerBase:
    """The bundled model's tokenizer, trained on less."""
    return train_tokenizer(300)


@cache
def small_model() -> LoadedModel:
    model = _weights()
    return LoadedModel("small", model, small_tokenizer(), describe(model), fingerprint(model))


def save(folder: Path) -> Path:
    """Write model and tokenizer as a checkpoint."""
    _weights().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def _weights() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = new_model(small_tokenizer()).eval()
    for weight in model.parameters():  # fresh weights are so small that attention hardly matters
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    return model
