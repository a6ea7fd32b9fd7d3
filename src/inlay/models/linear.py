"""Linear layers for inference, with their weights in the fastest form for this processor.

A stock ``nn.Linear`` in bfloat16 repacks its weight at every call. With few rows this costs more than the product. If
the processor multiplies pairs of bf16 with AVX-512, or fp32 alone, the compiled kernel reads such weights in the layout
of a checkpoint, and nothing is packed. On processors with AVX2 or AVX-512, it also reads fp32 weights. Other
weights are packed once, at load, into the blocks that oneDNN reads.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inlay.attention.kernel import kernel
from inlay.errors import ModelError
from inlay.models.formats.mapped import copy
from inlay.models.formats.stored import KeepsStored, StoredLinear

#: Makes a layer of a weight (out_features, in_features) and a bias (out_features,) or None.
MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]

#: Bytes of a huge page. Smaller weights get none.
_HUGE = 2 << 20

#: The linear layers of stock models.
LINEAR = (nn.Linear, Conv1D)

_pack = torch.ops.mkldnn._reorder_linear_weight
_linear = torch.ops.mkldnn._linear_pointwise


class FrozenLinear(nn.Module):
    """A linear layer for inference only, with the weight in its own form.

    It has no parameter ``weight``, so it can't be saved, copied or trained. Load with weights="stock" for that.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def product(self) -> Any:
        """Return the kernel's form of the layer, valid as long as the layer. None if there is none."""
        return None

    def __getstate__(self) -> NoReturn:  # pickling and copying
        raise ModelError(
            'packed weights cannot be copied or saved; load the model with weights="stock" for that',
            code="model.packed_weights",
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise ModelError(
            'packed weights have no state dict; load the model with weights="stock" for that',
            code="model.packed_weights",
        )


class PackedLinear(FrozenLinear):
    """``x @ weight.T + bias`` with the weight in oneDNN's own layout.

    Args:
        weight: (out_features, in_features), fp32 or bfloat16. It is not kept.
        bias: (out_features,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        # oneDNN chooses the same layout for every number of rows.
        self._weight = _pack(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        rows = x.numel() // max(1, self.in_features)
        more = padded_rows(rows) - rows
        if not more:
            return _linear(x, self._weight, self._bias, "none", [], "")
        longer = torch.cat([x.reshape(rows, self.in_features), x.new_zeros(more, self.in_features)])
        y = _linear(longer, self._weight, self._bias, "none", [], "")
        return y[:rows].view(*x.shape[:-1], self.out_features)


def padded_rows(rows: int) -> int:
    """Return the number of rows, at least ``rows``, that oneDNN multiplies instead.

    oneDNN compiles code for every number of rows and every weight shape, and keeps it: 0.8 ms and half a megabyte each.
    Passes have any number of rows, so they are padded to about 60 sizes. The padding is at most a quarter of the rows
    up to 128, where reading the weights takes most of the time, and an eighth beyond.
    """
    octave = (rows - 1).bit_length()
    step = max(1, 1 << octave >> 3) if rows <= 64 else max(16, 1 << octave >> 4)
    return -(-rows // step) * step


class DirectLinear(FrozenLinear):
    """``x @ weight.T + bias`` by the compiled kernel, with the weight as it is (csrc/linear.h).

    Args:
        weight: (out_features, in_features), contiguous, fp32 or bfloat16. The layer shares it, for example with a tied
            embedding.
        bias: (out_features,) or None.
        instruction_set: "avx512bf16" (in bfloat16 alone), "avx512", "avx2" or "portable"; "" for the best one that runs
            here.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, instruction_set: str = "") -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self._weight = weight.detach()
        self._instruction_set = instruction_set
        self._bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        if self._weight.nbytes >= _HUGE:  # the call waits for all processors, also if there is nothing to move
            kernel.use_huge_pages(self._weight.data_ptr(), self._weight.nbytes)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features), in the dtype of the weight. Returns (..., out_features)."""
        dtype = self._weight.dtype
        if x.dtype != dtype or x.shape[-1] != self.in_features:
            raise ValueError(f"a {dtype} layer of {self.in_features} inputs got {x.dtype} of shape {tuple(x.shape)}")
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty(rows.shape[0], self.out_features, dtype=dtype)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        kernel.linear(
            rows.data_ptr(), rows.stride(0), self._weight.data_ptr(), bias, y.data_ptr(), rows.shape[0],
            self.in_features, self.out_features, dtype == torch.bfloat16, self._instruction_set,
            torch.get_num_threads(),
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)

    def product(self) -> Any:
        """See FrozenLinear."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return kernel.direct_product(
            self._weight.data_ptr(), bias, self.in_features, self.out_features,
            self._weight.dtype == torch.bfloat16, self._instruction_set,
        )  # fmt: skip


def can_multiply(weight: Tensor) -> bool:
    """Return True if the compiled kernel is the fastest for this weight. It needs no packing."""
    if not weight.is_contiguous() or weight.device.type != "cpu" or not hasattr(kernel, "linear_supported"):
        return False
    if weight.dtype == torch.float32:
        return bool(kernel.linear_supported("avx2", False))
    return weight.dtype == torch.bfloat16 and (
        kernel.linear_supported("avx512bf16", True) or not can_pack(torch.bfloat16)
    )


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if oneDNN is available and computes in this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return the fastest layer for a weight: the kernel's, else oneDNN's, else a stock one."""
    if can_multiply(weight):
        return DirectLinear(weight, bias)
    if can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return stock(weight, bias)


def stock(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an ``nn.Linear`` around an existing weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def joined(layers: Sequence[nn.Linear], make: MakeLinear, *, shared: bool = False) -> nn.Module:
    """Join several layers into one with their outputs side by side. The originals lose their weights.

    Args:
        shared: True if another module keeps the weight of the only layer, so that it must not be copied.
    """
    biases = [layer.bias for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat([_bias_or_zeros(layer) for layer in layers])
    stored = [layer for layer in layers if isinstance(layer, StoredLinear)]
    if len(stored) == len(layers) and isinstance(make, KeepsStored):
        return _standing_for(layers, make.keep([layer.take() for layer in stored], bias, stored[0].dtype))
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0] if shared else _side_by_side(weights)
    del weights
    for layer in layers:  # before ``make``, so that at most one layer's weights are in memory twice
        layer.weight = None  # type: ignore[assignment]
    return _standing_for(layers, make(weight, bias))


def of_conv1d(layer: Conv1D, make: MakeLinear) -> nn.Module:
    """Convert GPT-2's linear layer, which stores its weight transposed. The original loses its weight."""
    weight = layer.weight.detach().t().contiguous()
    layer.weight = None  # type: ignore[assignment]
    return _standing_for([layer], make(weight, layer.bias.detach()))


def note_paths(path: str, part: nn.Module) -> None:
    """Store in every linear layer of a stock part its path in the model, for use after layers are joined."""
    for name, module in part.named_modules(prefix=path):
        if isinstance(module, LINEAR):
            module.stock_path = name


def _standing_for(layers: Sequence[nn.Module], made: nn.Module) -> nn.Module:
    """Record in a layer, as ``stands_for``, the stock layers of its outputs, in their order."""
    made.stands_for = tuple((getattr(layer, "stock_path", ""), outputs_of(layer)) for layer in layers)  # type: ignore[assignment]
    return made


def outputs_of(layer: nn.Module) -> int:
    """Return the number of outputs of a linear layer."""
    return int(layer.nf if isinstance(layer, Conv1D) else layer.out_features)  # type: ignore[arg-type]


def inputs_of(layer: nn.Module) -> int:
    """Return the number of inputs of a linear layer."""
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)  # type: ignore[arg-type]


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Join weights in one matrix, in huge pages if available, so that reading needs fewer address translations.

    ``use_huge_pages`` can move used memory too, but takes seconds for a gigabyte.
    """
    sizes = [weight.shape[0] for weight in weights]
    memory = huge_pages((sum(sizes), weights[0].shape[1]), weights[0].dtype)
    for weight, part in zip(weights, memory.split(sizes), strict=True):
        copy(weight, part)
    return memory


def huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros for a weight, in huge pages if the system has them and the weight is large enough."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _bias_or_zeros(layer: nn.Linear) -> Tensor:
    if layer.bias is None:
        dtype = layer.dtype if isinstance(layer, StoredLinear) else layer.weight.dtype
        return torch.zeros(layer.out_features, dtype=dtype)
    return layer.bias.detach()
