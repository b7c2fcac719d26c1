"""Every row of the precision table, from fp8 and bf16, from a checkpoint and from a bundle: tensor
by tensor what must be on disk, decoded by loaders that we did not write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import generate_gparam

from cases import export, make_checkpoint, nightly_but, quantize, read_json, read_tensors
from mtp_checkpoints.formats import FORMATS
from mtp_kernels.quantize import (
    Fp8Block,
    Int4Group,
    Int8Channel,
    dequantize_fp8_block,
    dequantize_int4_group,
    dequantize_int8_channel,
)
from quantize_rows import (
    CONFIGS,
    FORMS,
    HEADS,
    INPUT_SCALES,
    MTP_PREFIX,
    ROWS,
    Part,
    linears,
)

Tensors = dict[str, torch.Tensor]
JOINED = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
DTYPES |= {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8}


@pytest.fixture(scope="module")
def source_bundles(
    row_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Bundles that were exported from the sources."""
    folder = tmp_path_factory.mktemp("exported")
    for kind, source in row_sources.items():
        assert export(source, folder / kind).code == 0
    return {kind: folder / kind for kind in row_sources}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def exact(source: Tensors, module: str) -> torch.Tensor:
    """The fp32 weights that a source stores, tile by tile."""
    weights = source[f"{module}.weight"].float()
    scale = source.get(f"{module}.weight_scale_inv")
    if scale is None:
        return weights
    wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weights * wide[: weights.shape[0], : weights.shape[1]]


def unpacked_w4afp8(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Unpack by the layout's definition: low nibble even k, high nibble odd k, two's complement."""
    rows, half = packed.shape
    codes = torch.zeros(rows, 2 * half)
    for k in range(2 * half):
        nibble = (packed[:, k // 2].int() >> (4 * (k % 2))) & 0xF
        codes[:, k] = torch.where(nibble >= 8, nibble - 16, nibble).float()
    for group in range(scale.shape[1]):
        codes[:, 128 * group : 128 * (group + 1)] *= scale[:, group : group + 1]
    return codes


def scheme_of(config: dict[str, Any], bits: int) -> QuantizationScheme:
    """The groups of a config that describe packed integers of a number of bits, which are alike."""
    groups = QuantizationConfig.model_validate(config).config_groups.values()
    found = [g for g in groups if (g.weights.type, g.weights.num_bits) == ("int", bits)]
    assert all(group.weights == found[0].weights for group in found)
    return found[0]


def check_packed(
    stored: Tensors, module: str, weights: torch.Tensor, bits: int, config: dict[str, Any]
) -> None:
    """compressed-tensors reads our tensors as we do, and would pack the same codes."""
    scheme = scheme_of(config, bits)
    names = ("weight_packed", "weight_scale", "weight_shape")
    state = {name: stored[f"{module}.{name}"] for name in names}
    assert state["weight_shape"].tolist() == list(weights.shape)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    theirs = compressor.decompress(dict(state), scheme)["weight"]
    packed, scale = state["weight_packed"], state["weight_scale"]
    if bits == 4:
        ours = dequantize_int4_group(Int4Group(packed, scale))
        ours_exact = dequantize_int4_group(Int4Group(packed, scale), torch.float32)
    else:
        ours = dequantize_int8_channel(Int8Channel(packed, scale))
        ours_exact = dequantize_int8_channel(Int8Channel(packed, scale), torch.float32)
    assert same_bytes(ours, theirs), module
    again = compressor.compress({"weight": ours_exact, "weight_scale": scale.float()}, scheme)
    assert torch.equal(again["weight_packed"], packed), module
    check_error(weights, ours_exact, scale.float(), {4: 7.5, 8: 127.5}[bits], module)


def check_error(
    weights: torch.Tensor,
    restored: torch.Tensor,
    scale: torch.Tensor,
    limit: float,
    module: str,
) -> None:
    """No element is further off than half a step, or than what a smaller scale clips."""
    steps = scale.repeat_interleave(weights.shape[1] // scale.shape[1], 1)
    clipped = (weights.abs() - limit * steps).clamp(min=0)
    assert ((weights - restored).abs() <= steps * 0.501 + clipped).all(), module


def check_linear(
    form: str, stored: Tensors, source: Tensors, module: str, config: dict[str, Any] | None
) -> set[str]:
    """Check one linear; returns the names of its tensors."""
    names = {f"{module}.{part}": dtype for part, dtype in FORMS[form].items()}
    for name, dtype in names.items():
        assert stored[name].dtype is DTYPES[dtype], name
    weights = exact(source, module)
    if form in ("int4", "int8"):
        assert config is not None
        check_packed(stored, module, weights, int(form[-1]), config)
    elif form.startswith("mx"):
        made = FORMATS["mxfp8" if form == "mxfp8" else "mxfp4_packed"]()
        wanted, _ = made.quantize(weights, "minmax")
        for own, name in zip(wanted, names, strict=True):
            assert same_bytes(stored[name], own), name
    elif form.startswith("nvfp4"):
        check_nvfp4({name: stored[f"{module}.{name}"] for name in FORMS[form]}, source, module)
    elif form == "w4afp8":
        scale = stored[f"{module}.weight_scale_inv"]
        restored = unpacked_w4afp8(stored[f"{module}.weight"], scale)
        check_error(weights, restored, scale, 7.5, module)
        parent, _, projection = module.rpartition(".")
        name = f"{parent}.{INPUT_SCALES[projection]}.input_scale"
        assert stored[name].tolist() == [1.0]
        return {*names, name}
    elif form == "bf16":
        assert same_bytes(stored[f"{module}.weight"], weights.to(torch.bfloat16)), module
    else:
        check_fp8(*(stored[name] for name in names), source, module, weights)
    return set(names)


def check_nvfp4(state: Tensors, source: Tensors, module: str) -> None:
    """The number of the matrix is that of all linears that engines join, and the codes are those
    that compressed-tensors packs under our scales, in ModelOpt's layout too."""
    if "weight" in state:
        inverse = 1 / state["weight_scale_2"].reshape(1)
        state |= {"weight_packed": state["weight"], "weight_global_scale": inverse}
    for name in ("input_scale", "input_global_scale"):
        assert state.get(name, torch.ones(1)).tolist() in (1.0, [1.0])
    parent, _, last = module.rpartition(".")
    joined = next((parts for parts in JOINED if last in parts), (last,))
    amax = max(exact(source, f"{parent}.{part}").abs().max() for part in joined)
    found, wanted = state["weight_global_scale"], generate_gparam(-amax, amax)
    torch.testing.assert_close(found, wanted, rtol=2e-7 if "weight" in state else 0, atol=0)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    weights = exact(source, module)
    scale = state["weight_scale"].float()
    given = {"weight": weights, "weight_scale": scale, "weight_global_scale": wanted}
    packed = compressor.compress(given, scheme)
    assert torch.equal(packed["weight_packed"], state["weight_packed"]), module


def check_fp8(
    codes: torch.Tensor, scale: torch.Tensor, source: Tensors, module: str, weights: torch.Tensor
) -> None:
    if f"{module}.weight_scale_inv" in source:  # native: byte for byte
        assert same_bytes(codes, source[f"{module}.weight"]), module
        assert same_bytes(scale, source[f"{module}.weight_scale_inv"]), module
        return
    restored, _ = dequantize_fp8_block(Fp8Block(codes, scale), torch.float32)
    assert ((weights - restored).abs() <= weights.abs() / 16 + scale.max() * 2**-10).all(), module


def check_part(folder: Path, part: Part, head: str, source: Tensors) -> None:
    """Every tensor of a folder: the linears and the head in their forms, all else as it was."""
    stored = read_tensors(folder)
    config = read_json(folder / "config.json").get("quantization_config")
    seen: set[str] = set()
    modules = linears(source)
    for module in modules:
        seen |= check_linear(part.form_of(module), stored, source, module, config)
    for module in (own for own in HEADS if head != "bf16" and f"{own}.weight" in source):
        seen |= check_linear(head, stored, source, module, config)
        modules.append(module)
    linear_tensors = {f"{m}.{end}" for m in modules for end in ("weight", "weight_scale_inv")}
    for name in source.keys() - linear_tensors:
        assert same_bytes(stored[name], source[name]), name
        seen.add(name)
    assert stored.keys() == seen


def check_row(name: str, bundle: Path, source: Path) -> None:
    """Both parts of a bundle that was made of a checkpoint, in a row of the table."""
    row, original = ROWS[name], read_tensors(source)
    is_mtp = {name: name.startswith(MTP_PREFIX) for name in original}
    main = {n: t for n, t in original.items() if not is_mtp[n]}
    check_part(bundle / "main", row.main, row.head, main)
    check_part(bundle / "mtp", row.mtp, row.head, {n: original[n] for n in original.keys() - main})
    index = read_json(bundle / "main/model.safetensors.index.json")["weight_map"]
    assert index.keys() == read_tensors(bundle / "main").keys()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("row", ROWS)
def test_row(
    row: str,
    kind: str,
    row_sources: dict[str, Path],
    row_bundle: Callable[[str, str], Path],
) -> None:
    check_row(row, row_bundle(row, kind), row_sources[kind])


@pytest.mark.parametrize(
    ("row", "kind"), nightly_but(zip(ROWS, cycle(CONFIGS), strict=False), product(ROWS, CONFIGS))
)
def test_row_from_a_bundle(
    row: str,
    kind: str,
    row_sources: dict[str, Path],
    source_bundles: dict[str, Path],
    output: Path,
) -> None:
    outcome = quantize(source_bundles[kind], output, *ROWS[row].options)
    assert outcome.code == 0, outcome.err
    check_row(row, output, row_sources[kind])


POWERS, MODEL = torch.float8_e8m0fnu, torch.bfloat16


@pytest.mark.parametrize("name", ["fp8", "int8", "wint4, SGLang", "bf16"])
@pytest.mark.parametrize("dtype", [POWERS, MODEL], ids=["powers of two", "of the model's dtype"])
def test_scales_of_other_dtypes(
    dtype: torch.dtype, name: str, tmp_path: Path, output: Path
) -> None:
    """V3.1 stores scales as F8_E8M0 and says scale_fmt ue8m0; Qwen3.5 as BF16 and says nothing."""
    from safetensors.torch import save_file

    powers = {"scale_fmt": "ue8m0"} if dtype is POWERS else {}
    fp8 = CONFIGS["fp8"]["quantization_config"] | powers
    source = make_checkpoint(tmp_path / "source", CONFIGS["fp8"] | {"quantization_config": fp8})
    tensors = {
        name: tensor.to(dtype) if name.endswith("_scale_inv") else tensor
        for name, tensor in read_tensors(source).items()
    }
    for path in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, source / "model.safetensors")
    outcome = quantize(source, output, *ROWS[name].options)
    assert outcome.code == 0, outcome.err
    main = read_tensors(output / "main")
    for module in linears(main):
        form = ROWS[name].main.form_of(module)
        if form == "fp8":
            assert same_bytes(
                main[f"{module}.weight_scale_inv"], tensors[f"{module}.weight_scale_inv"]
            )
        elif form == "bf16":
            expected = exact(tensors, module).to(torch.bfloat16)
            assert same_bytes(main[f"{module}.weight"], expected)
    for tensor in main:
        module = tensor.removesuffix(".weight_packed")
        if module != tensor and name == "int8":
            packed = Int8Channel(main[tensor], main[f"{module}.weight_scale"])
            steps = packed.scale.float()
            error = exact(tensors, module) - dequantize_int8_channel(packed, torch.float32)
            assert (error.abs() <= steps * 0.501).all(), module
    if name == "fp8":
        assert read_json(output / "main/config.json")["quantization_config"] == fp8
