"""The bundled model's shape, its initial weights, and attention for its training.

Small models spend most of their training learning to find things in context. Little improves until two kinds of heads
have formed: heads that look back and heads that match their notes (Olsson et al., 2022, "In-context Learning and
Induction Heads"). Here the first three layers start with such heads, written by hand; training may change them:

- Layer 0 notes beside every token the token before it, and a bag of the tokens of the last words and sentences.
- Layer 1 looks for the position whose note is the current token and copies from there, which continues runs.
- Layer 2 looks for the position whose bag is most like the current one and copies from there, which finds facts.

Digits start with their order, so that comparing two numbers is a difference and not a table to learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

CONTEXT = 4096  # positions
_WIDTH, _LAYERS, _HEADS = 256, 6, 4
_HEAD = _WIDTH // _HEADS  # 64
_HALF = _HEAD // 2  # frequencies of a head
_THETA = 500_000.0  # half of a head's frequencies turn slowly enough to match content over the whole context
_SLOW = (*range(_HALF // 2, _HALF), *range(_HALF + _HALF // 2, _HEAD))  # the rows of a head with slow frequencies
_SCALE = 0.05  # of the embeddings
_BLOCK = 128  # queries of one product in training

# Initial use of the residual stream's dimensions.
_CONSTANT = 0  # equal for all tokens, for heads that go by position alone
_CONTENT = range(1, 128)  # the token
_BAG = range(128, 192)  # a projection of the tokens before
_NOTE = range(192, 224)  # a projection of the previous token
_MAGNITUDE = 224  # of a digit, from -1 to 1
_COMMON = 255  # large for common tokens, which makes their other dimensions small after normalisation


def new_model(tokenizer: PreTrainedTokenizerBase, counts: Tensor | None = None, seed: int = 1) -> LlamaForCausalLM:
    """A llama of 5 million parameters that can copy and look up, roughly, and nothing else.

    Args:
        counts: (vocabulary,), frequency of each token in a sample of the training text; None for equal frequencies.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=688,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "causal"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _start(model, torch.ones(len(tokenizer)) if counts is None else counts)
        order_digits(model, tokenizer, 4 * _SCALE)
    return model


def order_digits(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, scale: float) -> None:
    """Add the value of every digit to its embedding along one dimension, from -scale to scale.

    Only comparisons depend on the order of digits. All else treats them as ten different tokens.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for digit in range(10):
        for token in (f"{digit}", f"Ġ{digit}"):  # the second follows a space
            if token in vocabulary:
                model.model.embed_tokens.weight[vocabulary[token], _MAGNITUDE] += scale * (digit - 4.5) / 4.5


def _start(model: LlamaForCausalLM, counts: Tensor) -> None:
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0, _SCALE)
    embeddings[:, _CONSTANT] = 4 * _SCALE
    embeddings[:, _CONTENT.stop :] = 0
    embeddings[:, _COMMON] = 8 * _SCALE * torch.log1p(2000 * counts / counts.sum())
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.v_proj):
            projection.weight.normal_(0, _WIDTH**-0.5)
        # queries start near their own keys, and outputs near the values, so that other heads match and copy too
        noise = torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5
        attention.k_proj.weight.copy_(0.7 * attention.q_proj.weight + 0.7 * noise)
        attention.o_proj.weight.copy_(0.2 * _SCALE * attention.v_proj.weight.T)
        layer.mlp.down_proj.weight.mul_(0.2)
    reading = torch.linalg.qr(torch.randn(len(_CONTENT), _HEAD))[0].T  # (64, 127), orthonormal rows
    first, second, third = (model.model.layers[i].self_attn for i in range(3))
    _note(first, 0, _NOTE, reading, gain=1.4, frequencies=range(8), behind=1, sharpness=1.8)
    _note(first, 1, _BAG, reading, gain=2, frequencies=range(2, 13), behind=5, sharpness=1.08)
    _note(first, 2, _BAG, reading, gain=1, frequencies=range(6, 15), behind=12, sharpness=0.36)
    for head in range(2):
        _continue_runs(second, head, reading)
        _find_alike(third, head)


def _note(
    attention: nn.Module,
    head: int,
    into: range,
    reading: Tensor,
    *,
    gain: float,
    frequencies: range,
    behind: int,
    sharpness: float,
) -> None:
    """A head that reads tokens around ``behind`` positions back, by position alone, and notes a projection.

    The higher its frequencies and its sharpness, the fewer tokens it reads.
    """
    q, k, v, o = _clear(attention, head)
    _look_back(q, k, frequencies, behind, sharpness)
    v[: len(into), _CONTENT.start : _CONTENT.stop] = reading[: len(into)]
    for row, dimension in enumerate(into):
        o[dimension, row] = gain * _SCALE


def _continue_runs(attention: nn.Module, head: int, reading: Tensor) -> None:
    """A head that looks for a note of the current token, and copies half of the token at that position."""
    q, k, v, o = _clear(attention, head)
    for row, turned in enumerate(_SLOW):
        q[turned, _CONTENT.start : _CONTENT.stop] = 2.5 * reading[row]
        k[turned, _NOTE.start + row] = 2.5
    _copy_half(v, o, head, gain=2.5)


def _find_alike(attention: nn.Module, head: int) -> None:
    """A head that looks for a bag like its own at some distance, and copies half of the token at that position."""
    q, k, v, o = _clear(attention, head)
    for row, turned in enumerate(_SLOW):
        dimension = _BAG.start + len(_SLOW) * head + row
        q[turned, dimension] = k[turned, dimension] = 2.0
    _look_back(q, k, range(4, 10), 6, 2.0, away=True)
    _copy_half(v, o, head, gain=1.0)


def _look_back(q: Tensor, k: Tensor, frequencies: range, behind: int, sharpness: float, *, away: bool = False) -> None:
    """Prefer or avoid the position ``behind`` positions back: keys carry the phase of the one ahead."""
    sign = -1 if away else 1
    for i in frequencies:
        turn = torch.tensor(behind * _THETA ** (-i / _HALF))
        q[i, _CONSTANT] = sharpness
        k[i, _CONSTANT] = sign * sharpness * torch.cos(turn)
        k[i + _HALF, _CONSTANT] = sign * sharpness * torch.sin(turn)


def _copy_half(v: Tensor, o: Tensor, head: int, *, gain: float) -> None:
    """Copy the content that a head reads to the same dimensions: head 0 its first half, head 1 the second."""
    for row in range(_HEAD):
        dimension = _HEAD * head + row
        if dimension in _CONTENT:
            v[row, dimension] = 1
            o[dimension, row] = gain * _SCALE


def _clear(attention: nn.Module, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of one head's q, k, v (head, width) and o (width, head), set to zero."""
    rows = slice(_HEAD * head, _HEAD * (head + 1))
    views = [getattr(attention, name).weight[rows] for name in ("q_proj", "k_proj", "v_proj")]
    views.append(attention.o_proj.weight[:, rows])  # type: ignore[union-attr, index]
    for view in views:
        view.zero_()
    return views[0], views[1], views[2], views[3]


def _causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Plain causal attention for any positions. The stock paths read a jump as a border between sequences.

    It uses small products over blocks of queries. On a CPU, forward and backward take half the time of the fused
    kernel.
    """
    sequences, heads, tokens, _width = query.shape
    with torch.autocast("cpu", enabled=False):
        q, k, v = (t.to(torch.bfloat16).reshape(-1, tokens, _HEAD) for t in (query * scaling, key, value))
        future = torch.full((_BLOCK, _BLOCK), -torch.inf, dtype=torch.bfloat16).triu(1)
        outs = []
        for first in range(0, tokens, _BLOCK):
            last = min(first + _BLOCK, tokens)
            masked = pad(future[: last - first, : last - first], (first, 0))
            scores = torch.baddbmm(masked, q[:, first:last], k[:, :last].transpose(1, 2))
            outs.append(torch.bmm(scores.softmax(-1), v[:, :last]))
    out = torch.cat(outs, 1).view(sequences, heads, tokens, _HEAD)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", _causal)
