"""Write a trained model as a Hugging Face checkpoint: what ``demo`` loads, and any other program can."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write configuration, bf16 weights, tokenizer and chat template into a directory, made if need be."""
    config = model.config.to_dict()
    copy = LlamaForCausalLM(type(model.config).from_dict(config))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    copy.bfloat16().config.dtype = torch.bfloat16
    copy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
