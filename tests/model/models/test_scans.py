"""The scans of recurrent layers against the stock PyTorch code, on random spans, states and marks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from inlay.attention.kernel import kernel
from inlay.models.mixers import compiled, operations
from inlay.models.mixers.states import PassStates, StateSpan, StateStorage

SLOTS = 12

#: A fresh prompt with marks, a continued one, three decode rows, one row of a fresh prompt, and a mark at the end.
SPANS = (
    (70, StateSpan(None, 1, ((13, 7), (64, 8)))),
    (21, StateSpan(2, 3)),
    (1, StateSpan(4, 4)),
    (1, StateSpan(5, 5)),
    (1, StateSpan(9, 6)),
    (1, StateSpan(None, 10)),
    (5, StateSpan(2, 11, ((5, 9),))),
)
ROWS = sum(rows for rows, _ in SPANS)

needs_kernel = pytest.mark.skipif(not compiled.COMPILED, reason="inlay was installed without the kernel")


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(1, ROWS, *shape) * scale


def both(monkeypatch: pytest.MonkeyPatch, run: Any, shape: tuple[int, ...]) -> None:
    """Run with and without the kernel from the same states, and compare outputs and states."""
    found = []
    before = torch.randn(SLOTS, *shape) * 0.3
    for use in (True, False):
        monkeypatch.setattr(compiled, "COMPILED", use)
        states = PassStates(StateStorage(SLOTS, torch.device("cpu")), SPANS)
        monkeypatch.setattr(operations, "states_now", lambda states=states: states)
        part = states.part("state", shape, torch.float32)
        part.copy_(before)
        with torch.inference_mode():
            found.append((run(), part.clone()))
    (output, after), (expected, expected_after) = found
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, expected_after, atol=2e-5, rtol=1e-4)
    assert not torch.equal(after, before)


@needs_kernel
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("widths", [(8, 16), (128, 128), (64, 32)])
def test_the_gated_delta_rule(monkeypatch, key_heads, widths):
    torch.manual_seed(0)
    keys, values = widths
    rule = operations.gated_delta(modeling_qwen3_5)
    query, key, value = rows_of(key_heads, keys), rows_of(key_heads, keys), rows_of(4, values)
    g, beta = -torch.rand(1, ROWS, 4), torch.rand(1, ROWS, 4)
    run = lambda: rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]  # noqa: E731
    both(monkeypatch, run, (4, keys, values))


@needs_kernel
def test_kimis_delta_attention(monkeypatch):
    torch.manual_seed(0)
    rule = operations.kimi_delta(modeling_kimi_linear)
    query, key, value = rows_of(4, 32), rows_of(4, 32), rows_of(4, 32)
    g, beta = -torch.rand(1, ROWS, 4, 32), torch.rand(1, ROWS, 4)
    run = lambda: rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]  # noqa: E731
    both(monkeypatch, run, (4, 32, 32))


@needs_kernel
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.8)])
@pytest.mark.parametrize(("heads", "width", "groups", "state"), [(4, 16, 1, 16), (6, 8, 2, 32), (8, 64, 1, 128)])
def test_the_state_space_of_mamba2(monkeypatch, limit, heads, width, groups, state):
    torch.manual_seed(0)
    scan = operations.mamba2(modeling_granitemoehybrid)
    x, time, b, c = rows_of(heads, width), rows_of(heads), rows_of(groups, state), rows_of(groups, state)
    a, d, bias = -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)

    def run() -> Tensor:
        return scan(x, time, a, b, c, 16, D=d, dt_bias=bias, dt_softplus=True, dt_limit=limit)

    both(monkeypatch, run, (heads, width, state))


@pytest.mark.parametrize("home", [modeling_mamba, modeling_falcon_mamba, modeling_jamba])
def test_mambas_scan_in_pieces_equals_the_stock_scan_of_whole_texts(monkeypatch, home):
    """Stock code starts at an empty state whenever several tokens come, so only a whole text is an oracle."""
    torch.manual_seed(0)
    channels, width, lengths = 6, 8, (40, 23)
    sizes = (channels, channels, width, width, channels)
    texts = [tuple(torch.randn(1, size, rows) for size in sizes) for rows in lengths]
    a, d, bias = -torch.rand(channels, width) - 0.1, torch.randn(channels), torch.randn(channels)

    def stock(text: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
        x, time, b, c, gate = (each[..., :rows] for each in text)
        named = {"D": d, "z": gate, "delta_bias": bias, "delta_softplus": True}
        return inspect.unwrap(home.mamba_selective_scan)(x, time, a, b, c, return_last_state=True, **named)

    scan, storage = operations.mamba1(home), StateStorage(SLOTS, torch.device("cpu"))
    found: list[list[Tensor]] = [[], []]
    ends, marked = [0, 0], 5
    for pieces in ((13, 1), (1, 1), (9, 20), (1, 1), (16, 0)):  # rows of each text in a pass
        spans = [
            (rows, StateSpan(number + 1 if end else None, number + 1, () if end or number else ((marked, 7),)))
            for number, (rows, end) in enumerate(zip(pieces, ends, strict=True))
            if rows
        ]
        states = PassStates(storage, spans)
        monkeypatch.setattr(operations, "states_now", lambda states=states: states)
        parts = [
            tuple(each[..., end : end + rows] for each in text)
            for text, end, rows in zip(texts, ends, pieces, strict=True)
        ]
        x, time, b, c, gate = (torch.cat(each, -1) for each in zip(*parts, strict=True))
        output = scan(x, time, a, b, c, D=d, z=gate, delta_bias=bias, delta_softplus=True)
        for number, each in enumerate(output.split(list(pieces), -1)):
            found[number].append(each)
            ends[number] += pieces[number]
    assert tuple(ends) == lengths
    kept = storage.part(".state", (channels, width), torch.float32)
    for number, (text, rows) in enumerate(zip(texts, lengths, strict=True)):
        output, state = stock(text, rows)
        torch.testing.assert_close(torch.cat(found[number], -1), output, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(kept[number + 1][None], state, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kept[7][None], stock(texts[0], marked)[1], atol=2e-5, rtol=1e-4)


@needs_kernel
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("channels", "width"), [(16, 3), (208, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution(monkeypatch, dtype, channels, width, activation):
    torch.manual_seed(0)
    x = torch.randn(1, ROWS, channels + 16)[..., :channels].transpose(1, 2).to(dtype)
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
    before = torch.randn(SLOTS, channels, width - 1).to(dtype)
    found = []
    for use in (True, False):
        monkeypatch.setattr(compiled, "takes_convolution", lambda *_, use=use: use)
        states = PassStates(StateStorage(SLOTS, torch.device("cpu")), SPANS)
        monkeypatch.setattr(operations, "states_now", lambda states=states: states)
        part = states.part("columns", tuple(before.shape[1:]), dtype)
        part.copy_(before)
        with torch.inference_mode():
            found.append((operations.convolve(x, weight, bias, activation), part.clone()))
    (output, after), (expected, expected_after) = found
    torch.testing.assert_close(output, expected, atol=2e-5 if dtype == torch.float32 else 6e-2, rtol=2e-2)
    assert torch.equal(after[1:], expected_after[1:])  # columns are copied, not computed
    assert not torch.equal(after, before)


@needs_kernel
def test_every_instruction_set_gives_the_same_within_rounding():
    torch.manual_seed(0)
    query, key, value = rows_of(2, 64), rows_of(2, 64), rows_of(4, 32)
    g, beta = -torch.rand(1, ROWS, 4), torch.rand(1, ROWS, 4)
    found = []
    for name in ("portable", *(each for each in kernel.instruction_sets() if each in ("avx2", "avx512"))):
        states = PassStates(StateStorage(SLOTS, torch.device("cpu")), SPANS)
        states.part("state", (4, 64, 32), torch.float32).zero_()
        found.append(compiled.delta(states, query, key, value, g, beta, normed=True, instruction_set=name))
    for output in found[1:]:
        torch.testing.assert_close(output, found[0], atol=1e-5, rtol=1e-4)


@needs_kernel
@pytest.mark.parametrize(
    ("spans", "wrong"),
    [(((ROWS + 1, StateSpan(None, 1)),), "a piece's rows"), (((ROWS, StateSpan(SLOTS, 1)),), "a span's pieces")],
)
def test_spans_outside_of_the_tensors_are_refused(spans, wrong):
    states = PassStates(StateStorage(SLOTS, torch.device("cpu")), spans)
    query, key, value = rows_of(2, 16), rows_of(2, 16), rows_of(2, 16)
    with pytest.raises(ValueError, match=wrong):
        compiled.delta(states, query, key, value, rows_of(2), rows_of(2), normed=True)
