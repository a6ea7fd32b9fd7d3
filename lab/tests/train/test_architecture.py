"""The untrained model: its heads already look back, match and look up; training's attention is plain causal."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedTokenizerBase

from inlay_lab.eval.questions import Form
from inlay_lab.eval.words import Split
from inlay_lab.train.architecture import CONTEXT, new_model
from inlay_lab.train.lessons import Encoder, Lesson, answering

FIRST = 5  # token id after the special tokens


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return new_model(tokenizer).eval()


@pytest.fixture(scope="module")
def stock(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights in fp32 with transformers' own attention."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    return plain


@pytest.fixture(scope="module")
def counts(encoder: Encoder) -> Tensor:
    batch, _ = answering(random.Random(0), encoder, Split.TRAIN, Lesson((4, 4), 8), tokens=4000)
    return torch.bincount(batch.ids.flatten(), minlength=len(encoder.tokenizer)).float()


@torch.no_grad()
def looks(model: LlamaForCausalLM, ids: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """Attention weights of each query over each key, layer by layer: (sequences, heads, queries, keys)."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    positions = (start + torch.arange(ids.shape[1])).expand(len(ids), -1)
    return eager(input_ids=ids, position_ids=positions, output_attentions=True).attentions


def twice(vocabulary: int) -> tuple[Tensor, Tensor]:
    """150 random tokens, then runs of them in another order (300), and the earlier position of each token (300)."""
    generator = torch.Generator().manual_seed(0)
    runs = torch.arange(150).split([5, 3, 8, 2, 12] * 5)
    again = torch.cat([runs[index] for index in torch.randperm(len(runs), generator=generator)])
    tokens = FIRST + torch.randperm(vocabulary - FIRST, generator=generator)[:150]
    return torch.cat([tokens, tokens[again]]), torch.cat([torch.arange(150), again])


def test_digits_start_in_their_order(model: LlamaForCausalLM, encoder: Encoder):
    rows = model.model.embed_tokens.weight
    for before in ("", " "):
        # " 0" may be two tokens: no number begins with it
        tokens = [encoder(f"{before}{digit}") for digit in range(1 if before else 0, 10)]
        assert {len(ids) for ids in tokens} == {1}
        found = rows[[ids[0] for ids in tokens]]
        rising = (found.diff(dim=0) > 0).all(dim=0)
        assert rising.sum() == 1
        steps = found[:, rising].diff(dim=0)
        assert (steps - steps.mean()).abs().max() < 0.1 * steps.mean()


@pytest.mark.parametrize("start", [0, CONTEXT - 300])
def test_the_first_layer_looks_at_the_previous_token(model: LlamaForCausalLM, start: int):
    ids, _ = twice(model.config.vocab_size)
    look = looks(model, ids[None], start)[0][0, 0]
    assert look.diagonal(-1).mean() > 0.5


@pytest.mark.parametrize("start", [0, CONTEXT - 300])
def test_second_layer_attends_after_the_same_token(model: LlamaForCausalLM, start: int):
    ids, before = twice(model.config.vocab_size)
    look = looks(model, ids[None], start)[1][0]
    queries = torch.tensor([at for at in range(150, 300) if before[at] + 1 < 150])
    for head in range(2):
        assert look[head, queries, before[queries] + 1].mean() > 0.5


def test_third_layer_attends_to_the_requested_document(
    tokenizer: PreTrainedTokenizerBase, encoder: Encoder, counts: Tensor
):
    batch, drawn = answering(
        random.Random(3),
        encoder,
        Split.HELD_OUT,
        Lesson((3, 3), 1, {"single": 1.0}, Form.PLAIN),
        tokens=3000,
        gapped=0.0,
    )
    look = looks(new_model(tokenizer, counts), batch.ids)[2][:, :2].mean(1)  # (sequences, queries, keys)
    shares = []
    for conversation, seen in zip(drawn, look, strict=True):
        runs, ((asked, _),) = encoder.conversation(conversation)
        number = next(
            n for n, document in enumerate(conversation.documents, 1) if document.name in conversation.questions[0].text
        )
        first = sum(map(len, runs[:number]))
        at = sum(map(len, runs)) + len(asked) - 1
        shares.append(float(seen[at, first : first + len(runs[number])].sum()))
    assert sum(shares) / len(shares) > 0.5  # of four runs, head included


def attention(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(sequences, tokens, heads, width)"""
    if kind == "training":
        out, _ = AttentionInterface()["causal"](None, q, k, v, None, 0.125)
        return out
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_training_attention_is_causal_attention(model: LlamaForCausalLM, tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(2, 4, tokens, 64, generator=generator) for _ in range(4)]
    results = []
    for kind in ("training", "stock"):
        q, k, v = (t.clone().requires_grad_() for t in drawn[:3])
        out = attention(kind, q, k, v).float()
        (out * drawn[3].transpose(1, 2)).sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 0.01 * theirs.norm() + 1e-3
        assert (ours - theirs).abs().max() < 0.05 * max(1.0, float(theirs.abs().max()))


def test_training_attention_does_not_see_later_tokens(model: LlamaForCausalLM):
    q, k, v = torch.randn(3, 1, 4, 200, 64, generator=torch.Generator().manual_seed(0))
    whole = attention("training", q, k, v)
    k[:, :, 130:], v[:, :, 130:] = 7.0, 7.0
    changed = attention("training", q, k, v)
    assert torch.equal(whole[:, :130], changed[:, :130])
    assert not torch.equal(whole[:, 130:], changed[:, 130:])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.no_grad()
def test_positions_may_jump(model: LlamaForCausalLM, stock: LlamaForCausalLM):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST, model.config.vocab_size, (2, 300), generator=generator)
    positions = torch.arange(300) + torch.tensor([0] * 100 + [37] * 120 + [200] * 80)
    positions = positions.expand(2, -1)
    future = torch.full((300, 300), -torch.inf).triu(1).expand(2, 1, 300, 300)
    with torch.autocast("cpu", torch.bfloat16):
        trained = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    masked = stock.model(input_ids=ids, position_ids=positions, attention_mask=future, use_cache=False)
    split = stock.model(input_ids=ids, position_ids=positions, use_cache=False)
    packed = stock.model(input_ids=ids, attention_mask=future, use_cache=False)
    assert distance(trained, masked.last_hidden_state) < 0.07
    assert distance(split.last_hidden_state, masked.last_hidden_state) > 0.3  # the reason for training's own attention
    assert distance(packed.last_hidden_state, masked.last_hidden_state) > 0.09


def test_shape_and_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase):
    again, other = new_model(tokenizer), new_model(tokenizer, seed=2)
    assert sum(weight.numel() for weight in model.parameters()) < 6_000_000
    assert model.config.max_position_embeddings == CONTEXT
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert weight.isfinite().all()
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
