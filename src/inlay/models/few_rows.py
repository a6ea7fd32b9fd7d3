"""All decoder layers over few rows in one call of the compiled kernel, or each layer in two calls.

During decoding, Python and PyTorch between the ten products and steps of a layer take a third as long as the products.
transformers' code around the layers takes more. ``FewRowsPass`` runs a pass with one call for all layers. Where
that is impossible, ``FewRows`` is the ``forward`` of each layer: one call computes the steps before attention and one
the steps after it (csrc/decoder.cpp). In other families all layers run in Python. Their short passes keep the kernel's
threads ``awake`` between its calls.

The results have the same bits as those of the model's own modules. These still run for many rows, for other caches, and
where a module has an active hook. An adapter sets such a hook in passes with rows of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.attention.backend import Backend
from inlay.attention.cpu import CpuBackend
from inlay.attention.kernel import kernel
from inlay.attention.storage import KVStorage
from inlay.models import ops
from inlay.models.fused import FusedAttention, FusedMLP, LastLayer
from inlay.models.interface import PassContext
from inlay.models.linear import FrozenLinear
from inlay.models.spec import ModelSpec

#: The most rows for the kernel. Its buffers between the steps grow with them.
MOST_ROWS = 256

#: Numbers of a weight whose product needs all threads.
LARGE = 1 << 18

#: The most numbers of a step, times threads. Above it, PyTorch's threads save more than waking them takes.
_AWAKE_NUMBERS = 1 << 19

# What makes PyTorch change all logits, in the configurations of Gemma, Granite, Cohere and Falcon-H1.
_OF_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")

T = TypeVar("T")


class FewRows:
    """The ``forward`` of a layer with fused modules. It calls the stock forward for unsupported passes.

    Args:
        layer: A stock decoder layer of Llama's shape: norm, attention, sum, norm, MLP, sum.
        steps: The layer in the kernel's form.
        kept: The tensors that ``steps`` points into, all in the layer's dtype. They live as long as this object.
    """

    def __init__(self, layer: Any, steps: Any, kept: list[Tensor]) -> None:
        self._layer, self._attention = weakref.ref(layer), layer.self_attn
        self.steps, self._kept = steps, kept
        self.dtype = kept[0].dtype
        self._watched = [module for module in layer.modules() if module is not layer]
        self._stock = type(layer).forward

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
            x.dtype == self.dtype
            and cos.shape == sin.shape == (1, x.shape[1], self._attention.head_dim)
            and cos.dtype == sin.dtype == torch.float32
            and x.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
            and not any(map(acts, self._watched))
        )

    def _run(self, x: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        qkv = self.before(x, *position_embeddings)
        attended, _ = self._attention.attend(qkv, **kwargs)
        return self.behind(x, attended.reshape(x.shape[1], -1))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the part before attention.

        Args:
            x: (1, rows, width), in the layer's dtype.
            cos, sin: (1, rows, head_dim), fp32.

        Returns:
            Rotated queries and keys, and values: (1, rows, heads + 2 · kv_heads, head_dim), in the layer's dtype.
        """
        attention, rows = self._attention, x.shape[1]
        heads = attention.heads + 2 * attention.kv_heads
        qkv = torch.empty(1, rows, heads, attention.head_dim, dtype=self.dtype)
        self.steps.before(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), qkv.data_ptr(), rows, torch.get_num_threads())
        return qkv

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the part behind attention. Returns the layer's output.

        Args:
            x: the input of ``before``.
            attended: (rows, heads · head_dim), contiguous.
        """
        y = torch.empty_like(x)
        self.steps.behind(x.data_ptr(), attended.data_ptr(), y.data_ptr(), x.shape[1], torch.get_num_threads())
        return y


class FewRowsPass:
    """Passes over few rows of one model in one pool, with one call of the kernel for all layers.

    Args:
        model: A model of Llama's shape. Its own forward does nothing else than ``logits``. Hooks that are added later
            are seen, but not modules that are replaced.
        layers: The ``FewRows`` of all its layers.
    """

    def __init__(
        self, model: Any, layers: list[FewRows], spec: ModelSpec, backend: CpuBackend, pool: KVStorage
    ) -> None:
        self._model, self._backend = model, backend
        self._dtype = layers[0].dtype
        self._modules = tuple(model.modules())
        self._hooks = [hooks for each in self._modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._decoder = kernel.Decoder()
        self._kept: list[object] = [pool]  # with the tensors of options: the decoder points into them
        for number, (layer, one) in enumerate(zip(model.model.layers, layers, strict=True)):
            stored, kept = backend.stored(pool, number, layer.self_attn.attention_options(spec))
            self._decoder.add(one.steps, *stored)
            self._kept.append(kept)

    @staticmethod
    def of(model: PreTrainedModel, spec: ModelSpec, backend: Backend, pool: KVStorage) -> FewRowsPass | None:
        """Return the passes of a model. None unless all of its layers have a ``FewRows`` and the kernel attends."""
        layers = getattr(getattr(model, "model", None), "layers", ())
        found = [made for layer in layers if (made := _few_rows_of(layer)) is not None]
        if not found or len(found) < len(layers) or not isinstance(backend, CpuBackend):
            return None
        if len({one.dtype for one in found}) > 1:
            return None
        return FewRowsPass(model, found, spec, backend, pool)

    def fits(self, context: PassContext) -> bool:
        """Return True if ``logits`` supports this pass: few rows, resident keys, and no active hook on any module."""
        if context.plan.rows > MOST_ROWS or not context.plain or context.await_layer is not None:
            return False
        return not any(self._hooks) or not any(map(acts, self._modules))

    def logits(self, ids: Tensor, positions: Tensor, context: PassContext, rows: Tensor | None) -> Tensor:
        """Run a pass.

        Args:
            ids, positions: (rows,).
            rows: The rows with logits, (wanted,). None: all.

        Returns:
            (wanted, vocabulary).
        """
        decoder, count = self._model.model, len(ids)
        x = decoder.embed_tokens(ids[None]).contiguous()
        cos, sin = (table.contiguous() for table in decoder.rotary_emb(x, position_ids=positions[None]))
        tables = (1, count, decoder.layers[0].self_attn.head_dim)
        if cos.shape != tables or sin.shape != tables:
            raise RuntimeError(f"a rotary table has the shape {tuple(cos.shape)}, and the model's heads need {tables}")
        if (x.dtype, cos.dtype, sin.dtype) != (self._dtype, torch.float32, torch.float32):
            raise RuntimeError(f"embedding and rotary table are in {x.dtype} and {cos.dtype}, not {self._dtype}, fp32")
        planned = self._backend.planned(context.plan, count)
        self._decoder.run(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), count, torch.get_num_threads(), *planned)
        hidden = decoder.norm(x)
        logits: Tensor = self._model.lm_head(hidden if rows is None else hidden[:, rows])[0]
        return logits


def most_rows_awake(model: PreTrainedModel) -> int:
    """Return the most rows of a pass in which ``awake`` saves time. 0 unless the compiled kernel computes all large
    products of the model.

    PyTorch has one thread there. So the steps between the products must be small, above all those over the widest
    layer's outputs.
    """
    if not hasattr(kernel, "run_awake"):
        return 0
    head, widest = model.get_output_embeddings(), 1
    changed = any(getattr(model.config, name, None) for name in _OF_LOGITS)
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            if module.product() is None:
                return 0
            if module is not head or changed:
                widest = max(widest, module.out_features)
        elif not isinstance(module, nn.Embedding) and any(
            weight.numel() >= LARGE for weight in module.parameters(recurse=False)
        ):
            return 0
    return _AWAKE_NUMBERS // (torch.get_num_threads() * widest)


def awake(work: Callable[[], T]) -> T:
    """Return ``work()``. The kernel's calls in it find their threads awake, and PyTorch has this thread alone.

    Between two products of a pass over few rows, Python computes for some ten microseconds. Waking a sleeping thread
    takes as long, and up to 100 microseconds in a virtual machine (csrc/parallel.h). PyTorch's number of threads must
    not be changed meanwhile.
    """
    results: list[T] = []
    kernel.run_awake(torch.get_num_threads(), lambda: results.append(work()))
    return results[0]


def _few_rows_of(layer: nn.Module) -> FewRows | None:
    forward = vars(layer).get("forward")
    if isinstance(forward, LastLayer):
        forward = forward.replaced
    return forward if isinstance(forward, FewRows) else None


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
    products: list[Any] = [each.product() if isinstance(each, FrozenLinear) else None for each in layers]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    of_heads = (attention.query_norm, attention.key_norm)
    weights = [None if norm is None else norm.weight.detach() for norm in (*norms, *of_heads)]
    kept = [weight for weight in weights if weight is not None]
    if None in products or not all(map(_plain, kept)):
        return None
    if len({each.bf16 for each in products} | {weight.dtype == torch.bfloat16 for weight in kept}) > 1:
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
    return steps, kept


def _plain(weight: Tensor) -> bool:
    return weight.dtype in ops.DTYPES and weight.is_contiguous() and weight.device.type == "cpu"
