"""A tokenizer of one token a byte, with a chat template, for models that come without one."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|bos|>", "<|eos|>", "<|unk|>", "<|start|>", "<|turn|>", "<|end|>")

_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|start|>{{ message['role'] }}<|turn|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|turn|>{% endif %}"
)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with ids 0–255 for the bytes and six special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
