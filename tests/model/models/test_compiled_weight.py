"""The compiled layers of 4 and 8 bits, in every version that runs here, against plain sums in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.models.compiled_weight import CompiledWeight, can_compile, padded
from inlay.models.formats.stored import GROUP
from tests.generated import examples
from tests.threads import computing

VERSIONS = [
    name
    for name in ("avx512vnni", "avx2", "portable")
    if hasattr(kernel, "quantized_supported") and kernel.quantized_supported(name)
]
pytestmark = pytest.mark.skipif(not VERSIONS, reason="installed without the compiled kernel")
DTYPES = (torch.float32, torch.bfloat16)
MOST = {4: 127, 8: 32767}  # the largest input of a group after rounding, by the bits of the weights
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # of sums, and of how outputs are rounded


def weight4(
    outputs: int, groups: int, grid: torch.dtype, *, zeros: bool, version: str, step: int = 16
) -> tuple[CompiledWeight, Tensor]:
    """A weight, built in blocks of so many outputs, and its value in double."""
    numbers = torch.randint(16, (outputs, groups * GROUP), dtype=torch.uint8)
    scales = (torch.rand(outputs, groups) + 0.1).to(grid)
    means = torch.randn(outputs, groups).to(grid) if zeros else torch.zeros(outputs, groups)
    made = CompiledWeight(outputs, groups * GROUP, 4, grid, zeros=zeros, instruction_set=version)
    for at in range(0, outputs, step):
        made.put(at, numbers[at : at + step], scales[at : at + step], means[at : at + step])
    by_group = (numbers.double().unflatten(1, (groups, GROUP)) - 8) * scales.double()[..., None]
    return made, (by_group + means.double()[..., None]).flatten(1)


def weight8(outputs: int, inputs: int, version: str, *, grouped: bool = False) -> tuple[CompiledWeight, Tensor]:
    numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs, inputs // GROUP if grouped else 1) + 0.1
    grid = torch.float32 if grouped else None
    made = CompiledWeight(outputs, inputs, 8, grid, zeros=False, instruction_set=version)
    made.put(0, numbers, scales)
    return made, numbers.double() * scales.double().repeat_interleave(inputs // scales.shape[1], 1)


def check(made: CompiledWeight, truth: Tensor, x: Tensor, bias: Tensor | None) -> None:
    found = made.linear(x, padded(bias))
    expected = x.double() @ truth.T + (0 if bias is None else bias.double())
    groups = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    half_steps = groups.amax(2, keepdim=True).expand_as(groups).flatten(1)[:, : x.shape[1]] / MOST[made.bits] / 2
    bound = (half_steps + UNIT[x.dtype] * x.double().abs()) @ truth.T.abs() + UNIT[x.dtype] * expected.abs()
    assert found.shape == expected.shape
    assert found.dtype == x.dtype
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(1, 100), st.integers(1, 4), st.integers(0, 30), st.booleans(), st.booleans(), st.sampled_from(DTYPES),
    st.sampled_from(DTYPES), st.integers(1, 3),
)  # fmt: skip
def test_4_bits(version, outputs, groups, rows, zeros, biased, grid, dtype, threads):
    torch.manual_seed(outputs * 100 + rows)
    made, truth = weight4(outputs, groups, grid, zeros=zeros, version=version, step=48)
    with computing(threads):
        check(made, truth, torch.randn(rows, groups * GROUP).to(dtype), torch.randn(outputs) if biased else None)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 100), st.integers(1, 140), st.integers(0, 30), st.booleans(), st.sampled_from(DTYPES))
def test_8_bits(version, outputs, inputs, rows, biased, dtype):
    torch.manual_seed(outputs * 100 + rows)
    made, truth = weight8(outputs, inputs, version)
    x = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]  # rows that lie apart
    check(made, truth, x, torch.randn(outputs) if biased else None)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 100), st.integers(1, 5), st.integers(0, 30), st.booleans(), st.sampled_from(DTYPES))
def test_8_bits_with_a_scale_for_each_group(version, outputs, groups, rows, biased, dtype):
    torch.manual_seed(outputs * 100 + rows)
    made, truth = weight8(outputs, groups * GROUP, version, grouped=True)
    check(made, truth, torch.randn(rows, groups * GROUP).to(dtype), torch.randn(outputs) if biased else None)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [80, 6000])  # a batch of the second one is worth two threads
def test_row_has_the_same_bits_alone_and_in_a_batch(version, dtype, outputs):
    weights = (
        weight4(outputs, 5, dtype, zeros=True, version=version),
        *(weight8(outputs, 160, version, grouped=grouped) for grouped in (False, True)),
    )
    for made, _ in weights:
        x = torch.randn(37, 160).to(dtype)
        alone = torch.cat([made.linear(row[None]) for row in x])
        for rows in (2, 3, 4, 5, 12, 13, 37):
            with computing(2):
                assert torch.equal(made.linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("version", VERSIONS)
def test_each_group_of_inputs_is_rounded_separately(version):
    """One that is a million times larger than those of other groups takes nothing from them."""
    made, truth = weight4(32, 3, torch.float32, zeros=True, version=version)
    for sizes in ((1e6, 1.0, 1e-6), (0.0, 1e-25, 1.0), (1e30, 1e-20, 0.0)):
        x = torch.randn(1, 3, GROUP) * torch.tensor(sizes)[None, :, None]
        check(made, truth, x.flatten(1), None)
        each = [torch.zeros_like(x) for _ in range(3)]
        for group, alone in enumerate(each):
            alone[:, group] = x[:, group]
            check(made, truth, alone.flatten(1), None)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_invalid_row_becomes_nan_and_spares_other_rows(version, broken):
    for made in (weight4(16, 2, torch.float32, zeros=True, version=version)[0], weight8(16, 64, version)[0]):
        x = torch.randn(3, 64)
        whole = made.linear(x)
        x[1, 40] = broken
        found = made.linear(x)
        assert found[1].isnan().all()
        assert torch.equal(found[::2], whole[::2])


@pytest.mark.parametrize("x", [torch.ones(2, 64).half(), torch.ones(2, 63), torch.ones(64)])
def test_other_inputs_are_refused(x):
    """The kernel gets an address: another dtype or width would be read as if it were right."""
    with pytest.raises(ValueError, match="a layer of 64 inputs got"):
        weight8(16, 64, VERSIONS[0])[0].linear(x)


def test_scales_without_zeros_take_half_a_bit_less():
    each = [
        CompiledWeight(160, 320, 4, torch.bfloat16, zeros=zeros).nbytes * 8 / (160 * 320) for zeros in (True, False)
    ]
    assert each == [5.0, 4.5]


def test_unsupported_dtype_and_instruction_set_are_rejected():
    assert not can_compile(torch.float64)
    with pytest.raises(ValueError, match="no quantized layer for the instruction set 'mmx'"):
        weight8(16, 32, "mmx")[0].linear(torch.ones(1, 32))
