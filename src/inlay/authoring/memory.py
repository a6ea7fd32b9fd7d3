"""The memory of a cached token, from a model's configuration. Needs no weights and no tokenizer.

It counts only families that ``tests/model/authoring/memory/test_families.py`` compares with the cache of a real
transformers model. Other families are refused, because a wrong guess would look like any other number.

Some architectures need no file. They carry the figures that Prompt Cache prints for them (arXiv 2311.04934, table 2).
Their numbers are those of the public configurations: bert-base-uncased, falcon-rw-1b, Llama-2, mpt-30b, falcon-40b and
falcon-180B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError, ParameterError
from inlay.models.shapes import MODEL_DIRECTORY, SHAPES, shape_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that determine a model's KV of one token.

    Attributes:
        kind: The model type in transformers.
        width: Elements of one head.
        label: The name in the paper's table.
        paper: Megabytes of one token in the paper's table.
    """

    kind: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    label: str
    paper: float

    @property
    def encoder(self) -> bool:
        """True if the model has no KV cache, so its size is only a number."""
        return self.kind == "bert"

    @property
    def repeated(self) -> bool:
        """True if transformers repeats the KV heads for every head before it caches them."""
        return self.kind == "falcon" and 1 < self.kv_heads < self.heads

    def shape(self) -> KVShape:
        """Return the KV of one token."""
        notes = (falcon_note(self.kv_heads, self.heads),) if self.repeated else ()
        layers = (attention_layer(self.kv_heads, self.width),) * self.layers
        return KVShape(self.kind, layers, notes=notes)

    def every_head(self) -> KVShape:
        """Return the KV of one token with a key and a value for every query head."""
        return replace(self, kv_heads=self.heads).shape()

    def reason(self) -> str:
        """Return the reason why it keeps less than a key and a value for every query head, or "" if it does not."""
        if self.encoder:
            return ENCODER_REASON
        if self.kv_heads == self.heads:
            return ""
        return f"{self.kv_heads} KV heads serve {self.heads} heads (grouped-query attention)"


ARCHITECTURES = {
    "bert-base": Architecture("bert", 12, 12, 12, 64, "BERT", 0.03),
    "falcon-rw-1b": Architecture("falcon", 24, 32, 32, 64, "Falcon 1B", 0.18),
    "llama-2-7b": Architecture("llama", 32, 32, 32, 128, "Llama 7B", 0.50),
    "llama-2-13b": Architecture("llama", 40, 40, 40, 128, "Llama 13B", 0.78),
    "mpt-30b": Architecture("mpt", 48, 64, 64, 112, "MPT 30B", 1.31),
    "falcon-40b": Architecture("falcon", 60, 128, 8, 64, "Falcon 40B", 1.87),
    "llama-2-70b": Architecture("llama", 80, 64, 8, 128, "Llama 70B", 2.5),
    "falcon-180b": Architecture("falcon", 80, 232, 8, 64, "Falcon 180B", 4.53),
}


def known_without_files(name: str) -> bool:
    """Return True for a name of an architecture or shape with known numbers, so no file is read."""
    return name in ARCHITECTURES or name in SHAPES


def shape_named(name: str) -> KVShape:
    """Return a model's KV of one token.

    Args:
        name: An architecture in ``ARCHITECTURES``, ``demo``, a shape with or without ``random:``, a directory with a
            config.json, or a hub name.

    Raises:
        ModelError: The model has no KV cache or cannot be counted. The message gives the reason.
    """
    if name in ARCHITECTURES:
        if ARCHITECTURES[name].encoder:
            raise ModelError(f"{name} has no KV cache: this is {ENCODER_REASON}", code="model.no_cache")
        return ARCHITECTURES[name].shape()
    config = config_named(name)
    try:
        return shape_of(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}", code=error.code) from error


def weights_named(name: str) -> dict[str, int] | None:
    """Return the bytes of a model's loaded weights, in its own dtype, int8 and int4.

    Args:
        name: As in ``shape_named``. An architecture that is not a shape with a vocabulary gives None.

    Raises:
        ModelError: The model cannot be read.
    """
    import torch

    from inlay.models.spec import dtype_name
    from inlay.models.weight_size import weight_bytes

    if name in ARCHITECTURES and name not in SHAPES:
        return None
    config = config_named(name)
    own = torch.float32 if config.dtype == torch.float32 else torch.bfloat16
    return {
        dtype_name(own): weight_bytes(config, own),
        **{form: weight_bytes(config, own, form) for form in ("int8", "int4")},
    }


def config_named(name: str) -> PretrainedConfig:
    """Return the configuration of a model. ``name`` is as in ``shape_named``, without ``ARCHITECTURES``. Raises
    ModelError.
    """
    from transformers import AutoConfig

    from inlay.models.load import read_config

    if name.startswith("random:") or name in SHAPES:
        settings = shape_settings(name.removeprefix("random:"))
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    return read_config(str(MODEL_DIRECTORY) if name == "demo" else name)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format of stored keys and values.

    Attributes:
        bits: Bits of one element.
        scale_bytes: Extra bytes of each group of elements.
        group: Elements of a vector in one group. None for the whole vector.
        runs: The engine stores keys and values in it. The other formats are for planning.
        adds: The extra bytes in words.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group: int | None = None
    runs: bool = False
    adds: str = "nothing"

    def vector_bytes(self, width: int) -> int:
        """Return the bytes of one vector of ``width`` elements: the key or the value of one head."""
        groups = 1 if self.group is None else -(-width // self.group)
        return -(-width * self.bits // 8) + groups * self.scale_bytes


_SCALES = "a 32-bit scale for each key and each value of a head"

CODECS = {
    codec.name: codec
    for codec in (
        NumberFormat("fp32", 32, runs=True),
        NumberFormat("bf16", 16, runs=True),
        NumberFormat("fp16", 16),
        NumberFormat("fp8", 8, scale_bytes=4, runs=True, adds=_SCALES),
        NumberFormat("int8", 8, scale_bytes=4, runs=True, adds=_SCALES),
        NumberFormat(
            "int4", 4, scale_bytes=4, group=64, adds="a 16-bit scale and zero point for every 64 elements of a head"
        ),
    )
}


def codec_named(name: str) -> NumberFormat:
    """Return the codec of this name. Raises ParameterError."""
    if name not in CODECS:
        raise ParameterError(f"--codec is '{name}'; use one of {', '.join(CODECS)}", code="parameter.unknown_choice")
    return CODECS[name]


@dataclass(frozen=True, slots=True)
class Vectors:
    """``count`` vectors of ``width`` elements: the keys or the values of one token in one layer."""

    count: int
    width: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The KV of one token in one layer.

    Attributes:
        keys: One vector for each KV head. Multi-head latent attention has a single latent here.
        values: One vector for each KV head. Multi-head latent attention has a single rotary key here.
        window: Number of positions that a query sees, including its own. None for all of them.
    """

    keys: Vectors
    values: Vectors
    window: int | None = None

    def token_bytes(self, codec: NumberFormat) -> int:
        """Return the bytes of one token in this layer."""
        return sum(each.count * codec.vector_bytes(each.width) for each in (self.keys, self.values))

    def kept(self, tokens: int) -> int:
        """Return the number of a sequence's tokens that this layer must keep to continue after the last one."""
        return tokens if self.window is None else min(tokens, self.window - 1)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token in a whole model.

    Attributes:
        kind: The model type in the configuration.
        layers: The layers with their own keys and values.
        shared: Number of layers that read the keys and values of another layer.
        recurrent: Number of layers with a state of fixed size instead (Mamba, linear attention, convolutions).
        notes: Remarks for readers of the numbers.
    """

    kind: str
    layers: tuple[KVLayer, ...]
    shared: int = 0
    recurrent: int = 0
    notes: tuple[str, ...] = ()

    def bytes_per_token(self, codec: NumberFormat) -> int:
        """Return the bytes of one stored token: 2 (keys and values) × layers × KV heads × width × bytes of an element.

        A stored module may be read from anywhere, so layers with a sliding window count in full.
        """
        return sum(layer.token_bytes(codec) for layer in self.layers)

    def sequence_bytes(self, tokens: int, codec: NumberFormat) -> int:
        """Return the bytes of one running sequence. Layers with a sliding window keep only its end."""
        return sum(layer.kept(tokens) * layer.token_bytes(codec) for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer that has one."""
        return tuple(layer.window for layer in self.layers if layer.window is not None)


def attention_layer(kv_heads: int, width: int, window: int | None = None) -> KVLayer:
    """Return a layer of multi-head, grouped-query or multi-query attention."""
    return KVLayer(Vectors(kv_heads, width), Vectors(kv_heads, width), window)


#: Types of a configuration's text part. Here every query head has its own key and value.
_MULTI_HEAD = ("biogpt", "bloom", "gpt2", "gpt_neox", "mpt", "opt", "persimmon")
#: Here ``num_key_value_heads`` or a setting of the family gives the number of KV heads.
_GROUPED = (
    *("afmoe", "apertus", "arcee", "aria_text", "bamba", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "gpt_bigcode"),
    *(
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
    ),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba"),
    *("kolibri1", "laguna", "lfm2", "lfm3", "llama", "llama4_text", "mellum", "minimax_m2", "ministral", "ministral3"),
    *("mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm"),
    *("starcoder2", "vaultgemma"),
)
#: Here one latent and one rotary key serve all heads.
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
FAMILIES = tuple(sorted((*_MULTI_HEAD, *_GROUPED, *_LATENT)))

_ENCODERS = ("albert", "bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
_RECURRENT = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")

_FULL = ("full_attention", "attention")
_STATES = ("linear_attention", "conv", "mamba", "recurrent")
_NOTHING = ("moe", "mlp")

ENCODER_REASON = (
    "an encoder, in which every token attends to later ones, so nothing of a text can be kept for another one"
)


def shape_of(config: Any) -> KVShape:
    """Return the KV of one token for this transformers configuration. Raises ModelError with the reason."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(
            f"the configuration of type '{config.model_type}' has several text parts: {error}",
            code="model.unreadable_config",
        ) from error
    _check_family(text)
    try:
        return _latent(text) if text.model_type in _LATENT else _attention(text)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ModelError(
            f"the configuration of type '{text.model_type}' cannot be counted: {error}", code="model.unreadable_config"
        ) from error


def _check_family(config: Any) -> None:
    family = config.model_type
    if family in FAMILIES:
        return
    if family in _ENCODERS:
        raise ModelError(f"models of type '{family}' have no KV cache: this is {ENCODER_REASON}", code="model.no_cache")
    if family in _RECURRENT:
        raise ModelError(
            f"models of type '{family}' keep no keys and values: they fold the whole text into one state of fixed "
            "size, of which no part belongs to a token",
            code="model.no_cache",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"models of type '{family}' are encoder-decoders, which keep keys and values of two texts; "
            "give a decoder-only model",
            code="model.not_counted",
        )
    raise ModelError(
        f"models of type '{family}' are not counted: what they keep of a token has not been compared with "
        f"a real cache; use one of {', '.join(FAMILIES)}",
        code="model.not_counted",
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """The kind of one layer: it may attend, keep a state, and have a window."""

    attends: bool
    state: bool
    window: int | None


def _attention(config: Any) -> KVShape:
    """Return layers of multi-head, grouped-query or multi-query attention, possibly among other layers."""
    configs = _layer_configs(config)
    kinds = [_kind(name, each) for name, each in zip(_layer_types(config, configs), configs, strict=True)]
    shared = getattr(config, "num_kv_shared_layers", 0) or 0  # the last layers read those of earlier ones
    own = len(kinds) - shared
    layers = [
        attention_layer(_positive(_kv_heads(each)), _positive(_width(each)), kind.window)
        for each, kind in list(zip(configs, kinds, strict=True))[:own]
        if kind.attends
    ]
    recurrent = sum(kind.state for kind in kinds)
    return KVShape(
        kind=config.model_type,
        layers=tuple(layers),
        shared=shared,
        recurrent=recurrent,
        notes=tuple(_notes(config, shared, recurrent, len(kinds))),
    )


def _latent(config: Any) -> KVShape:
    """Return multi-head latent attention: a latent and a rotary key in each layer (DeepSeek-V2, arXiv 2405.04434,
    section 2.1).
    """
    heads = _positive(config.num_attention_heads)
    layer = KVLayer(Vectors(1, _positive(config.kv_lora_rank)), Vectors(1, _positive(config.qk_rope_head_dim)))
    whole = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    latent = layer.keys.width + layer.values.width
    note = (
        f"counted as the latent that transformers keeps, {latent} elements a layer; a cache of every head's key and "
        f"value, as attention reads them, would take {whole:,}, which is {whole / latent:.0f} times as much"
    )
    return KVShape(config.model_type, (layer,) * config.num_hidden_layers, notes=(note,))


def _layer_configs(config: Any) -> list[Any]:
    """Return a configuration for each layer. Families whose layers differ in heads have several, the others repeat
    one.
    """
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _layer_types(config: Any, configs: Sequence[Any]) -> list[str]:
    """Return the layer types of the configuration. Without any, a layer with a window is a sliding one."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        if len(named) != len(configs):
            raise TypeError(f"it has {len(configs)} layers and names the types of {len(named)}")
        return list(named)
    return [
        "sliding_attention" if getattr(each, "sliding_window", None) is not None else "full_attention"
        for each in configs
    ]


def _kind(layer_type: str, config: Any) -> _Kind:
    if layer_type in (*_FULL, *_STATES, *_NOTHING, "hybrid"):
        return _Kind(layer_type in (*_FULL, "hybrid"), layer_type in (*_STATES, "hybrid"), None)
    if layer_type == "sliding_attention":
        return _Kind(True, False, _positive(config.sliding_window))
    if layer_type == "chunked_attention":
        return _Kind(True, False, _positive(config.attention_chunk_size))
    raise ModelError(
        f"layers of type '{layer_type}' are not counted: what they keep of a token is not known",
        code="model.not_counted",
    )


def _kv_heads(config: Any) -> Any:
    """Return the number of KV heads in one layer."""
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else config.num_attention_heads
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    grouped = None if config.model_type in _MULTI_HEAD else getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads if grouped is None else grouped


def _width(config: Any) -> Any:
    """Return the elements of one head's key, which equal those of its value."""
    named = getattr(config, "head_dim", None)
    if named is None or config.model_type in (*_MULTI_HEAD, "gpt_bigcode"):  # these families ignore head_dim
        return config.hidden_size // config.num_attention_heads
    return named


def _notes(config: Any, shared: int, recurrent: int, layers: int) -> Iterator[str]:
    if config.model_type == "falcon" and config.new_decoder_architecture:
        yield falcon_note(_kv_heads(config), config.num_attention_heads)
    if shared:
        yield f"{shared} of {layers} layers read the keys and values of earlier ones and keep none"
    if recurrent:
        yield (
            f"{recurrent} of {layers} layers keep a state of fixed size for the whole text, which is not counted; "
            "a text of such a model cannot be put together from modules"
        )


def falcon_note(kv_heads: int, heads: int) -> str:
    """Return the note on Falcon's KV heads, which transformers repeats before it caches them."""
    return (
        f"counted as the {kv_heads} KV heads that the model computes; transformers repeats them for all {heads} heads "
        f"before it caches them, which takes {heads // kv_heads} times as much"
    )


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"a number of heads, elements or positions is {value!r}")
    return value
