"""Windows of stored weights in every format: the numbers of the whole, and no other bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cases import WRITTEN
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import dtype_name
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.formats import (
    FORMATS,
    AutoRoundInt8,
    AwqInt4,
    FormatOptions,
    Fp8Tensor,
    GptqInt4,
    GptqInt8,
    Int4ZeroPoints,
    Int8ZeroPoints,
    WeightFormat,
)
from mtp_checkpoints.quantization.mismatches import StoredTensor
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_checkpoints.weights.windows import Window, encoded_window
from mtp_runtime.layers.linear import Windowed
from quantized_by_others import GROUP, METHODS, asymmetric

ROWS, COLUMNS = 320, 384
MODULE = "model.layers.1.mlp.experts.0.up_proj"
WINDOWS = [
    (range(160), range(COLUMNS)),
    (range(160, 320), range(COLUMNS)),
    (range(35, 77), range(COLUMNS)),
    (range(ROWS), range(128, 256)),
    (range(ROWS), range(40, 104)),
    (range(200, 320), range(200, 384)),
]


@dataclass
class Memory:
    """Tensors by name, and the elements that were read of each."""

    tensors: dict[str, torch.Tensor]
    read: dict[str, int] = field(default_factory=dict)

    def __call__(self, info: TensorInfo, rows: range, columns: range | None) -> torch.Tensor:
        found = self.tensors[info.name]
        if found.dim():
            found = found[rows.start : rows.stop]
        if columns is not None:
            found = found[:, columns.start : columns.stop]
        self.read[info.name] = found.numel()
        return found.clone()


def quantized(name: str) -> tuple[WeightFormat, Sequence[torch.Tensor]]:
    """A format, and random numbers in it."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(ROWS, COLUMNS, generator=generator)
    if name == "fp8 tensor":
        codes = values.to(torch.float8_e4m3fn)
        return Fp8Tensor(), (codes, torch.tensor(0.5), torch.tensor(1.0))
    chosen = FORMATS[name].of_options(FormatOptions(group_size=64))
    tensors, _ = chosen.quantize(values, "minmax")
    constants = map(torch.as_tensor, chosen.constants((ROWS, COLUMNS)))
    return chosen, (*tensors, *constants)


def on_disk(
    chosen: WeightFormat, tensors: Sequence[torch.Tensor], *, transposed: bool
) -> tuple[WeightOnDisk, Memory]:
    shape = (ROWS, COLUMNS)
    spec = TensorSpec(f"{MODULE}.weight", shape, ("BF16",), Role.ROUTED_EXPERT)
    layout = chosen.tensors(spec.name, shape)
    turned = [t.t().contiguous() if transposed and t.dim() == 2 else t for t in tensors]
    memory = Memory({out.name: t for out, t in zip(layout, turned, strict=True)})
    infos = tuple(
        TensorInfo(out.name, dtype_name(t.dtype), tuple(t.shape), cast(Any, None), 0, t.nbytes)
        for out, t in zip(layout, turned, strict=True)
    )
    stored = tuple(StoredTensor(info.name, info.shape, (info.dtype,)) for info in infos)
    return WeightOnDisk(StoredWeight(spec, chosen, stored, transposed), infos), memory


@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("name", [*WRITTEN, "fp8 tensor"])
def test_a_window_has_the_numbers_of_the_whole(name: str, transposed: bool) -> None:
    chosen, tensors = quantized(name)
    weight, memory = on_disk(chosen, tensors, transposed=transposed)
    shape = (ROWS, COLUMNS)
    whole = encoded_window(weight, Window.of(shape), memory).encoded
    values = whole.dequantize(torch.float32)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(5))
    for rows, columns in WINDOWS:
        window = Window(rows, columns)
        part = Windowed.of(encoded_window(weight, window, memory))
        assert tuple(part.shape) == window.shape
        wanted = values[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(part.dequantize(torch.float32), wanted)
        own = x[:, columns.start : columns.stop]
        torch.testing.assert_close(part.product(own), own @ wanted.t(), rtol=1e-4, atol=1e-3)
        codes = weight.name
        assert memory.read[codes] * chosen.elements_per_code == len(rows) * len(columns), window


WORDS: dict[str, WeightFormat] = {
    "awq": AwqInt4(GROUP),
    "gptq": GptqInt4(GROUP),
    "gptq, permuted": GptqInt4(GROUP, permuted=True),
    "gptq v2": GptqInt4(GROUP, zeros_less_one=False),
    "gptq, 8 bits": GptqInt8(GROUP),
    "auto-round, 8 bits": AutoRoundInt8(GROUP),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_window_of_words_that_run_across(name: str) -> None:
    """Whole words and groups around the window are read, and nothing else of the codes."""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8))
    stored, expected = METHODS[name].encode(values)
    layout = WORDS[name].tensors(f"{MODULE}.weight", (ROWS, COLUMNS))
    tensors = [stored[out.name.rpartition(".")[2]].contiguous() for out in layout]
    weight, memory = on_disk(WORDS[name], tensors, transposed=False)
    for rows, columns in (*WINDOWS, (range(3, 5), range(70, 75))):
        part = Windowed.of(encoded_window(weight, Window(rows, columns), memory))
        wanted = expected[rows.start : rows.stop, columns.start : columns.stop]
        torch.testing.assert_close(part.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-9)
        unit = WORDS[name].word_rows
        assert memory.read[weight.name] * unit == widened(rows, unit) * widened(columns, GROUP)


@pytest.mark.parametrize("name", WORDS)
def test_words_as_the_decoder_packs_them(name: str) -> None:
    """But for groups that are permuted, of which each column has its own scale."""
    form = WORDS[name]
    assert form.has_row_codes == (not isinstance(form, GptqInt4) or not form.permuted)
    if not form.has_row_codes:
        return
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8))
    stored, expected = METHODS[name].encode(values)
    layout = form.tensors(f"{MODULE}.weight", (ROWS, COLUMNS))
    tensors = [stored[out.name.rpartition(".")[2]].contiguous() for out in layout]
    weight, memory = on_disk(form, tensors, transposed=False)
    encoded = encoded_window(weight, Window.of((ROWS, COLUMNS)), memory).encoded
    assert encoded.scale is not None
    rows = form.row_codes(encoded.codes, encoded.scale)
    torch.testing.assert_close(rows.values(), expected, rtol=1e-6, atol=1e-6)
    held = rows.codes.nbytes + rows.of_groups.nbytes
    assert form.row_bytes(weight.tensors, ROWS) == held
    with pytest.raises(ValueError, match="group scale: expected finite numbers"):
        form.row_codes(encoded.codes, encoded.scale * torch.nan)


@pytest.mark.parametrize("form", [Int4ZeroPoints(GROUP), Int8ZeroPoints(-1)])
def test_a_window_of_words_with_zero_points(form: Int4ZeroPoints) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9)) + 0.3
    group, middle = (COLUMNS if form.group_size == -1 else GROUP), 1 << (form.bits - 1)
    codes, scale, zero = asymmetric(values, group, form.bits)
    wide = [one.repeat_interleave(group, 1) for one in (zero, scale)]
    expected = (codes - wide[0]).float() * wide[1]
    signed = [(one - middle).to(torch.int8) for one in (codes, zero)]
    tensors = [
        pack_to_int32(signed[0], form.bits),
        scale,
        torch.tensor([ROWS, COLUMNS]),
        pack_to_int32(signed[1], form.bits, packed_dim=0),
    ]
    weight, memory = on_disk(form, tensors, transposed=False)
    for rows, columns in (*WINDOWS, (range(3, 5), range(70, 75))):
        part = Windowed.of(encoded_window(weight, Window(rows, columns), memory))
        wanted = expected[rows.start : rows.stop, columns.start : columns.stop]
        torch.testing.assert_close(part.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-9)


def widened(part: range, unit: int) -> int:
    return (-(-part.stop // unit) - part.start // unit) * unit


def test_products_of_rows_have_the_bits_of_the_whole() -> None:
    chosen, tensors = quantized("fp8_block")
    weight, memory = on_disk(chosen, tensors, transposed=False)
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(6))
    whole = encoded_window(weight, Window.of((ROWS, COLUMNS)), memory).encoded.product(x)
    rows = range(35, 77)
    part = Windowed.of(encoded_window(weight, Window(rows, range(COLUMNS)), memory))
    assert torch.equal(part.product(x), whole[:, 35:77])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_and_columns_of_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    from mtp_checkpoints.containers.safetensors_header import read_header

    matrix = torch.randn(20, 24, generator=torch.Generator().manual_seed(7)).to(dtype)
    save_file({"before": torch.zeros(3), "matrix": matrix}, tmp_path / "model.safetensors")
    header = read_header(LocalFolder(tmp_path).file("model.safetensors"))
    (info,) = (tensor for tensor in header.tensors if tensor.name == "matrix")
    with TensorReader(info) as reader:
        for rows, columns in [(range(20), range(24)), (range(3, 9), range(5, 17))]:
            found = reader.window(rows, columns)
            wanted = matrix[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(found.float(), wanted.float())
