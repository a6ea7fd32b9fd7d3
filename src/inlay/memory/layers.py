"""What the layers of a model keep of every token, and how many bytes that is."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.memory.codecs import Codec


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
