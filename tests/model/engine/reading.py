"""The keys and values that requests read of lossy forms, and descriptions of their composed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from inlay.engine.forward import ForwardPass, StepObserver
from inlay.engine.request import Request
from inlay.kv.identity import LOSSLESS, SegmentSpec
from inlay.kv.pool import PrefixMatch
from inlay.prompt.composed import CachedSpan, RecomputedSpan
from tests.model.engine.driving import Driver
from tests.model.equivalence.composed_oracle import Layers


class Read(StepObserver):
    """The keys and values of lossy forms in the pool that requests read at their first token."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.found: WeakKeyDictionary[Request, dict[bytes, Layers]] = WeakKeyDictionary()

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Any], seconds: float) -> None:
        for request, _ in made.sampled:
            if request not in self.found:
                lies = {spec.key: self._driver.store.get(spec) for spec in lossy_of(request)}
                # Forms that this pass computed are lossless and not stored yet.
                self.found[request] = {key: self._layers(found) for key, found in lies.items() if found is not None}

    def _layers(self, found: PrefixMatch) -> Layers:
        storage = self._driver.llm.storage
        slots = torch.cat([torch.arange(run.first, run.end) for run in found.slots])
        return [(k[None, :, slots], v[None, :, slots]) for k, v in zip(storage.keys, storage.values, strict=True)]


def lossy_of(request: Request) -> list[SegmentSpec]:
    """The lossy forms that a request reads."""
    specs = [part.spec for part in request.prompt.composed if isinstance(part, CachedSpan)]
    return [spec for spec in specs if spec.codec != LOSSLESS]


def description_of(request: Request) -> str:
    """A request and its composed prompt, as a failure shows them."""
    said, lines = request.prompt.request, []
    for part in request.prompt.composed:
        if isinstance(part, CachedSpan):
            spec = part.spec
            shift = part.start - part.first - spec.start
            read = (
                f"{part.first}+{part.length} of {len(spec.ids)} at {part.start}, shift {shift}, without {part.left_out}"
            )
            lines.append(f"{spec.codec} {part.form} {read}, exact {part.exact}")
        elif isinstance(part, RecomputedSpan):
            lines.append(f"recomputed {part.positions}")
        else:
            lines.append(f"new {part.start}+{len(part.ids)}, in place of modules {part.instead}")
    about = f"{said.policy} {said.policy.positions}, {len(request.token_ids)} said, {request.preemptions} preemptions"
    return "\n".join([about, str(request.usage), *lines])
