"""A small model of random weights whose tokenizer has ten thousand words of one token each.

Benchmarks that send texts of a given number of tokens make them of such words, and refuse tokenizers with few of them.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPACE = "Ġ"  # how byte-level tokenizers write it
_SYLLABLES = ["".join(pair) for pair in product("bcdfghjklmnpqrstvwxz", "aeiou")]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %} Let us see.{% endif %}{% endif %}"
)
_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def many_words(directory: Path) -> Path:
    """Write the model there; its context is 4,096 tokens."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and every word of two syllables after a space, merged letter by letter from its start."""
    merges: dict[tuple[str, str], None] = {}
    for syllables in product(_SYLLABLES, _SYLLABLES):
        word = _SPACE + "".join(syllables)
        merges.update(dict.fromkeys((word[:end], word[end]) for end in range(1, len(word))))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=_TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": _SPECIAL[1:]})
    return made
