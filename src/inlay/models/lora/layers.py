"""Adds the updates of adapters to a model's linear layers: x A B beside x W (arXiv 2106.09685, section 4.1).

A pass has rows of several adapters and rows without one. The layers are unchanged, with weights in any form. A hook
behind each adapted layer adds every adapter's update to its own rows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from inlay.errors import ModelError
from inlay.models.linear import packed, stock
from inlay.models.lora.load import AdaptedModule, Adapter, LowRank, linear_places

#: The rows of one adapter: a slice if they are adjacent, else their numbers.
Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """The adapters of the rows of a pass.

    Args:
        engine: Identifies the engine that runs the pass.
        rows: (digest of an adapter, its rows) for every layer but the output layer.
        head: The same for the output layer, which gets only the rows that need logits.
    """

    engine: object
    rows: Sequence[tuple[bytes, Rows]]
    head: Sequence[tuple[bytes, Rows]]


_current: ContextVar[_Pass | None] = ContextVar("inlay_adapters", default=None)


class Adapters:
    """The adapters of one engine on its model. The object is false if there are none.

    Other engines may use the same model with other adapters. The hooks on the model are removed by ``remove``, or when
    the object is collected.
    """

    def __init__(self, model: PreTrainedModel, adapters: Iterable[Adapter]) -> None:
        self._device = model.device
        self._engine = object()  # identifies this engine's passes among those of other engines on the same model
        self.digests = {adapter.digest for adapter in adapters}
        self._places: dict[nn.Module, tuple[str, bool]] = {}
        handles: list[RemovableHandle] = []
        by_module = _by_module(linear_places(model) if self.digests else {}, adapters, model.device)
        for module, (paths, head, updates) in by_module.items():
            self._places[module] = (paths, head)
            handles.append(module.register_forward_hook(_Hook(self._engine, updates, head)))
        self.remove = weakref.finalize(self, _remove, handles)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __contains__(self, digest: object) -> bool:
        return digest in self.digests

    @contextmanager
    def applied(self, work: Sequence[tuple[bytes, int]], wanted: Sequence[int]) -> Iterator[None]:
        """Within the block, the model's layers add the update of each row's adapter.

        Args:
            work: (adapter, number of rows) for each stretch of rows. An empty digest means no adapter.
            wanted: The rows that need logits.
        """
        if not any(adapter for adapter, _ in work):
            yield
            return
        owners = [adapter for adapter, rows in work for _ in range(rows)]
        heads = [owners[row] for row in wanted]
        token = _current.set(_Pass(self._engine, _grouped(owners, self._device), _grouped(heads, self._device)))
        try:
            yield
        finally:
            _current.reset(token)

    def check_calls(self, run: Callable[[], object], *, rows: int, wanted: int) -> None:
        """Raise ModelError unless every adapted layer is called exactly once, with every row of a pass.

        The weights of some layers are read by other code. Some layers get rows in another order, or choose experts.

        Args:
            run: Runs a pass of ``rows`` rows. ``wanted`` of them need logits.
        """
        calls: Counter[nn.Module] = Counter()
        seen: dict[nn.Module, int] = {}

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls[module] += 1
            seen[module] = args[0].shape[:-1].numel() if isinstance(output, Tensor) else 0

        handles = [module.register_forward_hook(note) for module in self._places]
        try:
            run()
        finally:
            _remove(handles)
        for module, (path, head) in self._places.items():
            if calls[module] != 1 or seen[module] != (wanted if head else rows):
                self.remove()
                raise ModelError(
                    f"an adapter adapts {path}, which this family does not call with the rows of a pass as they come; "
                    "merge the adapter into its model with PEFT's merge_and_unload(), save the result, and serve that",
                    code="adapter.unsupported_layer",
                )


@dataclass
class _Update:
    """The update of one module by one adapter.

    Args:
        down: From inputs to the ranks of all parts, concatenated.
        parts: For each part: its ranks, its outputs, and the layer between the two.
    """

    down: nn.Module
    parts: list[tuple[slice, slice, nn.Module]]

    @classmethod
    def of(cls, lows: Sequence[tuple[AdaptedModule, LowRank]], device: torch.device) -> _Update:
        make = packed if device.type == "cpu" else stock
        at, parts = 0, []
        for place, low in lows:
            ranks = slice(at, at + len(low.down))
            parts.append((ranks, slice(place.first, place.first + place.outputs), make(low.up.to(device), None)))
            at = ranks.stop
        return cls(make(torch.cat([low.down for _, low in lows]).to(device), None), parts)

    def add(self, x: Tensor, y: Tensor, rows: Rows) -> None:
        """Add the update to y. x: (rows, inputs). y: (rows, outputs), changed in place."""
        low = self.down(x[rows])
        for ranks, outputs, up in self.parts:
            more = up(low[:, ranks])
            if isinstance(rows, slice):
                y[rows, outputs].add_(more)
            else:
                y[:, outputs].index_add_(0, rows, more)


class _Hook:
    """A forward hook that adds the updates of this engine's running pass to a layer's output."""

    def __init__(self, engine: object, updates: Mapping[bytes, _Update], head: bool) -> None:
        self._engine = engine
        self._updates = updates
        self._head = head

    @property
    def acts(self) -> bool:
        """True if the running pass has rows of this engine's adapters."""
        current = _current.get()
        return current is not None and current.engine is self._engine

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        current = _current.get()
        if current is None or current.engine is not self._engine:
            return
        x, y = args[0], output.view(-1, output.shape[-1])
        for adapter, rows in current.head if self._head else current.rows:
            update = self._updates.get(adapter)
            if update is not None:
                update.add(x.reshape(-1, x.shape[-1]), y, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        """Share the hook: a copy of the model has no passes of this engine."""
        return self


def _by_module(
    places: Mapping[str, AdaptedModule], adapters: Iterable[Adapter], device: torch.device
) -> dict[nn.Module, tuple[str, bool, dict[bytes, _Update]]]:
    """Return for each adapted module: the path of one of its stock layers, True if it is the head, and its updates by
    digest of the adapter.
    """
    found: dict[nn.Module, tuple[str, bool, dict[bytes, _Update]]] = {}
    for adapter in {each.digest: each for each in adapters}.values():
        lows: dict[nn.Module, list[tuple[AdaptedModule, LowRank]]] = {}
        for path, low in adapter.updates.items():
            place = places[path]
            lows.setdefault(place.module, []).append((place, low))
            found.setdefault(place.module, (path, place.head, {}))
        for module, parts in lows.items():
            found[module][2][adapter.digest] = _Update.of(parts, device)
    return found


def _grouped(owners: Sequence[bytes], device: torch.device) -> list[tuple[bytes, Rows]]:
    """Return (digest, rows) for each adapter of some rows.

    Args:
        owners: The digest of each row's adapter. Empty: the row has no adapter, and is left out.
    """
    numbers: dict[bytes, list[int]] = {}
    for row, adapter in enumerate(owners):
        if adapter:
            numbers.setdefault(adapter, []).append(row)
    return [(adapter, _rows(each, device)) for adapter, each in numbers.items()]


def _rows(numbers: Sequence[int], device: torch.device) -> Rows:
    first, last = numbers[0], numbers[-1]
    return slice(first, last + 1) if last - first + 1 == len(numbers) else torch.tensor(numbers, device=device)


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
