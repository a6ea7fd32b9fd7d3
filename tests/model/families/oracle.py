"""The oracle of every family: one pass of the stock model over all tokens, with explicit visibility and positions.

Stock attention computes. An implementation registered with transformers passes each layer's call on to the modeling
file's own ``eager_attention_forward``. It replaces the mask of transformers by a mask of positions, cut at the layer's
sliding window. Families without that interface (mpt, bloom, falcon) take the mask as an argument, and the function that
builds their biases is replaced by one that knows positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from inlay.models.load import LoadedModel
from tests.model.families.configs import model_type, stock_model

_asked: dict[str, Tensor] = {}  # positions (tokens,) and visible (tokens, tokens) of the pass that runs


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    window = options.get("sliding_window") or _masked_window(module)
    if options.get("scaling") is None:
        options["scaling"] = query.shape[-1] ** -0.5
    return _eager(type(module))(module, query, key, value, _mask(window), **options)


AttentionInterface.register("families_oracle", _attention)


def _eager(kind: type) -> Any:
    return sys.modules[kind.__module__].eager_attention_forward


def _masked_window(module: Any) -> int | None:
    """The window that this stock code knows through its mask alone."""
    return module.config.sliding_window if module.config.model_type == "phimoe" else None


def _mask(window: int | None = None) -> Tensor:
    at, seen = _asked["positions"], _asked["visible"]
    if window is not None:
        seen = seen & (at[:, None] - at[None] < window)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@cache
def stock(name: str) -> PreTrainedModel:
    """The model of a row as transformers makes it, apart from the one that inlay runs."""
    return stock_model(name)


def stock_implementation(name: str) -> str:
    """The path of stock attention that is right.

    Falcon's eager path adds ALiBi twice; its sdpa path is right within 256 positions, where bfloat16 has whole numbers.
    """
    return "sdpa" if model_type(name) == "falcon" else "eager"


@torch.inference_mode()
def untouched(name: str, ids: list[int]) -> Tensor:
    """(tokens, vocabulary): a plain call of the stock model, which builds its own masks."""
    model = stock(name)
    model.config._attn_implementation = stock_implementation(name)
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.inference_mode()
def masked(name: str, ids: list[int], positions: list[int], visible: Tensor) -> Tensor:
    """(tokens, vocabulary): tokens at any positions. visible: (tokens, tokens), what each attends to, itself too."""
    model = stock(name)
    _asked.update(positions=torch.tensor(positions), visible=visible)
    with _beside_the_interface(name, model) as more:
        return model(torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False, **more).logits[0]


@contextmanager
def _beside_the_interface(name: str, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    at = _asked["positions"]
    config: Any = model.config
    match model_type(name):
        case "falcon":
            config._attn_implementation = "sdpa"
            slopes = modeling_bloom._get_alibi_slopes(config.num_attention_heads, torch.device("cpu"))
            biases = slopes.bfloat16().float()[:, None, None] * at
            with patch.object(modeling_falcon, "build_alibi_tensor", lambda *_, **__: biases):
                yield {"attention_mask": _mask()}
        case "bloom":
            config._attn_implementation = "eager"
            slopes = modeling_bloom._get_alibi_slopes(config.n_head, torch.device("cpu"))
            biases = slopes[:, None, None] * at
            with patch.object(modeling_bloom, "build_alibi_tensor", lambda *_, **__: biases):
                yield {"attention_mask": _mask()}
        case "mpt":
            config._attn_implementation = "eager"
            slopes = -modeling_mpt.build_mpt_alibi_tensor(config.n_heads, 2)[:, :, :1]
            biases = slopes * at
            with patch.object(modeling_mpt, "build_mpt_alibi_tensor", lambda *_, **__: biases):
                yield {"attention_mask": _mask()}
        case _:
            config._attn_implementation = "families_oracle"
            yield {}


class ComposedPrompt:
    """Prompt Cache in one pass: a module's tokens see the module's own context, and new tokens see the prompt before
    them.

    Each module has a copy of its context for itself, at the distance where it was encoded. No family that allows shifts
    can distinguish this from encoding the module elsewhere and moving it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._name = loaded.name.removeprefix("tiny-")
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._group: list[int] = []  # of a module; 0 for new tokens
        self._composed_prompt: list[bool] = []  # not what is there for a module alone

    def add_module(self, context: list[tuple[int, int]], text: list[tuple[int, int]], start: int) -> None:
        """See PromptCacheOracle.add_module."""
        shift, group = start - text[0][1], max(self._group, default=0) + 1
        for composed_prompt, tokens in ((False, context), (True, text)):
            for token, position in tokens:
                self._add(token, position + shift, group, composed_prompt)

    def add_fresh(self, ids: list[int], start: int) -> None:
        """See PromptCacheOracle.add_fresh."""
        for offset, token in enumerate(ids):
            self._add(token, start + offset, 0, True)

    def _add(self, token: int, position: int, group: int, composed_prompt: bool) -> None:
        self._ids.append(token)
        self._positions.append(position)
        self._group.append(group)
        self._composed_prompt.append(composed_prompt)

    @property
    def logits(self) -> list[Tensor]:
        """A row for each new token."""
        at, group, composed_prompt = (
            torch.tensor(each) for each in (self._positions, self._group, self._composed_prompt)
        )
        visible = (at[None] <= at[:, None]) & torch.where(
            group[:, None] > 0, group[:, None] == group, composed_prompt[None]
        )
        return list(masked(self._name, self._ids, self._positions, visible)[group == 0])
