"""From a model's configuration to what its layers keep of every token, and how many bytes that is. Needs no weights.

Only families whose numbers have been compared with what a transformers model of that family really keeps are counted
(``tests/advice/memory/test_families.py``); the others are refused, because a wrong guess would look like any other
number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import ModelError, ParameterError


@dataclass(frozen=True, slots=True)
class Codec:
    """A number format of stored keys and values.

    bits: of one element.
    scale_bytes: what every group of elements adds.
    group: how many elements of a vector share that; None for all of them.
    runs: whether the engine stores keys and values in it today; the others are for planning.
    adds: what is counted besides the elements, in words.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group: int | None = None
    runs: bool = False
    adds: str = "nothing"

    def vector_bytes(self, width: int) -> int:
        """Bytes of one vector of ``width`` elements: the key, or the value, of one head."""
        groups = 1 if self.group is None else -(-width // self.group)
        return -(-width * self.bits // 8) + groups * self.scale_bytes


_SCALES = "a 32-bit scale for each key and each value of a head"

CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 32, runs=True),
        Codec("bf16", 16, runs=True),
        Codec("fp16", 16),
        Codec("fp8", 8, scale_bytes=4, runs=True, adds=_SCALES),
        Codec("int8", 8, scale_bytes=4, runs=True, adds=_SCALES),
        Codec("int4", 4, scale_bytes=4, group=64, adds="a 16-bit scale and zero point for every 64 elements of a head"),
    )
}


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises ParameterError."""
    if name not in CODECS:
        raise ParameterError(f"--codec is '{name}'; use one of {', '.join(CODECS)}")
    return CODECS[name]


@dataclass(frozen=True, slots=True)
class Vectors:
    """``count`` vectors of ``width`` elements: the keys, or the values, of one token in one layer."""

    count: int
    width: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one layer keeps of a token.

    keys, values: one vector for each KV head. Multi-head latent attention keeps one latent and one rotary key instead.
    window: how many positions a query sees, its own included; None for all of them.
    """

    keys: Vectors
    values: Vectors
    window: int | None = None

    def token_bytes(self, codec: Codec) -> int:
        """Bytes of one token in this layer."""
        return sum(each.count * codec.vector_bytes(each.width) for each in (self.keys, self.values))

    def kept(self, tokens: int) -> int:
        """How many of a sequence's tokens this layer has to keep to go on behind the last one."""
        return tokens if self.window is None else min(tokens, self.window - 1)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a whole model keeps of every token.

    kind: the model type, as in its configuration.
    layers: those that keep keys and values of their own.
    shared: how many layers read the keys and values of another one and keep none.
    recurrent: how many layers keep a state of fixed size for the whole text instead (Mamba, linear attention,
        convolutions).
    notes: what a reader of the numbers should know.
    """

    kind: str
    layers: tuple[KVLayer, ...]
    shared: int = 0
    recurrent: int = 0
    notes: tuple[str, ...] = ()

    def bytes_per_token(self, codec: Codec) -> int:
        """Bytes of one stored token: 2 (keys and values) × layers × KV heads × width × bytes of an element.

        A stored module may be read from anywhere, so layers with a sliding window count in full.
        """
        return sum(layer.token_bytes(codec) for layer in self.layers)

    def sequence_bytes(self, tokens: int, codec: Codec) -> int:
        """Bytes that one running sequence needs: layers with a sliding window keep the end of it alone."""
        return sum(layer.kept(tokens) * layer.token_bytes(codec) for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer that has one."""
        return tuple(layer.window for layer in self.layers if layer.window is not None)


def attention_layer(kv_heads: int, width: int, window: int | None = None) -> KVLayer:
    """A layer of multi-head, grouped-query or multi-query attention."""
    return KVLayer(Vectors(kv_heads, width), Vectors(kv_heads, width), window)


#: Types of a configuration's text part. Every query head has a key and a value of its own:
_MULTI_HEAD = ("biogpt", "bloom", "gpt2", "gpt_neox", "mpt", "opt", "persimmon")
#: ``num_key_value_heads`` says how many there are, or a setting of the family's own:
_GROUPED = (
    *("afmoe", "apertus", "arcee", "aria_text", "bamba", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_oss", "granite"),
    *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba"),
    *("kolibri1", "laguna", "lfm2", "llama", "llama4_text", "mellum", "minimax_m2", "ministral", "ministral3"),
    *("mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm"),
    *("starcoder2", "vaultgemma"),
)
#: One latent and one rotary key stand for all heads:
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
    """What a model of this transformers configuration keeps of every token. Raises ModelError with the reason."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(f"the configuration of type '{config.model_type}' has several text parts: {error}") from error
    _check_family(text)
    try:
        return _latent(text) if text.model_type in _LATENT else _attention(text)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"the configuration of type '{text.model_type}' cannot be counted: {error}") from error


def _check_family(config: Any) -> None:
    family = config.model_type
    if family in FAMILIES:
        return
    if family in _ENCODERS:
        raise ModelError(f"models of type '{family}' have no KV cache: this is {ENCODER_REASON}")
    if family in _RECURRENT:
        raise ModelError(
            f"models of type '{family}' keep no keys and values: they fold the whole text into one state of fixed "
            "size, of which no part belongs to a token"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"models of type '{family}' are encoder-decoders, which keep keys and values of two texts; "
            "give a decoder-only model"
        )
    raise ModelError(
        f"models of type '{family}' are not counted: what they keep of a token has not been compared with "
        f"a real cache; use one of {', '.join(FAMILIES)}"
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one layer is: whether it attends, whether it keeps a state, and its window."""

    attends: bool
    state: bool
    window: int | None


def _attention(config: Any) -> KVShape:
    """Layers of multi-head, grouped-query or multi-query attention, possibly among others."""
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
    """Multi-head latent attention: a latent and a rotary key a layer (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
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
    """A configuration for each layer: families whose layers differ in heads have them, the others repeat one."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _layer_types(config: Any, configs: Sequence[Any]) -> list[str]:
    """The types that the configuration names; without them, a window makes a layer a sliding one."""
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
    raise ModelError(f"layers of type '{layer_type}' are not counted: what they keep of a token is not known")


def _kv_heads(config: Any) -> Any:
    """Heads of keys and values in one layer."""
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else config.num_attention_heads
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    grouped = None if config.model_type in _MULTI_HEAD else getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads if grouped is None else grouped


def _width(config: Any) -> Any:
    """Elements of one head's key, and of its value."""
    named = getattr(config, "head_dim", None)
    if named is None or config.model_type in (*_MULTI_HEAD, "gpt_bigcode"):  # those look at no head_dim
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
    """What transformers does with Falcon's keys and values, and what that is in words of memory."""
    return (
        f"counted as the {kv_heads} KV heads that the model computes; transformers repeats them for all {heads} heads "
        f"before it caches them, which takes {heads // kv_heads} times as much"
    )


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"a number of heads, elements or positions is {value!r}")
    return value
