"""The oracle: stock transformers models with positions and visibility given by explicit masks.

``prefill`` is a full forward pass. ``PromptCacheOracle`` is Prompt Cache in its plainest form. The stock model encodes
modules one by one, their keys are rotated to their positions in the prompt and concatenated into a stock cache, and the
new tokens are computed on top of it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inlay.engine.unshared_runner import with_cache
from inlay.models.interface import attention_implementation
from inlay.models.load import LoadedModel


def mask_for(model: PreTrainedModel, query: Tensor, key: Tensor, visible: Tensor) -> Any:
    """Additive masks (1, 1, queries, keys) from visibility, with the sliding window in positions."""

    def additive(seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]

    config = model.config
    window = getattr(config, "sliding_window", None)
    near = visible if window is None else visible & (query[:, None] - key[None] < window)
    if config.model_type == "mistral":
        return additive(near)
    if config.model_type.startswith("lfm2"):
        return {"full_attention": additive(visible), "conv": None}
    if config.model_type == "lfm3":
        return {"full_attention": additive(visible), "sliding_attention": additive(near), "conv": None}
    if config.model_type in ("gemma4_text", "qwen2", "qwen3"):
        return {"full_attention": additive(visible), "sliding_attention": additive(near)}
    return additive(visible)


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: list[int], positions: list[int], visible: Tensor, past: Any = None) -> Any:
    """A stock forward pass of new tokens over an optional cache. visible: (tokens, cached + tokens) bool.

    The positions of cached tokens ride along in ``past.inlay_positions``.
    """
    query = torch.tensor(positions)
    before = past.inlay_positions if past is not None else torch.tensor([], dtype=torch.long)
    mask = mask_for(model, query, torch.cat((before, query)), visible)
    cache = past if past is not None else DynamicCache()
    with attention_implementation(model, "eager"):
        output = model(
            input_ids=torch.tensor([ids]),
            position_ids=query[None],
            attention_mask=mask,
            **with_cache(model, cache),
            use_cache=True,
        )
    cache.inlay_positions = torch.cat((before, query))
    return output


def prefill(loaded: LoadedModel, ids: list[int], positions: list[int] | None = None) -> Tensor:
    """(tokens, vocabulary): every logit of a causal pass, with gaps in the positions if they have any."""
    positions = positions or list(range(len(ids)))
    return forward(loaded.model, ids, positions, torch.ones(len(ids), len(ids)).tril().bool()).logits[0]


def keys_and_values(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


class PromptCacheOracle:
    """Assembles a stock cache from separately encoded modules, then runs new tokens over it.

    The columns of a short convolution after a module are those after its last token as it was encoded.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        layers = len(loaded.spec.layers)
        self.attending = loaded.spec.attending or tuple(range(layers))
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.positions: list[int] = []
        self.logits: list[Tensor] = []
        self.columns: dict[int, Tensor] = {}  # of each convolution, after the prompt so far
        self.before: dict[int, Tensor] = {}  # the same in front of the last module

    def add_module(self, context: list[tuple[int, int]], text: list[tuple[int, int]], start: int) -> None:
        """Encode ``text`` after ``context``, both (id, position), and add it to the prompt at position ``start``."""
        tokens = context + text
        ids, positions = [t for t, _ in tokens], [p for _, p in tokens]
        cache = self.cache({})
        cache.inlay_positions = torch.tensor([], dtype=torch.long)
        forward(self.loaded.model, ids, positions, torch.ones(len(ids), len(ids)).tril().bool(), cache)
        shift = start - text[0][1]
        for layer, number in enumerate(self.attending):
            key, value = cache.layers[number].keys, cache.layers[number].values
            self.keys[layer].append(self.moved(key[:, :, len(context) :], shift, layer))
            self.values[layer].append(value[:, :, len(context) :])
        self.positions += [p + shift for _, p in text]
        self.before, self.columns = self.columns, self.columns_of(cache)

    def add_fresh(self, ids: list[int], start: int) -> None:
        """Compute new tokens over all that stands at or before their positions."""
        self.compute(ids, list(range(start, start + len(ids))))

    def recompute(self, ids: list[int], positions: list[int]) -> None:
        """Recompute existing tokens over all tokens at or before their positions."""
        stay = [number for number, position in enumerate(self.positions) if position not in positions]
        for layer in range(len(self.keys)):
            self.keys[layer] = [torch.cat(self.keys[layer], 2)[:, :, stay]]
            self.values[layer] = [torch.cat(self.values[layer], 2)[:, :, stay]]
        behind, whole = self.columns, not self.positions or self.positions[-1] in positions
        self.positions = [self.positions[number] for number in stay]
        self.columns = self.before
        self.compute(ids, positions)
        if not whole:
            self.columns = behind

    def compute(self, ids: list[int], positions: list[int]) -> None:
        cache = self.cache(self.columns)
        for layer, number in enumerate(self.attending):
            if self.keys[layer]:
                cache.update(torch.cat(self.keys[layer], 2), torch.cat(self.values[layer], 2), number)
        cache.inlay_positions = torch.tensor(self.positions, dtype=torch.long)
        everything = torch.tensor(self.positions + positions)
        visible = everything[None] <= torch.tensor(positions)[:, None]
        output = forward(self.loaded.model, ids, positions, visible, cache)
        count = len(self.positions)
        for layer, number in enumerate(self.attending):
            self.keys[layer].append(cache.layers[number].keys[:, :, count:])
            self.values[layer].append(cache.layers[number].values[:, :, count:])
        self.positions += positions
        self.logits += list(output.logits[0])
        self.columns = self.columns_of(cache)

    def cache(self, columns: dict[int, Tensor]) -> DynamicCache:
        """An empty stock cache, with these columns of its convolutions."""
        if not self.loaded.spec.recurrent:
            return DynamicCache()
        config = copy.copy(self.loaded.model.config)
        # a cache of layers with a sliding window would drop tokens
        config.layer_types = [kind.replace("sliding", "full") for kind in config.layer_types]
        cache = DynamicCache(config=config)
        for number, each in columns.items():
            layer: Any = cache.layers[number]
            layer.lazy_initialization(conv_states=each)
            layer.conv_states[0].copy_(each)
            layer.has_previous_state[0] = True
        return cache

    def columns_of(self, cache: DynamicCache) -> dict[int, Tensor]:
        """The columns after the last token, by the number of the layer. Empty without convolutions."""
        layers: Any = enumerate(cache.layers)
        return {number: layer.conv_states[0] for number, layer in layers if number not in self.attending}

    def moved(self, key: Tensor, shift: int, layer: int) -> Tensor:
        """Keys of a layer rotated ``shift`` positions on, with the model's own rotary code."""
        if shift == 0:
            return key
        body: Any = self.loaded.model.model
        rotary: Any = getattr(body, "rotary_emb", None) or body.pos_emb
        kinds = getattr(self.loaded.model.config, "layer_types", None)
        own = f"{kinds[self.attending[layer]]}_inv_freq" if kinds else ""
        frequencies = getattr(rotary, own) if hasattr(rotary, own) else rotary.inv_freq
        angle = shift * torch.cat((frequencies, frequencies)).double()
        half = torch.cat((-key[..., key.shape[-1] // 2 :], key[..., : key.shape[-1] // 2]), -1)
        return (key.double() * angle.cos() + half.double() * angle.sin()).float()
