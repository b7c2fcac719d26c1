"""Blocks of ggml: the bits of the package `gguf` both ways, and formats like the others."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, cast

import numpy as np
import pytest
import torch

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.formats import FORMATS, GGUF, UNQUANTIZED, DamagedWeight, FormatOptions
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_checkpoints.formats.ggml_blocks import GgmlBlocks
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.mismatches import StoredTensor
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_checkpoints.weights.windows import Window, encoded_window
from mtp_kernels import weight_statistics
from mtp_kernels.quantize import Fp8Block
from mtp_kernels.quantize.array_conversions import Rows
from mtp_kernels.quantize.ggml_blocks import GGML_BLOCKS

gguf = pytest.importorskip("gguf")
quants: Any = pytest.importorskip("gguf.quants")

BLOCKS: dict[str, GgmlBlocks] = {
    name: cast(GgmlBlocks, known.of_options(FormatOptions()))
    for name, known in FORMATS.items()
    if issubclass(known, GgmlBlocks)
}
WRITTEN = [name for name, one in BLOCKS.items() if not isinstance(one, ReadOnlyFormat)]
K_QUANTS = [name for name in BLOCKS if name.endswith("_k")]
# SHA-256 of what quantize_row_q4_K_ref and its kin in libggml-base (llama-cpp-python 0.3.36) make
# of the rows of `drawn` and of `weights`.
OF_LLAMA_CPP = {
    "q4_k": "e47923543c06c6c69569b0153e2b818666c80b3c1d4255d400c7902ca5abf9ad",
    "q5_k": "0b0a5cc7814302697840fa9e6ef60d800c60b09b97d61b42f3d48fbd5b148bf6",
    "q6_k": "20fdc652483bd16e6497ecd40f4b5d9fae5f7f1f8213440523f2ee55960d4f49",
}
NAME = "model.layers.0.mlp.down_proj.weight"


def theirs(name: str) -> Any:
    return getattr(quants, name.upper())


def drawn() -> np.ndarray[Any, Any]:
    """Rows of one kind of number each: what quantizers get wrong first."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((14, 256)).astype(np.float32)
    rows[1] = 0
    rows[2] = -0.0
    rows[3] *= 1e-30  # scales that half precision rounds to 0
    rows[4] *= 3e-6  # and subnormal ones
    rows[5] = np.round(rows[5] * 8) / 8  # ties
    rows[6, 1::2] = -rows[6, ::2]  # two numbers that are as far from 0
    rows[7] = np.ldexp(np.float32(1 - 2.0**-24), random.integers(-20, 16, 256))
    rows[8] = np.abs(rows[8]) + 1
    rows[9] = -np.abs(rows[9]) - 1
    rows[10] = 1
    rows[11] *= 2.0**12
    rows[12, ::3] = 0
    rows[13] = np.ldexp(np.float32(1.0), random.integers(-3, 4, 256))
    return rows


def weights() -> np.ndarray[Any, Any]:
    """Rows of several blocks, of weights of very different sizes, and of few that are not zero."""
    random = np.random.default_rng(7)
    spread = random.standard_normal((48, 768)) * np.exp(4 * random.standard_normal((48, 768)))
    sparse = random.standard_normal((16, 768)) * (random.random((16, 768)) < 0.05)
    return np.concatenate([np.clip(spread, -1e5, 1e5), sparse]).astype(np.float32)


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_have_the_bits_of_llama_cpp(name: str) -> None:
    digest = sha256()
    for values in (drawn(), weights()):
        (blocks,), error = BLOCKS[name].quantize(torch.from_numpy(values), "minmax")
        digest.update(blocks.numpy().tobytes())
        found = BLOCKS[name].encoded((blocks,)).dequantize()
        noise = (torch.from_numpy(values).double() - found.double()).square().sum()
        assert error.error_energy == pytest.approx(float(noise), rel=1e-6)
    assert digest.hexdigest() == OF_LLAMA_CPP[name]


@pytest.mark.parametrize(
    ("name", "columns", "held_by"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 128, "q5_0"),
        ("q5_k", 320, "q5_1"),
        ("q6_k", 64, "q8_0"),
        ("q8_0", 33, "q8_0"),
    ],
)
def test_rows_that_blocks_of_256_do_not_divide(name: str, columns: int, held_by: str) -> None:
    """As tensor_type_fallback of llama-quantize has it."""
    assert BLOCKS[name].for_columns(columns).storage == held_by


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {*K_QUANTS}))
def test_blocks_have_the_bits_of_the_package(name: str) -> None:
    values = drawn()
    (blocks,), error = BLOCKS[name].quantize(torch.from_numpy(values), "minmax")
    wanted = theirs(name).quantize_rows(values)
    assert (blocks.dtype, tuple(blocks.shape)) == (torch.uint8, wanted.shape)
    assert np.array_equal(blocks.numpy(), wanted)
    found = BLOCKS[name].encoded((blocks,)).dequantize()
    assert np.array_equal(found.numpy(), theirs(name).dequantize_rows(wanted))
    noise = (torch.from_numpy(values).double() - found.double()).square().sum()
    assert error.error_energy == pytest.approx(float(noise), rel=1e-6)


@pytest.mark.parametrize("name", K_QUANTS)
def test_super_blocks_are_read_as_the_package_does(name: str) -> None:
    random = np.random.default_rng(5)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][1]
    raw = random.integers(0, 256, (6, 2 * size), np.uint8)
    blocks = raw.reshape(-1, size)
    scales = random.standard_normal((len(blocks), 2)).astype(np.float16).view(np.uint8)
    if name == "q6_k":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    found = BLOCKS[name].encoded((torch.from_numpy(raw),))
    assert found.shape == (6, 512)
    assert np.array_equal(found.dequantize().numpy(), theirs(name).dequantize_rows(raw))


@pytest.mark.parametrize("name", WRITTEN)
def test_compiled_sources_give_the_same_blocks(name: str) -> None:
    one = BLOCKS[name]
    values = torch.randn(130, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    (wanted,), error = one.quantize(values.float(), "minmax")
    made = one.quantize_rows(Rows(values.view(torch.uint16).numpy()), "minmax")
    assert made is not None and np.array_equal(made.outputs[0], wanted.numpy())
    assert made.error == error
    codes = values.float().to(torch.float8_e4m3fn)
    scale = torch.rand(2, 6, generator=torch.Generator().manual_seed(2)) + 0.1
    (wanted,), error = one.quantize(Fp8Block(codes, scale), "minmax")
    made = one.quantize_rows(Rows(codes.view(torch.uint8).numpy(), scale.numpy()), "minmax")
    assert made is not None and np.array_equal(made.outputs[0], wanted.numpy())


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_are_refused(name: str, number: float) -> None:
    values = torch.ones(2, 256)
    values[1, 40] = number
    assert BLOCKS[name].quantize_rows(Rows(values.numpy()), "minmax") is None
    with pytest.raises(ValueError, match="expected finite numbers"):
        BLOCKS[name].quantize(values, "minmax")


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"mxfp4"}))
def test_weights_whose_scale_half_precision_does_not_hold_are_refused(name: str) -> None:
    values = torch.ones(2, 256)
    values[1, 40] = -1e9
    assert BLOCKS[name].quantize_rows(Rows(values.numpy()), "minmax") is None
    with pytest.raises(ValueError, match=r"half precision holds, found magnitudes up to 1e\+09"):
        BLOCKS[name].quantize(values, "minmax")


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    one = BLOCKS[name]
    blocks = torch.full((2, one.tensors(NAME, (2, 512))[0].size_bytes // 2), 0xFF).byte()
    origin = TensorInfo(NAME, one.dtype, (2, 512), cast(Any, None), 0, 0)
    weight = one.encoded((blocks,))
    with pytest.raises(ValueError, match="expected finite scales"):
        weight.dequantize()
    with pytest.raises(DamagedWeight):
        type(weight)(one, blocks, weight.scale, origin).dequantize()
    assert weight.statistics() is weight_statistics.UNSOUND


@pytest.mark.parametrize("name", BLOCKS)
def test_a_format_of_one_tensor(name: str) -> None:
    one = BLOCKS[name]
    assert one.storage == name
    assert one.tensors(NAME, (3, 512)) == (OutputTensor(NAME, one.dtype, (3, 512)),)
    assert one.dtype == f"GGML_{name.upper()}"
    assert (one.k_divisor, one.k_unit) == (one.dtype.unit_elements, "the elements of a block")
    assert one.methods == (GGUF,)
    if name in WRITTEN:
        assert one.operation == f"quantize_{name}"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_window_has_the_numbers_of_the_whole(name: str) -> None:
    one, shape = BLOCKS[name], (5, 512)
    (blocks,), _ = one.quantize(torch.from_numpy(np.tile(drawn()[5:10], (1, 2))), "minmax")
    values = one.encoded((blocks,)).dequantize()
    size = one.k_divisor
    (layout,) = one.tensors(NAME, shape)
    info = TensorInfo(*layout, cast(Any, None), 0, 0)
    spec = TensorSpec(NAME, shape, (DType.BF16,), Role.DENSE_MLP)
    stored = StoredWeight(spec, one, (StoredTensor(NAME, shape, (one.dtype,)),))
    block_bytes = one.tensors(NAME, (1, size))[0].size_bytes

    def read(tensor: TensorInfo, rows: range, columns: range | None) -> torch.Tensor:
        assert columns is not None and columns.start % size == 0 == columns.stop % size
        at = slice(columns.start // size * block_bytes, columns.stop // size * block_bytes)
        return blocks[rows.start : rows.stop, at]

    for rows, columns in ((range(1, 3), range(32, 96)), (range(5), range(40, 50))):
        found = encoded_window(WeightOnDisk(stored, (info,)), Window(rows, columns), read)
        part = found.encoded.dequantize()
        inside = part[
            found.window.rows.start : found.window.rows.stop,
            found.window.columns.start : found.window.columns.stop,
        ]
        assert torch.equal(inside, values[rows.start : rows.stop][:, columns.start : columns.stop])


def test_a_config_names_formats_by_module() -> None:
    config = quant_config_of({"quant_method": GGUF, "formats": {"a.b": "q8_0"}})
    assert config.format_of("a.b", Role.EMBEDDING) == BLOCKS["q8_0"]
    assert config.format_of("a.c", Role.ATTENTION) is None
    assert not config.loads_together
    assert quant_config_of(None).loads_together
    with pytest.raises(UnsupportedError, match=r"format of a\.b that no GGUF file has"):
        quant_config_of({"quant_method": GGUF, "formats": {"a.b": "int4_group"}})
    for damaged in ([], {"a": 1}):
        with pytest.raises(InvalidInputError, match=r"usable quantization_config\.formats"):
            quant_config_of({"quant_method": GGUF, "formats": damaged})


def test_values_that_were_read_of_blocks() -> None:
    one, values = FORMATS["decoded_blocks"](), torch.ones(2, 3)
    assert one.tensors(NAME, (2, 3)) == (OutputTensor(NAME, DType.F32, (2, 3)),)
    assert torch.equal(one.encoded((values,)).dequantize(), values)
    assert one.methods == (GGUF,) and one.gate == BLOCKS["q4_0"].gate
    with pytest.raises(AssertionError, match="no scales"):
        one.decode(values, values, torch.float32)


def test_unquantized_weights_have_no_scale_beside_them() -> None:
    weight = UNQUANTIZED.encoded((torch.ones(2, 2),))
    assert weight.scale is None and weight.scale_apart is None
    assert BLOCKS["q8_0"].encoded((torch.zeros(2, 34).byte(),)).scale_apart is None


# Bytes of blocks at which numbers in half precision begin.
HALVES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q6_k": (208,),
    "mxfp4": (),
}


@pytest.mark.parametrize("name", HALVES)
def test_rows_of_codes_have_the_values_of_blocks(name: str) -> None:
    """Whatever the bytes of the codes are, and scales that are subnormal, negative or 0."""
    form, random, block = BLOCKS[name], np.random.default_rng(5), GGML_BLOCKS[name]
    blocks = random.integers(0, 256, (64, 6, block.bytes), np.uint8)
    for at in HALVES[name]:
        scales = random.standard_normal((64, 6)).astype(np.float16)
        scales[:4, 0] = [0, 6e-8, -6e-8, 65504]
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    bad = np.array([np.nan], np.float16).view(np.uint8)
    if name == "mxfp4":  # exponents: one that a subnormal number has, and those of weights
        blocks[..., 0], bad = random.integers(100, 130, (64, 6)), np.array([255], np.uint8)
        blocks[:4, 0, 0] = [0, 1, 2, 250]
    packed = blocks.reshape(64, -1)
    kind = gguf.GGMLQuantizationType[name.upper()]
    rows = form.row_codes(torch.from_numpy(packed), torch.empty(64, 0))
    assert (rows.group, rows.columns) == (form.group_columns, 6 * block.elements)
    found, expected = rows.values().numpy(), quants.dequantize(packed, kind)
    if rows.minimum is None:
        assert np.array_equal(found, expected)
    else:
        largest = np.abs(expected).reshape(64, -1, 32).max(axis=-1, keepdims=True)
        error = np.abs(found - expected).reshape(64, -1, 32)
        assert (error <= 1e-6 * largest).all()
    info = TensorInfo(NAME, form.dtype, (64, rows.columns), cast(Any, None), 0, packed.size)
    assert form.row_bytes([info], 64) == rows.codes.nbytes + rows.of_groups.nbytes
    (at, *_) = HALVES[name] or (0,)
    blocks[7, 3, at : at + bad.size] = bad
    with pytest.raises(ValueError, match=f"{name}: expected finite scales"):
        form.row_codes(torch.from_numpy(packed), torch.empty(64, 0))
