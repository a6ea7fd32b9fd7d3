"""A decoder layer over few rows in one call of the compiled kernel, or in two with attention between them.

During decoding, Python and PyTorch spend a third of the products' time between the ten products and steps of a layer.
Over few rows the kernel computes the whole layer in one call. With another attention, one call computes the steps
before attention and one the steps after it (csrc/decoder.cpp).

The results have the same bits as those of the layer's own modules. These still run for many rows, for other caches, and
where a module has an active hook. An adapter sets such a hook in passes with rows of it.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from inlay.attention.backend import AttentionOptions
from inlay.attention.cpu import CpuBackend
from inlay.attention.kernel import kernel
from inlay.models.fused import FusedAttention, FusedMLP
from inlay.models.interface import IMPLEMENTATION, PassContext
from inlay.models.linear import FrozenLinear
from inlay.models.spec import ModelSpec

#: The most rows for the kernel. Its buffers between the steps grow with them.
MOST_ROWS = 64


class FewRows:
    """The ``forward`` of a layer with fused modules. It calls the stock forward for unsupported passes.

    Args:
        layer: A stock decoder layer of Llama's shape: norm, attention, sum, norm, MLP, sum.
        steps: The layer in the kernel's form.
        kept: The tensors that ``steps`` points into. They live as long as this object.
    """

    #: True if inlay's attention runs within the one call; else two calls surround it.
    whole = True

    def __init__(self, layer: Any, steps: Any, kept: list[Tensor]) -> None:
        self._layer, self._attention = weakref.ref(layer), layer.self_attn
        self._steps, self._kept = steps, kept
        self._watched = [module for module in layer.modules() if module is not layer]
        self._stock = type(layer).forward
        self._options: tuple[ModelSpec, AttentionOptions] | None = None  # of the latest engine

    @staticmethod
    def serve(layer: Any) -> None:
        """Install this forward on a layer if the kernel supports all of its products."""
        made = _made(layer)
        if made is not None:
            layer.forward = FewRows(layer, *made)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer like its stock forward. ``hidden_states`` is (batch, rows, width)."""
        if args or not self.fits(hidden_states, **kwargs):
            return self._stock(self._layer(), hidden_states, *args, **kwargs)
        return self._run(hidden_states, **kwargs)

    def fits(
        self,
        x: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> bool:
        """Return True if ``_run`` supports this call: few rows of one text, no other cache, and no active hook on a
        module of the layer.
        """
        if cache is not None or past_key_values is not None or position_embeddings is None:
            return False
        if x.shape[0] != 1 or x.shape[1] > MOST_ROWS:
            return False
        cos, sin = position_embeddings
        return (
            x.dtype == torch.bfloat16
            and cos.shape == sin.shape == (1, x.shape[1], self._attention.head_dim)
            and cos.dtype == sin.dtype == torch.float32
            and x.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
            and not any(map(acts, self._watched))
        )

    def _run(self, x: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        context: PassContext | None = kwargs.get("inlay")
        if context is not None and self.whole and self._in_kernel(context):
            return self.at_once(x, *position_embeddings, context)
        qkv = self.before(x, *position_embeddings)
        attended, _ = self._attention.attend(qkv, **kwargs)
        return self.behind(x, attended.reshape(x.shape[1], -1))

    def _in_kernel(self, context: PassContext) -> bool:
        """True if the kernel can run the pass's attention and only its output is needed."""
        own = self._attention.config._attn_implementation == IMPLEMENTATION
        return own and context.is_plain_at(self._attention.layer_idx) and isinstance(context.backend, CpuBackend)

    def at_once(self, x: Tensor, cos: Tensor, sin: Tensor, context: PassContext) -> Tensor:
        """Run the whole layer in one call, with inlay's attention. Returns its output, of the shape of ``x``."""
        attention, y = self._attention, torch.empty_like(x)
        if self._options is None or self._options[0] is not context.spec:
            self._options = context.spec, attention.attention_options(context.spec)
        context.wait_for(attention.layer_idx)
        stored = cast(CpuBackend, context.backend).stored(
            context.pool, context.plan, attention.layer_idx, self._options[1], x.shape[1]
        )
        self._steps.run(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), x.shape[1], torch.get_num_threads(), *stored
        )
        return y

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the part before attention.

        Args:
            x: (1, rows, width), bf16.
            cos, sin: (1, rows, head_dim), fp32.

        Returns:
            Rotated queries and keys, and values: (1, rows, heads + 2 · kv_heads, head_dim), bf16.
        """
        attention, rows = self._attention, x.shape[1]
        heads = attention.heads + 2 * attention.kv_heads
        qkv = torch.empty(1, rows, heads, attention.head_dim, dtype=torch.bfloat16)
        self._steps.before(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), qkv.data_ptr(), rows, torch.get_num_threads())
        return qkv

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the part behind attention. Returns the layer's output.

        Args:
            x: the input of ``before``.
            attended: (rows, heads · head_dim), contiguous.
        """
        y = torch.empty_like(x)
        self._steps.behind(x.data_ptr(), attended.data_ptr(), y.data_ptr(), x.shape[1], torch.get_num_threads())
        return y


def acts(module: nn.Module) -> bool:
    """True if a hook of a module acts in this pass. A hook may deny it with ``acts``."""
    if module._forward_pre_hooks:
        return True
    return bool(module._forward_hooks) and any(
        getattr(hook, "acts", True) for hook in tuple(module._forward_hooks.values())
    )


def _made(layer: Any) -> tuple[Any, list[Tensor]] | None:
    """Return the kernel's form of a layer, and the norm weights that this form points into. None if the kernel does
    not support the layer.
    """
    attention, mlp = layer.self_attn, layer.mlp
    joined = isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP)
    if not joined or mlp.act is not None or not hasattr(kernel, "DecoderLayer"):
        return None
    layers = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    products = [each.product() if isinstance(each, FrozenLinear) else None for each in layers]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    of_heads = (attention.query_norm, attention.key_norm)
    weights = [None if norm is None else norm.weight.detach() for norm in (*norms, *of_heads)]
    if None in products or any(weight is not None and not _plain(weight) for weight in weights):
        return None
    eps = {norm.eps for norm in norms}
    of_heads_eps = {norm.eps for norm in of_heads if norm is not None} or eps
    if len(eps) > 1 or len(of_heads_eps) > 1:
        return None
    addresses = [0 if weight is None else weight.data_ptr() for weight in weights]
    steps = kernel.DecoderLayer(
        *products, addresses[0], addresses[1], *eps, addresses[2], addresses[3], *of_heads_eps,
        attention.heads, attention.kv_heads, attention.head_dim,
    )  # fmt: skip
    return steps, [weight for weight in weights if weight is not None]


def _plain(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
