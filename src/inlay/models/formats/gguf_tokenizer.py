"""Builds the tokenizer of a GGUF file, with the same ids as llama.cpp.

Byte-level tokenizers split text before merging its bytes. The file names the split (``tokenizer.ggml.pre``). A wrong
split gives other ids and silently worse answers. So an unknown name is refused, as in llama.cpp.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from inlay.errors import ModelError
from inlay.models.formats.gguf_tokens import CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary

logger = logging.getLogger(__name__)

#: GPT-2's split, and one for words between punctuation, as in llama.cpp's llama-vocab.cpp.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BETWEEN_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"
_GPT2 = (f"{_WORDS}|\\s+",)
#: Name → patterns, applied in turn: a text is split into matches and the text between them.
_SPLITS: dict[str, tuple[str, ...]] = {
    **{name: (split,) for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()},
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("starcoder", "smollm", "refact", "command-r", "codeshell", "minerva-7b"), (r"\p{N}", _WORDS)),
    "stablelm2": (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BETWEEN_MARKS,)),
    "viking": (_BETWEEN_MARKS, r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_tokenizer(file: str, vocabulary: GGUFVocabulary) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a vocabulary, with its chat template. ``file`` is for errors. Raises ModelError."""
    names = vocabulary.names
    if len(vocabulary.ids) < len(names):
        twice = next(name for i, name in enumerate(names) if vocabulary.ids[name] != i)
        raise ModelError(
            f"{file}: its tokenizer has the token {twice!r} twice; download the file again",
            code="model.damaged_tokenizer",
        )
    if vocabulary.kind == "gpt2":
        backend = _byte_level(file, vocabulary)
    elif vocabulary.kind == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        raise ModelError(
            f"{file}: its tokenizer is of the kind '{vocabulary.kind}' (tokenizer.ggml.model), and gpt2 and llama are "
            "read; give the folder of its Hugging Face checkpoint",
            code="model.unsupported_tokenizer",
        )
    _add_special_tokens(backend, vocabulary)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{name}_token": _name(vocabulary, role) for name, role in roles.items()}
    backend.post_processor = _ends_of_text(vocabulary)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.backend_tokenizer.post_processor = backend.post_processor  # transformers may have replaced it
    tokenizer.chat_template = vocabulary.said("tokenizer.chat_template")
    return tokenizer


def _byte_level(file: str, vocabulary: GGUFVocabulary) -> Tokenizer:
    """Return BPE over the bytes of pre-split text."""
    split = vocabulary.split
    _check_split(file, split)
    merges = []
    for merge in vocabulary.said("tokenizer.ggml.merges") or []:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            raise ModelError(
                f"{file}: its tokenizer merges {merge!r}, which gives no token of it; download it again",
                code="model.damaged_tokenizer",
            )
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=vocabulary.takes_whole_pieces))
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (_GPT2 if split is None else _SPLITS[split])
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Return BPE over characters. It merges the neighbours that form the token with the highest score."""
    unknown = _name(vocabulary, "unknown")
    has_bytes = all(byte in vocabulary.ids for byte in _BYTES)
    model = models.BPE(vocabulary.ids, _merges(vocabulary), unk_token=unknown, fuse_unk=False, byte_fallback=has_bytes)
    backend = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undone: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space:  # applies to all text between special tokens
        spaces.insert(0, normalizers.Prepend(_SPACE))
        undone.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(undone)
    return backend


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, the highest score first. The default score is 0."""
    scores, ids = vocabulary.said("tokenizer.ggml.scores") or [], vocabulary.ids
    found = []
    for name, token in ids.items():
        score = scores[token] if token < len(scores) else 0.0
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in ids and right in ids:
                found.append((-score, token, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(backend: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Register control tokens and user-defined tokens, which are found in text by their spelling."""
    kinds = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    added = [
        AddedToken(
            name,
            special=kinds[kind],
            normalized=False,
            rstrip=vocabulary.drops_space_behind(token),
        )
        for token, (name, kind) in enumerate(zip(vocabulary.names, vocabulary.types, strict=True))
        if kind in kinds
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _ends_of_text(vocabulary: GGUFVocabulary) -> Any:
    """Return the step that puts BOS and EOS around a text; None if the file adds neither."""
    bos = _name(vocabulary, "bos") if vocabulary.adds_bos else None
    eos = _name(vocabulary, "eos") if vocabulary.adds_eos else None
    around = [(name, vocabulary.ids[name]) for name in (bos, eos) if name is not None]
    if not around:
        return None
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)


def _name(vocabulary: GGUFVocabulary, role: str) -> str | None:
    token = vocabulary.role(role)
    return None if token is None else vocabulary.names[token]


def _check_split(file: str, name: str | None) -> None:
    """Raise ModelError for an unknown split, and warn if the file names none.

    ``name`` is the file's ``tokenizer.ggml.pre``.
    """
    if name is None:
        logger.warning(
            "%s: does not say how text is split into tokens (tokenizer.ggml.pre), and is read with GPT-2's way, which "
            "gives wrong ids where the model learned another; the folder of its Hugging Face checkpoint says it",
            file,
        )
    elif name not in _SPLITS:
        raise ModelError(
            f"{file}: its tokenizer splits text as '{name}' (tokenizer.ggml.pre), which inlay does not know, and "
            "another way would silently give other ids; give the folder of its Hugging Face checkpoint",
            code="model.unsupported_tokenizer",
        )
