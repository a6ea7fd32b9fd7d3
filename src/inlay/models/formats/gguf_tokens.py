"""llama.cpp's built-in rules for vocabularies: tokens that are special by name, and tokens that end a text.

They follow llama.cpp's vocabulary loader. Files leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
#: Phi-3's tokens that keep the white space behind them.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokens of a file. ``said`` returns the file's value of a key, or None."""

    said: Callable[[str], Any]

    @cached_property
    def names(self) -> list[str]:
        """The tokens by id. As in llama.cpp, tokens without a name get one."""
        names = self.said("tokenizer.ggml.tokens") or []
        return [name or f"[EMPTY_{i}]" for i, name in enumerate(names)]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token → id."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def kind(self) -> str | None:
        """``gpt2`` for byte-level BPE, ``llama`` for SentencePiece."""
        return self.said("tokenizer.ggml.model")

    @property
    def split(self) -> str | None:
        """The name of the split before merging."""
        return self.said("tokenizer.ggml.pre")

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
        types = self.said("tokenizer.ggml.token_type") or []
        return [*types, *[NORMAL] * (len(self.names) - len(types))]

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
