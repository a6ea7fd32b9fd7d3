"""Models in GGUF, llama.cpp's format: one file, or a split one, with a whole model.

transformers' GGUF tables translate its names and conventions. The model is the family's stock code. Types with 4 bits
and a scale for 32 weights map to inlay's grid bit for bit. ggml-common.h defines the layout of each block.
``gguf.quants`` unpacks the other types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from inlay.errors import ModelError
from inlay.models.fill import Lazy, check_complete, fill, on_meta
from inlay.models.formats.gguf_config import config_of
from inlay.models.formats.gguf_header import GGUFHeader, GGUFTensor, read_header
from inlay.models.formats.gguf_tokenizer import GGUFVocabulary, make_tokenizer
from inlay.models.formats.stored import Grid, StoredWeight
from inlay.wording import first_line

#: Common quantized types that ``gguf.quants`` unpacks.
NARROW = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),
)


class BlockWeight(StoredWeight):
    """A weight in blocks outside inlay's grid.

    Args:
        blocks: (out_features, bytes of a row), uint8.
        kind: the type of the blocks, a ``gguf.GGMLQuantizationType``.
    """

    def __init__(self, blocks: Tensor, kind: Any) -> None:
        from gguf import GGML_QUANT_SIZES

        self._blocks, self._kind = blocks, kind
        weights, size = GGML_QUANT_SIZES[kind]
        self._block = size
        self.shape = (blocks.shape[0], blocks.shape[1] // size * weights)

    def tensors(self) -> Mapping[str, Tensor]:
        return {self._kind.name: self._blocks}

    def dense(self, first: int, last: int) -> Tensor:
        from gguf import dequantize

        return torch.from_numpy(dequantize(self._blocks[first:last].numpy(), self._kind))


class GridBlocks(BlockWeight):
    """A weight in blocks on inlay's grid."""

    on_grid = True

    def __init__(self, blocks: Tensor, kind: Any) -> None:
        super().__init__(blocks, kind)
        self.symmetric = kind.name == "Q4_0"

    def grid(self, first: int, last: int) -> Grid:
        rows = self._blocks[first:last]
        blocks = rows.reshape(-1, self._block)
        return Grid(*(tensor.reshape(len(rows), -1) for tensor in _GRIDS[self._kind.name](blocks)))

    def dense(self, first: int, last: int) -> Tensor:
        return self.grid(first, last).dense()


class ByteBlocks(BlockWeight):
    """A weight in blocks of Q8_0: a scale and 32 numbers."""

    by_group = True

    def bytes(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        blocks = self._blocks[first:last].reshape(-1, self._block)
        numbers = blocks[:, 2:].contiguous().view(torch.int8)
        return numbers.view(last - first, -1), _half(blocks, 0).view(last - first, -1)


def stored_blocks(blocks: Tensor, kind: Any) -> StoredWeight:
    """Return the weight in blocks of a type in ``NARROW``. Arguments as for ``BlockWeight``."""
    if kind.name == "Q8_0":
        return ByteBlocks(blocks, kind)
    return (GridBlocks if kind.name in _GRIDS else BlockWeight)(blocks, kind)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack a scale and 32 numbers around 8."""
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:18]), scale, torch.zeros_like(scale)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack a scale, the smallest weight, and 32 numbers from there on."""
    scale, least = _half(blocks, 0), _half(blocks, 2)
    return _halves(blocks[:, 4:20]), scale, least + 8 * scale


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack eight groups of 32 numbers. Their scales and offsets have 6 bits and a common scale each."""
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    offs = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), 1)
    scale = _half(blocks, 0) * scales
    numbers = blocks[:, 16:].reshape(-1, 4, 32)
    return torch.stack((numbers & 15, numbers >> 4), 2), scale, 8 * scale - _half(blocks, 2) * offs


def _half(blocks: Tensor, at: int) -> Tensor:
    """Read an fp16 number at a byte of each block, as (blocks, 1), fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(numbers: Tensor) -> Tensor:
    """Unpack the lower halves of 16 bytes, then the upper ones: (blocks, 32)."""
    packed = numbers.numpy()  # ten times as fast as PyTorch on such short rows
    halves = np.empty((len(packed), 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=halves[:, 0])
    np.right_shift(packed, 4, out=halves[:, 1])
    return torch.from_numpy(halves.reshape(len(packed), 32))


_GRIDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
#: llama.cpp's architectures that are tested against transformers' reader.
ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2", "stablelm", "gpt2", "bloom"),
    *("nemotron", "qwen2moe", "qwen3moe"),
)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOVED = ("bloom", "gpt2")  # their matrices are transposed or split on loading, which blocks do not allow
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MODEL = "give the GGUF file of the model itself, or the folder of its Hugging Face checkpoint"
#: Advice for files of such a type, which hold no model.
_INSTEAD = {"adapter": f"{_MODEL}, and the adapter with --adapter as PEFT saves it"}
_EXPERTS = re.compile(r"\.ffn_(gate|up|down)_exps\.weight$")


@dataclass(frozen=True)
class GGUFFile:
    """A model's GGUF file, with all its parts.

    ``paths`` are in order. The first one holds the configuration and the tokenizer.
    """

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The path of the first part."""
        return str(self.paths[0])

    @cached_property
    def _headers(self) -> list[GGUFHeader]:
        return [_header(path) for path in self.paths]

    def said(self, key: str) -> Any:
        """Return the file's value of a key, or None. ``{arch}`` in a key stands for the architecture."""
        if "{arch}" in key:
            key = key.format(arch=self.architecture)
        return self._headers[0].metadata.get(key)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.said("general.architecture"))

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The tensors of all parts, by llama.cpp's names."""
        return {name: tensor for header in self._headers for name, tensor in header.tensors.items()}

    @cached_property
    def vocabulary(self) -> GGUFVocabulary:
        """The file's tokens."""
        return GGUFVocabulary(self.name, self.said)

    def config(self) -> PretrainedConfig:
        """Return the configuration in the file. Raises ModelError."""
        self._check_whole()
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.name}: holds a model of the architecture '{self.architecture}', which inlay does not read from "
                f"GGUF (it reads {', '.join(ARCHITECTURES)}); give the folder of its Hugging Face checkpoint",
                code="model.unknown_architecture",
            )
        for tensor in self.tensors.values():
            if tensor.tensor_type.name not in (*_PLAIN, *NARROW):
                raise ModelError(
                    f"{self.name}: {tensor.name} is of the type {tensor.tensor_type.name}, which inlay does not read; "
                    "give a file in Q4_K_M, Q8_0 or F16 of the same model",
                    code="model.unsupported_quantization",
                )
        return config_of(self)

    def _check_whole(self) -> None:
        """Raise ModelError for a file without a model: an adapter, a projector, a vocabulary."""
        table = self.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            said = {key: self.said(key) for key in ("general.type", "general.architecture")}
            told = ", ".join(f"{key} '{value}'" for key, value in said.items() if value) or "without a general.type"
            raise ModelError(
                f"{self.name}: holds no embeddings of tokens (token_embd.weight), so it is no whole language model "
                f"({told}); {_INSTEAD.get(str(said['general.type']), _MODEL)}",
                code="model.missing_weights",
            )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer in the file, with its chat template. Raises ModelError."""
        if not self.vocabulary.names:
            raise ModelError(f"{self.name}: the file holds no tokenizer; give one that does", code="model.no_tokenizer")
        return make_tokenizer(self.vocabulary)

    def dtype(self) -> torch.dtype:
        """Return the dtype of the unquantized weights: the narrowest one, because norms are always fp32."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        if kinds & {"BF16", *NARROW}:
            return torch.bfloat16
        return torch.float16 if "F16" in kinds else torch.float32

    def check(self, config: PretrainedConfig) -> None:
        """Raise ModelError if ``model`` would refuse the file's tensors. Reads none of them."""
        self._placed(config, torch.bfloat16)

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Load the model, with quantized layers as StoredLinear. Raises ModelError."""
        meta, targets = self._placed(config, dtype)
        weights: dict[str, Lazy] = {}
        stored: dict[str, StoredWeight] = {}
        for target, parts in targets.items():
            if len(parts) == 1 and (packed := self._packed(config, *parts)) is not None:
                stored[target] = packed
            weights[target] = Lazy(partial(self._dense, config, parts))
        return fill(self.name, config, dtype, weights, stored, meta)

    def _placed(self, config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Mapping[str, list[str]]]:
        """Return the stock model without weights, and the tensors of each parameter. Raises ModelError."""
        meta = self._empty(config, dtype)
        targets = self._targets(meta)
        tied = set(meta.all_tied_weights_keys) if config.tie_word_embeddings else set()
        weights = dict(meta.named_parameters(remove_duplicate=False))
        check_complete(self.name, {"missing_keys": weights.keys() - targets.keys() - tied})
        for target, parts in targets.items():
            held = sum(prod(self.tensors[name].shape) for name in parts)
            if target in weights and held != weights[target].numel():
                shapes = " and ".join(f"{name} {self.tensors[name].shape}" for name in parts)
                wanted = tuple(weights[target].shape)
                raise ModelError(
                    f"{self.name}: holds {shapes}, and a model of this configuration has {wanted} there; download it "
                    "again",
                    code="model.wrong_shape",
                )
        return meta, targets

    def _empty(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Return the stock model without weights. Raises ModelError if its sizes do not fit together."""
        try:
            return on_meta(config, dtype)
        except Exception as error:  # from transformers or torch
            raise ModelError(
                f"{self.name}: its sizes ({self.architecture}.*) give no model: {first_line(error)}; download it again",
                code="model.unreadable_config",
            ) from error

    def _targets(self, meta: PreTrainedModel) -> Mapping[str, list[str]]:
        """Return the tensors of each of the model's parameters. Raises ModelError for an unknown tensor."""
        names = self._names(meta)
        targets: dict[str, list[str]] = {}
        for name in self.tensors:
            if name in _NOT_WEIGHTS:
                continue
            target = names.get(name) or names.get(name.removesuffix(".weight"))
            if target is None:
                raise ModelError(
                    f"{self.name}: holds {name}, for which a model of type '{meta.config.model_type}' has no place; "
                    "give the folder of its Hugging Face checkpoint",
                    code="model.unexpected_weights",
                )
            targets.setdefault(target, []).append(name)
        return {target: sorted(parts) for target, parts in targets.items()}  # gate before up

    def _names(self, meta: PreTrainedModel) -> dict[str, str]:
        """Return the model's parameters by llama.cpp's names.

        A parameter's name is looked up whole, and without its outer modules, which some conversions leave out. Of two
        parameters with one name, the one with the longer match is taken. It does what transformers'
        ``get_gguf_hf_weights_map`` does, which builds gguf's table once for each module: most of the loading time.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = get_tensor_name_map(kind, meta.config.num_hidden_layers)
        processor = self._processor(meta.config)
        found: dict[str, str] = {}
        split = [name.split(".") for name in meta.state_dict()]
        for depth in range(max(map(len, split))):
            here: dict[str, str] = {}
            for parts in split:
                if depth >= len(parts):
                    continue
                outer = "".join(f"{part}." for part in parts[:depth])
                name = processor.preprocess_name(".".join(parts[depth:]))
                stem, dot, last = name.rpartition(".")
                suffix = f"{dot}{last}" if last in ("weight", "bias") else ""
                known = table.get_name(stem if suffix else name)
                if known is None:
                    processor.perform_fallback_tensor_mapping(here, suffix, outer, name)
                else:
                    here.setdefault(known + suffix, outer + name)
            found = here | found
        return found

    def _processor(self, config: PretrainedConfig) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        return TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=_settings(config))

    def _packed(self, config: PretrainedConfig, name: str) -> StoredWeight | None:
        """Return a quantized matrix in its blocks; None if it must be unpacked first."""
        tensor = self.tensors[name]
        if tensor.tensor_type.name in _PLAIN or tensor.data.ndim != 2 or self.architecture in _MOVED:
            return None
        blocks = self._processor(config).process(tensor.data, name).weights  # may reorder rows
        return stored_blocks(torch.from_numpy(np.ascontiguousarray(blocks)), tensor.tensor_type)

    def _dense(self, config: PretrainedConfig, parts: list[str]) -> Tensor:
        """Return a parameter from one tensor, or from all experts' gate and up tensors."""
        process: Callable[..., Any] = self._processor(config).process
        unpacked = [_unpacked(self.tensors[name]) for name in parts]
        if _EXPERTS.search(parts[0]):
            return torch.cat([torch.from_numpy(each) for each in unpacked], 1)
        return torch.from_numpy(np.ascontiguousarray(process(unpacked[0], _renamed(parts[0])).weights))


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the configuration in the form of transformers' tensor processors."""
    names = {"n_head": config.num_attention_heads, "hidden_size": config.hidden_size}
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return names | {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": keys}


def _renamed(name: str) -> str:
    """Rename the head, because transformers' GPT-2 table takes its name for another matrix."""
    return "lm_head.weight" if name == "output.weight" else name


def _unpacked(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a dequantized copy in fp32."""
    from gguf import dequantize

    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _header(path: Path) -> GGUFHeader:
    """Read the header of a file. Raises ModelError."""
    try:
        return read_header(path)
    except ImportError as error:
        raise ModelError(
            f"{path}: is GGUF, which needs another package; run pip install 'inlay-llm[gguf]'",
            code="model.missing_package",
        ) from error
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{path}: is damaged, cut short or no GGUF: {first_line(error)}; download it again",
            code="model.damaged_file",
        ) from error
