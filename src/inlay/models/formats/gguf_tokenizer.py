"""Builds the tokenizer of a GGUF file, with the same ids as llama.cpp.

Byte-level tokenizers split text before merging its bytes. The file names the split (``tokenizer.ggml.pre``). A wrong
split gives other ids and silently worse answers. So an unknown name is refused, as in llama.cpp.

Files leave out the tokens that are special by name or end a text. Their rules follow llama.cpp's vocabulary loader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from inlay.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

#: Tokens with such a name end an answer.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
)
#: Fill-in-the-middle tokens that end an answer: a key of the file, and the names without that key.
_FILLING_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
#: Fill-in-the-middle tokens that are control tokens and end nothing.
_FILLING = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
}
#: gpt-oss marks that answers show.
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
#: Splits that imply BOS if the file does not say.
_BOS_SPLITS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
#: Splits that take a whole piece as a token before merging.
_WHOLE_SPLITS = (*(name for name in _BOS_SPLITS if name != "chameleon"), "minicpm5", "youtu")
#: Default ids of a SentencePiece file.
_SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}
#: SentencePiece learns no longer tokens: the largest ``max_sentencepiece_length`` of its trainer.
_LONGEST_LEARNED = 512
#: Characters of merges for each character of the tokens, at most. Tokens of 16, the default limit of learning, give 15.
_MOST_MERGED = 64
#: Phi-3's tokens that keep the white space behind them.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokens of a file.

    Args:
        file: The file's name, for errors.
        said: Returns the file's value of a key, or None.
    """

    file: str
    said: Callable[[str], Any]

    @cached_property
    def names(self) -> list[str]:
        """The tokens by id. As in llama.cpp, tokens without a name get one."""
        names = self._list("tokenizer.ggml.tokens", str, "a list of texts")
        return [name or f"[EMPTY_{i}]" for i, name in enumerate(names)]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token → id."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def kind(self) -> str | None:
        """``gpt2`` for byte-level BPE, ``llama`` for SentencePiece."""
        return self._text("tokenizer.ggml.model")

    @property
    def split(self) -> str | None:
        """The name of the split before merging."""
        return self._text("tokenizer.ggml.pre")

    @property
    def template(self) -> str | None:
        """The chat template."""
        return self._text("tokenizer.chat_template")

    @property
    def merges(self) -> list[str]:
        """The merges of byte-level BPE in order: two tokens with a space between."""
        return self._list("tokenizer.ggml.merges", str, "a list of texts")

    @property
    def scores(self) -> list[float]:
        """The scores of SentencePiece's tokens by id. The list may be shorter than the tokens."""
        return self._list("tokenizer.ggml.scores", (int, float), "a list of numbers")

    def role(self, name: str) -> int | None:
        """Return the id of a role (``bos``, ``eos``, ``eot``, ``unknown``, …), or None."""
        token = self.said(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and 0 <= token < len(self.names):
            return token
        default = _SENTENCEPIECE.get(name) if self.kind == "llama" else None
        known = default is not None and default < len(self.names) and self._types[default] in (UNKNOWN, CONTROL)
        return default if known else None

    @property
    def adds_bos(self) -> bool:
        """True if a text begins with BOS."""
        said = self.said("tokenizer.ggml.add_bos_token")
        return bool(said) if said is not None else self.kind == "llama" or self.split in _BOS_SPLITS

    @property
    def adds_eos(self) -> bool:
        """True if a text ends with EOS."""
        return bool(self.said("tokenizer.ggml.add_eos_token"))

    @property
    def adds_space(self) -> bool:
        """True if a space is added before a text, and before text behind a special token."""
        said = self.said("tokenizer.ggml.add_space_prefix")
        return self.kind == "llama" and (said is None or bool(said))

    @property
    def takes_whole_pieces(self) -> bool:
        """True if a piece of text that is a token needs no merges."""
        return self.split in _WHOLE_SPLITS

    @cached_property
    def _types(self) -> list[int]:
        types = self._list("tokenizer.ggml.token_type", int, "a list of whole numbers")
        if len(types) > len(self.names):
            raise ModelError(
                f"{self.file}: tokenizer.ggml.token_type has {len(types)} types for {len(self.names)} tokens; download "
                "it again",
                code="model.damaged_tokenizer",
            )
        return [*types, *[NORMAL] * (len(self.names) - len(types))]

    def _text(self, key: str) -> str | None:
        """Return the text of a key, or None. Raises ModelError for another type."""
        value = self.said(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(key, "a text")

    def _list(self, key: str, kind: type | tuple[type, ...], expected: str) -> list[Any]:
        """Return the list of a key. It is empty if the file has no such key. Raises ModelError for another type."""
        value = self.said(key)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(item, kind) for item in value[:1]):  # all items have one type
            return value
        raise self._wrong_type(key, expected)

    def _wrong_type(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.file}: {key} is not {expected}; download it again", code="model.damaged_tokenizer")

    def _filling(self, table: Mapping[str, tuple[str, ...]]) -> list[int]:
        """Return the ids of fill-in-the-middle roles: by the file's key, else by the first known name."""
        found = []
        for role, names in table.items():
            token = self.role(role)
            named = [self.ids[name] for name in names if name in self.ids]
            found += [token] if token is not None else named[:1]
        return found

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The ids that end an answer, and candidates that do not in this vocabulary."""
        named = [self.ids[name] for name in _ENDS if name in self.ids]
        roles = [token for role in ("eos", "eot", "eom") if (token := self.role(role)) is not None]
        found = dict.fromkeys([*roles, *named, *self._filling(_FILLING_ENDS)])
        ends = {self.names[i] for i in found}
        dropped = []
        calls = bool(ends & {"<|call|>", "<|calls|>"})
        if calls and ends & {"<|return|>", "<|flush|>"} and "<|end|>" in ends:  # here it ends a message, not a turn
            dropped.append(self.ids["<|end|>"])
        if {"<|tool_response>", "</s>"} <= ends:  # occurs in Gemma 4's text
            dropped.append(self.ids["</s>"])
        return [i for i in found if i not in dropped], dropped

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer, EOS first."""
        return self._ends[0]

    @cached_property
    def types(self) -> list[int]:
        """The type of each token. Tokens that end an answer or fill in the middle are always control tokens."""
        types = list(self._types)
        ends, dropped = self._ends
        for i in (*ends, *self._filling(_FILLING), *self._filling(_FILLING_ENDS)):
            types[i] = CONTROL
        for name in _SHOWN:
            if name in self.ids:
                types[self.ids[name]] = USER_DEFINED
        for i in dropped:
            types[i] = USER_DEFINED if self.names[i] == "<|end|>" else NORMAL
        return types

    def drops_space_behind(self, token: int) -> bool:
        """True if white space behind a special token is dropped."""
        model = str(self.said("general.name") or "").lower()
        return ("phi-3" in model or "phi3" in model) and self.names[token] not in _KEEP_SPACE


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


def make_tokenizer(vocabulary: GGUFVocabulary) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a vocabulary, with its chat template. Raises ModelError."""
    file, names = vocabulary.file, vocabulary.names
    if len(vocabulary.ids) < len(names):
        twice = next(name for i, name in enumerate(names) if vocabulary.ids[name] != i)
        raise ModelError(
            f"{file}: its tokenizer has the token {twice!r} twice; download the file again",
            code="model.damaged_tokenizer",
        )
    if vocabulary.kind == "gpt2":
        backend = _byte_level(vocabulary)
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
    tokenizer.chat_template = vocabulary.template
    return tokenizer


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Return BPE over the bytes of pre-split text."""
    file, split = vocabulary.file, vocabulary.split
    _check_split(file, split)
    merges = []
    for merge in vocabulary.merges:
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
    """Return all pairs of tokens that form a token, the highest score first. The default score is 0.

    Raises:
        ModelError: If the pairs would take far more memory than the tokens.
    """
    scores, ids = vocabulary.scores, vocabulary.ids
    cuts = _cuts(vocabulary)
    room = _MOST_MERGED * sum(map(len, ids))
    found = []
    for name, token in ids.items():
        score = scores[token] if token < len(scores) else 0.0
        for cut in cuts[len(name)]:
            left, right = name[:cut], name[cut:]
            if left in ids and right in ids:
                found.append((-score, token, -cut, left, right))
                room -= len(name)
        if room < 0:
            raise ModelError(
                f"{vocabulary.file}: tokenizer.ggml.tokens has too many tokens that consist of two others; download it "
                "again",
                code="model.damaged_tokenizer",
            )
    found.sort()
    return [(left, right) for *_, left, right in found]


def _cuts(vocabulary: GGUFVocabulary) -> dict[int, list[int]]:
    """Return, by the length of a token, where to cut it so that both pieces have the length of some token.

    Raises:
        ModelError: If a token above SentencePiece's limit can be cut. Each cut copies a whole token, so such tokens
            would take a time that is quadratic in their length.
    """
    lengths = sorted({len(name) for name in vocabulary.ids})
    known = set(lengths)
    cuts = {length: [cut for cut in lengths if length - cut in known] for length in lengths}
    long = next((length for length in lengths if length > _LONGEST_LEARNED and cuts[length]), None)
    if long is not None:
        raise ModelError(
            f"{vocabulary.file}: tokenizer.ggml.tokens has a token of {long} characters, and SentencePiece learns at "
            f"most {_LONGEST_LEARNED}; download it again",
            code="model.damaged_tokenizer",
        )
    return cuts


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
            "%s: does not name how its tokenizer splits text (tokenizer.ggml.pre). GPT-2's split is used and may give "
            "wrong ids; give the folder of its Hugging Face checkpoint, which names the split",
            file,
        )
    elif name not in _SPLITS:
        raise ModelError(
            f"{file}: its tokenizer splits text as '{name}' (tokenizer.ggml.pre), which inlay does not know, and "
            "another way would silently give other ids; give the folder of its Hugging Face checkpoint",
            code="model.unsupported_tokenizer",
        )
