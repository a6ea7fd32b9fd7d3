"""The oracle of composed prompts: it computes what a request should read with stock forward passes only.

The stock model encodes each segment after the segment's own context. The segment then passes through its codec, is
rotated to its position, and loses the tokens that are left out. The request's own tokens are computed on top of it.
The oracle uses no store, plan or policy, so an engine that reads wrong keys and values gets other logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from inlay.kv.identity import LOSSLESS, SegmentSpec
from inlay.kv.offload.codecs import CODECS
from inlay.models.load import LoadedModel
from inlay.prompt.composed import CachedSpan, ComposedPrompt, RecomputedSpan
from tests.model.equivalence.oracle import PromptCacheOracle, forward, keys_and_values

Layers = list[tuple[Tensor, Tensor]]
"""Of each layer keys and values, (1, kv_heads, tokens, head_dim)."""


class ComposedOracle:
    """models: by the digest of an adapter, the stock model with it; b"" for the model alone."""

    def __init__(self, models: Mapping[bytes, LoadedModel]) -> None:
        self._models = models
        self._encoded: dict[bytes, Layers] = {}

    def logits(
        self,
        composed: ComposedPrompt,
        adapter: bytes,
        said: Sequence[int] = (),
        lossy: Mapping[bytes, Layers] | None = None,
    ) -> Tensor:
        """(len(said) + 1, vocabulary): logits after the prompt, and after each generated token.

        lossy: by key, keys and values that stand for those of lossy forms; see ``stand_in``.
        """
        made = _Reading(self._models[adapter])
        *before, last = composed
        for part in before:
            if isinstance(part, CachedSpan):
                made.read((lossy or {}).get(part.spec.key) or self._segment(part.spec), part)
            elif isinstance(part, RecomputedSpan):
                made.compute(list(part.ids), list(part.positions))
            else:
                made.compute(list(part.ids), list(range(part.start, part.start + len(part.ids))))
        ids = [*last.ids, *said]
        made.compute(ids, list(range(last.start, last.start + len(ids))))
        return torch.stack(made.logits[-len(said) - 1 :])

    def stand_in(self, lossy: Sequence[SegmentSpec], found: Mapping[bytes, Layers]) -> dict[bytes, Layers]:
        """Return the keys and values found in the store for lossy forms, after checking that they are near the expected
        ones.

        A number between two codes may round to either, depending on its last bit, and a form may have been recomputed
        under
        its name. A form that was not found counts as lossless.
        """
        made = {}
        for spec in lossy:
            exact = self._segment(spec.lossless)
            made[spec.key] = found.get(spec.key, exact)
            for stored, computed in zip(made[spec.key], exact, strict=True):
                for one, other in zip(stored, computed, strict=True):
                    largest = other.abs().amax((2, 3), keepdim=True)
                    assert bool(((one - other).abs() <= largest / 128 + other.abs() / 15).all()), "another segment's"
        return made

    def _segment(self, spec: SegmentSpec) -> Layers:
        found = self._encoded.get(spec.key)
        if found is None:
            found = self._encoded[spec.key] = self._passed(spec) if spec.codec != LOSSLESS else self._alone(spec)
        return found

    def _alone(self, spec: SegmentSpec) -> Layers:
        chain = [*spec.context, spec]
        ids = [token for each in chain for token in each.ids]
        positions = [at for each in chain for at in range(each.start, each.end)]
        cache = DynamicCache()
        cache.inlay_positions = torch.tensor([], dtype=torch.long)
        visible = torch.ones(len(ids), len(ids)).tril().bool()
        forward(self._models[spec.before.adapter].model, ids, positions, visible, cache)
        own = len(spec.ids)
        return [(key[:, :, -own:], value[:, :, -own:]) for key, value in keys_and_values(cache)]

    def _passed(self, spec: SegmentSpec) -> Layers:
        """Through the codec, as a tier writes and reads it."""
        codec = CODECS[spec.codec]
        found: Layers = []
        for key, value in self._segment(spec.lossless):
            both = torch.cat((key, value)).contiguous().numpy()
            data = codec.encode(both.view(np.uint8), "float32")
            back = torch.from_numpy(codec.decode(data, both.shape, "float32").view(np.float32))
            found.append((back[:1], back[1:]))
        return found


class _Reading(PromptCacheOracle):
    def read(self, layers: Layers, part: CachedSpan) -> None:
        """A range of a segment, as the composed prompt reads it."""
        kept = [at for at in range(part.first, part.first + part.length) if at not in part.left_out]
        shift = part.start - part.first - part.spec.start
        for layer, (key, value) in enumerate(layers):
            self.keys[layer].append(self.moved(key[:, :, kept], shift, layer))
            self.values[layer].append(value[:, :, kept])
        self.positions += [part.spec.start + at + shift for at in kept]
