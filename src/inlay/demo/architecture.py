"""The bundled model's shape, the weights that it starts from, and attention for its training.

Learning to copy from context takes small models most of their training: nothing else improves until a head that looks
at the previous token and one that matches on what it wrote have formed together (Olsson et al., 2022, "In-context
Learning and Induction Heads"). Here the first two layers start with such a pair, written by hand, so that the untrained
model already completes a run of tokens that it has seen before. Training is free to change them.
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
_THETA = 500_000.0  # half of a head's frequencies turn so slowly that they match content over the whole context
_SCALE = 0.05  # of the embeddings
_CONSTANT = 0  # the one dimension that is alike in all embeddings: what heads read that go by position alone
_BLOCK = 128  # queries of one product in training
_NOTES = range(192, 256)  # dimensions that start empty, where the first layer notes the previous token


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int = 1) -> LlamaForCausalLM:
    """A llama of 5 million parameters that can copy, and nothing else."""
    AttentionInterface.register("causal", _causal)
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
        _start(model)
    return model


def _start(model: LlamaForCausalLM) -> None:
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0, _SCALE)
    embeddings[:, _CONSTANT] = 4 * _SCALE
    embeddings[:, _NOTES.start :] = 0
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.v_proj):
            projection.weight.normal_(0, _WIDTH**-0.5)
        # queries start near their own keys, and outputs near what was read, so that heads match and copy
        noise = torch.randn(_WIDTH, _WIDTH) * _WIDTH**-0.5
        attention.k_proj.weight.copy_(0.7 * attention.q_proj.weight + 0.7 * noise)
        attention.o_proj.weight.copy_(0.4 * _SCALE * attention.v_proj.weight.T)
        layer.mlp.down_proj.weight.mul_(0.3)
    reading = torch.linalg.qr(torch.randn(_NOTES.start - 1, _HEAD))[0].T  # (64, 191), orthonormal rows
    _note_previous_token(model.model.layers[0].self_attn, reading)
    for head in range(3):
        _match_notes(model.model.layers[1].self_attn, reading, head)


def _note_previous_token(attention: nn.Module, reading: Tensor) -> None:
    """Head 0 looks one position back, by rotation alone, and notes a projection of the token there."""
    q, k, v, o = _clear(attention, 0)
    half = _HEAD // 2
    for i in range(8):  # the fastest frequencies; a key's phase is that of the position after it
        frequency = _THETA ** (-i / half)
        q[i, _CONSTANT] = 1.8
        k[i, _CONSTANT] = 1.8 * torch.cos(torch.tensor(frequency))
        k[i + half, _CONSTANT] = 1.8 * torch.sin(torch.tensor(frequency))
    v[:, 1 : _NOTES.start] = reading
    for row, note in enumerate(_NOTES):
        o[note, row] = _SCALE


def _match_notes(attention: nn.Module, reading: Tensor, head: int) -> None:
    """A head that looks for a note of the current token, and copies a third of the token that carries it."""
    q, k, v, o = _clear(attention, head)
    half = _HEAD // 2
    slow = [*range(half // 2, half), *range(half + half // 2, _HEAD)]
    for row, turned in enumerate(slow):
        q[turned, 1 : _NOTES.start] = 2.5 * reading[row]
        k[turned, _NOTES.start + row] = 2.5
    for row in range(_HEAD):
        dimension = _HEAD * head + row
        if dimension != _CONSTANT:
            v[row, dimension] = 1
            o[dimension, row] = 2.5 * _SCALE


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
    """Plain causal attention whatever the positions; the stock paths read a jump as a border between sequences.

    Small products over blocks of queries: on a CPU, forward and backward take half the time of the fused kernel.
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
