"""How the text of a GGUF file's tokenizer is split before its bytes are merged: by a name, ``tokenizer.ggml.pre``.

A split that is not the one that the merges were learned with gives other ids, and nothing shows it: the model only
answers worse. transformers' reader takes GPT-2's for every name that it does not know. Here such a name is refused, as
llama.cpp does.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from inlay.errors import ModelError

logger = logging.getLogger(__name__)

#: Names for GPT-2's own split, which is what transformers takes where it knows none.
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe")
#: That split, and one of the words between marks of punctuation, as llama.cpp's llama-vocab.cpp has them.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BETWEEN_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"
#: Names that transformers does not know → what splits a text, and then each piece: matches, and what is between them.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("starcoder", "smollm", "refact", "command-r", "codeshell", "minerva-7b"), (r"\p{N}", _WORDS)),
    "stablelm2": (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BETWEEN_MARKS,)),
    "viking": (_BETWEEN_MARKS, r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def check_split(file: str, kind: str | None, name: str | None) -> None:
    """Raise ModelError where it is not known how text is split; one warning where the file does not say.

    kind, name: what the file has under ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``.
    """
    if kind != "gpt2":  # the others have one way to split
        return
    if name is None:
        logger.warning(
            "%s: does not say how text is split into tokens (tokenizer.ggml.pre), and is read with GPT-2's way, which "
            "gives wrong ids where the model learned another; the folder of its Hugging Face checkpoint says it",
            file,
        )
    elif name not in (*_GPT2, *_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS):
        raise ModelError(
            f"{file}: its tokenizer splits text as '{name}' (tokenizer.ggml.pre), which inlay does not know, and "
            "another way would silently give other ids; give the folder of its Hugging Face checkpoint"
        )


def set_split(tokenizer: Any, kind: str | None, name: str | None) -> None:
    """Have a tokenizer that transformers made split as the file says, where transformers does not know the name."""
    if kind != "gpt2" or name not in _SPLITS:
        return
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[name]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
