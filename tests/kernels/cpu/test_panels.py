"""Products with packed panels of every kind against float64, and bits that no other row changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mtp_kernels import decoder, quantize
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.panel_forms import (
    BF16,
    E2M1,
    FP8,
    INT4,
    INT8,
    PANEL,
    Panel,
    group_of,
    kind_of,
    panel_bytes,
    takes_codes,
)
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.passes import Projection
from mtp_kernels.quantize.block_floats import E2M1 as E2M1_NUMBERS
from mtp_kernels.quantize.block_floats import dequantize_e2m1, pack_pairs
from mtp_kernels.quantize.layouts import Fp8Channel, QuantizedWeight, W4AFp8
from mtp_kernels.quantize.row_codes import RowCodes, integer_rows, row_codes
from mtp_kernels.stored_linear import dequantize

DEPTH, OUTPUTS = 384, 70  # of which the last panel is filled in part


def values(outputs: int = OUTPUTS, depth: int = DEPTH) -> torch.Tensor:
    return torch.randn(outputs, depth, generator=torch.Generator().manual_seed(outputs))


def fp8_channel(source: torch.Tensor) -> Fp8Channel:
    scale = source.abs().amax(dim=1, keepdim=True) / 448
    return Fp8Channel((source / scale).to(torch.float8_e4m3fn), scale)


def w4afp8(source: torch.Tensor) -> W4AFp8:
    pairs = torch.randint(-128, 128, (len(source), source.shape[1] // 2), dtype=torch.int8)
    return W4AFp8(pairs, torch.rand(len(source), source.shape[1] // 128) + 0.1)


# What makes a stored weight of values, its kind and the rows that share a scale.
STORED: dict[str, tuple[Callable[[torch.Tensor], QuantizedWeight], int, int]] = {
    "fp8_block": (lambda w: quantize.quantize_fp8_block(w)[0], FP8, 128),
    "fp8_channel": (fp8_channel, FP8, DEPTH),
    "int8_channel": (lambda w: quantize.quantize_int8_channel(w)[0], INT8, DEPTH),
    "int4_group_32": (lambda w: quantize.quantize_int4_group(w, group_size=32)[0], INT4, 32),
    "int4_group_128": (lambda w: quantize.quantize_int4_group(w, group_size=128)[0], INT4, 128),
    "w4afp8": (w4afp8, INT4, 128),
}


class Stored:
    """A matrix whose rows come in pieces."""

    def __init__(self, *pieces: decoder.Piece) -> None:
        self._pieces = pieces

    @property
    def shape(self) -> tuple[int, ...]:
        first = self._pieces[0]
        columns = first.columns if isinstance(first, RowCodes) else first.shape[1]
        return sum(map(len, self._pieces)), columns

    def pieces(self):  # type: ignore[no-untyped-def]
        return iter(self._pieces)


def packed(matrix: decoder.Matrix) -> Projection:
    return Projection.packed(matrix, Packer(Arena(), torch.float32))


def error_of(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = x.double() @ weight.double().T
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", STORED)
def test_codes_are_multiplied_as_they_are_stored(name: str) -> None:
    make, kind, group = STORED[name]
    weight = make(values())
    codes, dense = row_codes(weight), dequantize(weight, torch.float32)
    assert torch.allclose(codes.values(), dense, rtol=1e-6, atol=0)
    multiplies(codes, dense, (kind, group))


@pytest.mark.parametrize("group", [16, 32])
def test_e2m1_codes_are_multiplied_as_they_are_stored(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 256, (OUTPUTS, DEPTH // 2), generator=generator, dtype=torch.uint8)
    scale = torch.rand(OUTPUTS, DEPTH // group, generator=generator) + 0.1
    rows = RowCodes(codes, scale, group)
    dense = dequantize_e2m1(codes, scale)
    assert torch.equal(rows.values(), dense)
    multiplies(rows, dense, (E2M1, group))


@pytest.mark.parametrize(
    ("bits", "group", "kind"), [(4, 32, INT4), (4, DEPTH, INT4), (8, 128, INT8)]
)
def test_codes_above_minimums_are_multiplied_as_they_are_stored(
    bits: int, group: int, kind: int
) -> None:
    """Numbers far from 0, all of one sign in some groups; activations of int8 take none of them."""
    generator = torch.Generator().manual_seed(group)
    numbers = torch.randint(0, 1 << bits, (OUTPUTS, DEPTH), generator=generator)
    numbers -= (
        torch.randint(0, 1 << bits, (OUTPUTS, DEPTH // group), generator=generator)[..., None]
        .expand(-1, -1, group)
        .flatten(1)
    )
    scale = torch.rand(OUTPUTS, DEPTH // group, generator=generator) + 0.1
    dense = numbers * scale.repeat_interleave(group, dim=1)
    rows = integer_rows(numbers.to(torch.int16), scale, bits)
    assert torch.allclose(rows.values(), dense, rtol=1e-5, atol=1e-4)
    multiplies(rows, dense, (kind, group))
    packer = Packer(Arena(), torch.float32, torch.int8)
    assert not takes_codes(Projection.packed(Stored(rows), packer).first_panel.form)
    with pytest.raises(ValueError, match="group scale: expected finite numbers"):
        integer_rows(numbers, scale * torch.inf, bits)


def multiplies(codes: RowCodes, dense: torch.Tensor, kind_and_group: tuple[int, int]) -> None:
    """Check the form, the error, and that a row's bits depend on no other row."""
    projection = packed(Stored(codes[:5], codes[5:33], codes[33:]))
    form = projection.first_panel.form
    assert (kind_of(form), group_of(form)) == kind_and_group
    x = torch.randn(27, DEPTH, generator=torch.Generator().manual_seed(1))
    whole = projection(x)  # more rows than read codes without expanding them first
    assert error_of(whole, x, dense) < 1e-6
    for count in (*range(1, 13), 16, 17):
        assert torch.equal(projection(x[:count]), whole[:count])


def test_every_e4m3_code_has_its_value() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F]
    codes = numbers.view(torch.float8_e4m3fn).repeat(4).reshape(2, -1)
    projection = packed(Stored(RowCodes(codes, torch.ones(2, 1), codes.shape[1])))
    found = projection(1e-6 * torch.eye(codes.shape[1]))
    assert torch.equal(found.T, 1e-6 * codes.float())


def test_every_byte_and_nibble_has_its_value() -> None:
    bytes_ = torch.arange(-128, 128).to(torch.int8).reshape(1, -1)
    nibbles = torch.arange(-8, 8).repeat(16)
    words = sum((nibbles.reshape(1, -1, 8)[..., at] & 15) << 4 * at for at in range(8))
    assert isinstance(words, torch.Tensor)
    signed = torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))
    e2m1 = torch.tensor([*E2M1_NUMBERS, *(-number for number in E2M1_NUMBERS)]).repeat(16)
    pairs = pack_pairs(torch.arange(16, dtype=torch.uint8).repeat(16).reshape(1, -1))
    for codes, expected in ((bytes_, bytes_[0]), (signed, nibbles), (pairs, e2m1)):
        projection = packed(Stored(RowCodes(codes, torch.full((1, 1), 0.5), 256)))
        assert torch.equal(projection(torch.eye(256))[:, 0], expected / 2)


def test_bf16_stays_bf16_without_a_changed_bit() -> None:
    weight = values().bfloat16()
    kept, expanded = packed(Stored(weight[:40], weight[40:])), packed(weight.float())
    assert kind_of(kept.first_panel.form) == BF16
    x = values(9)
    assert torch.equal(kept(x), expanded(x))


@pytest.mark.parametrize("depth", [36, 130])
def test_depths_that_no_step_divides_become_dense(depth: int) -> None:
    weight = values(depth=depth)
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = RowCodes((weight / scale).to(torch.float8_e4m3fn), scale, depth)
    projection = packed(Stored(codes))
    x = values(3, depth)
    assert (kind_of(projection.first_panel.form) == FP8) == (depth % 4 == 0)
    assert error_of(projection(x), x, codes.values()) < 1e-6


def test_groups_that_end_with_the_rows() -> None:
    weight = quantize.quantize_fp8_block(values(depth=200))[0]
    x = values(4, 200)
    assert (
        error_of(packed(Stored(row_codes(weight)))(x), x, dequantize(weight, torch.float32)) < 1e-6
    )


def test_rows_in_several_forms_are_refused() -> None:
    forms = [
        row_codes(quantize.quantize_int4_group(values(), group_size=group)[0]) for group in (32, 64)
    ]
    with pytest.raises(ValueError, match="rows in one form"):
        packed(Stored(*forms))


def test_codes_take_the_bytes_that_they_have() -> None:
    weight = quantize.quantize_int4_group(values(2 * PANEL), group_size=128)[0]
    form = packed(Stored(row_codes(weight))).first_panel.form
    scales = 2 * weight.scale.nbytes  # float32, from bf16
    assert 2 * panel_bytes(form, DEPTH) == weight.packed.nbytes + scales


@pytest.mark.parametrize("damaged", ["nan", "scale"])
def test_damaged_codes_are_refused(damaged: str) -> None:
    weight = fp8_channel(values())
    if damaged == "nan":
        weight.codes.view(torch.uint8)[3, 5] = 0xFF
    else:
        weight.scale[2] = float("nan")
    with pytest.raises(ValueError, match="row 3, column 5|finite numbers above 0"):
        row_codes(weight)


class StoredStack(Stored):
    """Two matrices [80, in] whose rows come in pieces."""

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, 80, super().shape[1]


def test_each_matrix_of_a_stack_has_its_own_form() -> None:
    """As routed experts in int4 beside a shared one in bf16; pieces may cross from gate to up."""
    first = row_codes(quantize.quantize_int4_group(values(80), group_size=32)[0])
    second = values(80).bfloat16()
    stack = Packer(Arena(), torch.float32).stack(
        StoredStack(first[:50], first[50:], second[:30], second[30:]), parts=2
    )
    (int4, form), (bf16, plain) = stack.table.tolist()
    assert (kind_of(form), kind_of(plain)) == (INT4, BF16)
    x = values(3)
    for at, kept, dense in ((int4, form, first.values()), (bf16, plain, second.float())):
        for part in range(2):
            panel = Panel(at + part * panel_bytes(kept, DEPTH), DEPTH, kept)
            found = Projection(PANEL, panel)(x)
            assert error_of(found, x, dense[40 * part : 40 * part + PANEL]) < 1e-6
    with pytest.raises(ValueError, match="found more"):
        Packer(Arena(), torch.float32).stack(StoredStack(first, second, second[:2]), parts=2)
