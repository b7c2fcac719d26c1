"""Formats of checkpoints that others quantized: their numbers, against writers of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import make_checkpoint
from mtp_checkpoints.containers.base import QUANTIZATION
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import (
    AutoRoundInt4,
    AutoRoundInt8,
    AwqInt4,
    Fp8Tensor,
    GptqInt4,
    GptqInt8,
    Int4ZeroPoints,
    Int8ZeroPoints,
    NvFp4,
)
from mtp_checkpoints.quantization.methods import METHODS as QUANT_METHODS
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.methods.modelopt import flattened
from mtp_checkpoints.quantization.stored import StoredWeight, stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from quantized_by_others import METHODS, asymmetric, auto_round, gptq, symmetric, write

EXPERT = "model.layers.2.mlp.experts.1.up_proj"
STORAGES = {
    "awq": "awq_int4",
    "gptq": "gptq_int4",
    "gptq, 8 bits": "gptq_int8",
    "auto-round, 8 bits": "auto_round_int8",
    "auto-round, 8 bits, whole rows": "auto_round_int8",
    "auto-round": "auto_round_int4",
    "auto-round, attention unquantized": "auto_round_int4",
    "auto-round, awq": "awq_int4",
    "compressed-tensors, int8": "int8_unpacked",
    "compressed-tensors, int4": "int4_group",
    "compressed-tensors, zero points": "int8_zero_points",
    "compressed-tensors, fp8": "fp8_channel",
    "fp8": "fp8_block",
    "modelopt nvfp4": "nvfp4",
    "modelopt fp8, in a file": "fp8_tensor",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small lose time to a second thread, and more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "source")


def opened(folder: Path, name: str) -> list[WeightOnDisk]:
    """Linears that are quantized, by a config as a graft leaves it."""
    checkpoint, config = Checkpoint.open(folder), dict(METHODS[name].config)
    if name == "awq, experts alone":
        config["modules_to_not_convert"] = ["self_attn", "shared_experts", "layers.0."]
    stored = stored_model({**checkpoint.config, QUANTIZATION: flattened_if(config)})
    weights = weights_on_disk(stored, checkpoint.tensors)
    return [weight for weight in weights if weight.stored.storage != "bf16"]


def flattened_if(config: dict[str, Any]) -> dict[str, Any]:
    return config if "quant_method" in config else flattened(config)


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_are_those_that_were_quantized(name: str, source: Path, tmp_path: Path) -> None:
    expected = write(source, tmp_path / "main", name)
    found = opened(tmp_path / "main", name)
    assert {weight.stored.weight.name for weight in found} == expected.keys()
    if name in STORAGES:
        assert {weight.stored.storage for weight in found} == {STORAGES[name]}
    for weight in {weight.stored.weight.shape: weight for weight in found}.values():
        values = expected[weight.stored.weight.name]
        whole = weight.stored.encoded([weight.whole_codes, *weight.others])
        assert whole.shape == values.shape
        torch.testing.assert_close(whole.dequantize(), values, rtol=1e-6, atol=1e-9)
        rows = weight.encoded(0, min(weight.rows, 128)).dequantize()
        assert torch.equal(rows, whole.dequantize()[:128])
        if weight.rows > 128:
            assert torch.equal(
                weight.encoded(128, weight.rows).dequantize(), whole.dequantize()[128:]
            )
        assert whole.dequantize(torch.bfloat16).dtype is torch.bfloat16


def test_permuted_input_channels_keep_their_scales() -> None:
    """A reader that leaves g_idx out finds other numbers."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    tensors, values = METHODS["gptq, permuted"].encode(weight)
    form, names = GptqInt4(32, permuted=True), ("qweight", "scales", "qzeros", "g_idx")
    found = form.encoded([tensors[name] for name in names]).dequantize()
    torch.testing.assert_close(found, values)
    straight = tensors | {"g_idx": torch.arange(64).int() // 32}
    in_order = form.encoded([straight[name] for name in names])
    assert not torch.equal(in_order.dequantize(), values)
    passed_over = GptqInt4(32).encoded([tensors[name] for name in names])
    assert passed_over.equals(replace(in_order, format=GptqInt4(32)))


def test_zero_points_of_format_v1_are_less_one() -> None:
    """A zero point of 15 is stored as 14, and of 0 as 15, with a borrow from the one above it."""
    names = ("qweight", "scales", "qzeros", "g_idx")
    for value in (-1.0, 1.0):  # all weights on one side: a zero point at either end
        weight = value * torch.linspace(0.1, 1, 64).repeat(8, 1)
        for less_one in (True, False):
            tensors, values = METHODS["gptq, asymmetric" if less_one else "gptq v2"].encode(weight)
            form = GptqInt4(32, less_one)
            found = form.encoded([tensors[name] for name in names]).dequantize()
            torch.testing.assert_close(found, values)
            other = GptqInt4(32, not less_one).encoded([tensors[name] for name in names])
            assert not torch.equal(other.dequantize(), values)


def test_zero_points_of_words_that_have_zeros_and_others() -> None:
    """By GPTQModel's conversions: one is taken from, and added to, each word as a whole number."""
    zeros = torch.tensor([[0, 5, 0, 255, 128, 0, 1, 254]])
    words = (zeros.view(1, 2, 4) << torch.tensor([0, 8, 16, 24])).sum(-1).to(torch.int32)
    assert GptqInt8(32, zeros_less_one=False).zero_points(words).tolist() == zeros.tolist()
    assert GptqInt8(32).zero_points(words - 0x01010101).tolist() == zeros.tolist()
    few = zeros & 15
    words = (few << torch.arange(0, 32, 4)).sum(-1, keepdim=True).to(torch.int32)
    assert GptqInt4(32, zeros_less_one=False).zero_points(words).tolist() == few.tolist()
    assert GptqInt4(32).zero_points(words - 0x11111111).tolist() == few.tolist()


def by_the_tool(tensors: dict[str, torch.Tensor], bits: int, group: int) -> torch.Tensor:
    """Weights [N, K] as `QuantLinear.forward` of AutoRound and GPTQModel computes them: numbers of
    words by shifts, one added to zero points that are stored less one."""
    shifts = torch.arange(0, 32, bits)
    zeros = (tensors["qzeros"].unsqueeze(2) >> shifts).to(torch.int16) & ((1 << bits) - 1)
    codes = (tensors["qweight"].unsqueeze(1) >> shifts[:, None]).to(torch.int16) & ((1 << bits) - 1)
    zeros, scales = zeros.flatten(1) + 1, tensors["scales"].float()
    wide = [one.repeat_interleave(group, dim=0) for one in (scales, zeros)]
    return (wide[0] * (codes.flatten(0, 1) - wide[1])).t()


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_words_as_their_tools_read_them(bits: int) -> None:
    """Of zero points above 0: of 0 the tools' own readers differ."""
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
    tensors, values = gptq(asymmetric, bits=bits)(weight)
    form = (GptqInt4 if bits == 4 else GptqInt8)(32)
    found = form.encoded([tensors[name] for name in ("qweight", "scales", "qzeros", "g_idx")])
    torch.testing.assert_close(found.dequantize(), by_the_tool(tensors, bits, 32))
    torch.testing.assert_close(found.dequantize(), values)
    own = (AutoRoundInt4 if bits == 4 else AutoRoundInt8)(32)
    assert torch.equal(
        own.encoded([tensors[name] for name in ("qweight", "scales", "qzeros")]).dequantize(),
        found.dequantize(),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, None])
def test_zero_points_of_compressed_tensors(bits: int, group: int | None) -> None:
    """As its own compressor writes and reads them, and as a config describes them."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": strategy}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights if group is None else weights | {"group_size": group}
    )
    weight = torch.randn(160, 64, generator=torch.Generator().manual_seed(4)) + 0.5
    _, scale, zero = asymmetric(weight, group or 64, bits)
    middle = 1 << (bits - 1)
    state = {"weight_scale": scale, "weight_zero_point": (zero - middle).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress({"weight": weight, **state}, scheme)
    wanted = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    described = {"weights": scheme.weights.model_dump(), "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (form,) = formats(config | {"config_groups": {"group_0": described}}, EXPERT)
    assert form == (Int4ZeroPoints if bits == 4 else Int8ZeroPoints)(group or -1)
    layout = form.tensors("a.weight", (160, 64))
    assert [tuple(packed[one.name[2:]].shape) for one in layout] == [one.shape for one in layout]
    found = form.encoded([packed[one.name[2:]] for one in layout])
    torch.testing.assert_close(found.dequantize(), wanted)
    assert (wanted - weight).abs().max() < scale.max()
    constants = {one.name: packed[one.name[2:]] for one in layout[2:]}
    form.check_constants(constants, (160, 64))
    with pytest.raises(InvalidInputError, match=r"a\.weight_shape contradicts"):
        form.check_constants(constants, (160, 128))


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("quantize", [symmetric, asymmetric])
def test_words_of_eight_bits(quantize: Any, less_one: bool, group: int) -> None:
    """Codes less zero points of up to 255 keep their sign."""
    encode = auto_round(zeros_less_one=less_one, quantize=quantize, bits=8, group_size=group)
    weight = torch.linspace(-1, 0, 256).repeat(16, 1) + (quantize is symmetric)
    tensors, values = encode(weight)
    found = AutoRoundInt8(group, less_one).encoded(
        [tensors[name] for name in ("qweight", "scales", "qzeros")]
    )
    torch.testing.assert_close(found.dequantize(), values)
    assert (values - weight).abs().max() < 0.01


def test_groups_that_a_weight_does_not_have() -> None:
    form = GptqInt4(32)
    good = torch.tensor([0, 1] * 32)
    form.check_constants({"a.qzeros": good, "a.g_idx": good}, (8, 64))
    for bad in (-1, 2):
        with pytest.raises(InvalidInputError, match="names groups") as caught:
            form.check_constants({"a.g_idx": torch.tensor([0, bad])}, (8, 64))
        assert caught.value.found == [bad]


def test_numbers_that_are_no_scales() -> None:
    for form in (NvFp4(), Fp8Tensor()):
        form.check_constants({"a.input_scale": torch.tensor(0.5)}, (8, 64))
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidInputError, match="is no scale"):
                form.check_constants({"a.input_scale": torch.tensor(bad)}, (8, 64))
    codes, nan = torch.zeros(2, 64, dtype=torch.uint8), torch.full((2, 4), float("nan"))
    with pytest.raises(ValueError, match="finite"):
        NvFp4().decode(codes, nan, torch.float32)
    with pytest.raises(ValueError, match="finite"):
        Fp8Tensor().decode(codes.view(torch.float8_e4m3fn), nan[:1, :1], torch.float32)
    damaged = torch.full((2, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="NaN"):
        Fp8Tensor().decode(damaged, torch.ones(1, 1), torch.float32)
    with pytest.raises(ValueError, match="finite"):
        AwqInt4(32).decode(torch.zeros(2, 4, dtype=torch.int8), nan, torch.float32)


def test_nothing_writes_them() -> None:
    for form in (AwqInt4(32), GptqInt4(32), Fp8Tensor()):
        with pytest.raises(AssertionError, match="nothing writes"):
            form.quantize(torch.zeros(2, 2), "minmax")


def test_whole_rows_as_groups() -> None:
    assert [t.shape for t in AwqInt4(-1).tensors("a.weight", (16, 40))] == [
        (40, 2),
        (1, 16),
        (1, 2),
    ]
    assert (AwqInt4(-1).k_divisor, AwqInt4(64).k_divisor) == (8, 64)
    assert AwqInt4(64).k_unit == NvFp4().k_unit == "the group size"


AWQ = METHODS["awq"].config
GPTQ = METHODS["gptq"].config
AUTO_ROUND = METHODS["auto-round, 8 bits"].config
NVFP4 = METHODS["modelopt nvfp4"].config


def formats(config: dict[str, Any], *modules: str) -> list[Any]:
    reading = quant_config_of(config)
    return [reading.format_of(module, Role.ROUTED_EXPERT) for module in modules]


def test_where_loaders_look_for_codes_unless_linears_are_listed() -> None:
    named = {name: own.absent_key for name, own in QUANT_METHODS.items() if own.absent_key}
    assert named == {"awq": "modules_to_not_convert", "gptq": "modules_in_block_to_quantize"}


def test_awq_leaves_out_parts_of_names() -> None:
    config = AWQ | {"modules_to_not_convert": ["layers.2", "up_proj"]}
    assert formats(config, EXPERT, "model.layers.1.x.up_proj", "model.layers.1.x") == [
        None,
        None,
        AwqInt4(32),
    ]
    config = AWQ | {"modules_to_not_convert": ["mlp.gate", "attn.qkv"]}
    joined = ("x.mlp.gate_proj", "x.mlp.up_proj", "x.self_attn.v_proj")  # gate_up_proj, qkv_proj
    assert formats(config, *joined, "x.mlp.down_proj", "x.mlp.experts.up_proj", EXPERT) == [
        *[None] * 3,
        *[AwqInt4(32)] * 3,
    ]
    reading = quant_config_of({"quant_method": "awq", "w_bit": 4, "q_group_size": 64})
    assert reading.format_of(EXPERT, Role.ATTENTION) == AwqInt4(64)
    assert reading.fused_format("x", AwqInt4(64)) == AwqInt4(64)
    for role in (Role.HEAD, Role.ROUTER, Role.MTP_PROJECTION, Role.EMBEDDING):
        assert reading.format_of("x", role) is None


def test_gptq_takes_the_first_pattern_from_a_name_s_start() -> None:
    dynamic = {
        r"-:model\.layers\.2\.": {},
        r"+:model\.layers\.(1|2)\.": {"group_size": 64},
        r"layers\.3": {"group_size": 16},
        r".*layers\.4": {"group_size": 16},
    }
    found = formats(GPTQ | {"dynamic": dynamic}, *(f"model.layers.{n}.x" for n in range(5)))
    assert found == [GptqInt4(32), GptqInt4(64), None, GptqInt4(32), GptqInt4(16)]
    assert quant_config_of(GPTQ).fused_format("x", GptqInt4(32)) == GptqInt4(32)
    assert quant_config_of(GPTQ).format_of("x", Role.HEAD) is None
    (v2,) = formats(GPTQ | {"checkpoint_format": "gptq_v2"}, EXPERT)
    assert v2 == GptqInt4(32, zeros_less_one=False)
    (permuted,) = formats(GPTQ | {"desc_act": True}, EXPERT)
    assert permuted == GptqInt4(32, permuted=True)


def test_modelopt_ignores_by_parts_and_wildcards() -> None:
    config = NVFP4 | {"ignore": ["*.self_attn*", "layers.2"]}
    found = formats(config, EXPERT, "model.layers.1.self_attn.o_proj", "model.layers.1.x")
    assert found == [None, None, NvFp4()]
    assert quant_config_of(config).fused_format("x", NvFp4()) == NvFp4()
    nested = METHODS["modelopt fp8, in a file"].config | {"quant_method": "modelopt"}
    assert formats(nested, "lm_head", EXPERT) == [None, Fp8Tensor()]


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (AWQ | {"bits": 8}, UnsupportedError, "AWQ weights that this tool does not read"),
        (AWQ | {"version": "gemv"}, UnsupportedError, "version gemv"),
        (AWQ | {"lm_head": True}, UnsupportedError, "lm_head True"),
        (AWQ | {"bits": "4"}, InvalidInputError, "quantization_config.bits"),
        (AWQ | {"group_size": 0}, UnsupportedError, "a multiple of 8"),
        (AWQ | {"group_size": 12}, UnsupportedError, "Found 12"),
        (AWQ | {"modules_to_not_convert": "x"}, InvalidInputError, "modules_to_not_convert"),
        (AWQ | {"modules_to_not_convert": [1]}, InvalidInputError, "modules_to_not_convert"),
        (GPTQ | {"bits": 3}, UnsupportedError, "GPTQ weights that this tool does not read"),
        (GPTQ | {"checkpoint_format": "marlin"}, UnsupportedError, "marlin"),
        (GPTQ | {"lm_head": True}, UnsupportedError, "lm_head True"),
        (GPTQ | {"dynamic": ["x"]}, InvalidInputError, "dynamic"),
        (GPTQ | {"dynamic": {"-:(": {}}}, InvalidInputError, r"-:\("),
        (GPTQ | {"dynamic": {"x": 1}}, InvalidInputError, "dynamic"),
        (GPTQ | {"dynamic": {"+:x": {"bits": 2}}}, UnsupportedError, "2 bits"),
        (AUTO_ROUND | {"bits": 2}, UnsupportedError, "2 bits"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, UnsupportedError, "8 bits"),
        (NVFP4 | {"quant_algo": "MIXED_PRECISION"}, UnsupportedError, "MIXED_PRECISION"),
        (NVFP4 | {"quant_algo": None}, UnsupportedError, "None"),
        (NVFP4 | {"ignore": "lm_head"}, InvalidInputError, "ignore"),
    ],
)
def test_configs_that_are_not_read(config: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        quant_config_of(config)


def test_a_stored_weight_checks_what_comes_beside_its_scales() -> None:
    tensors, _ = METHODS["gptq"].encode(torch.randn(8, 64))
    spec = next(
        s
        for s in stored_model(_small()).weights.values()
        if s.weight.name == "model.layers.2.mlp.experts.1.up_proj.weight"
    )
    assert isinstance(spec, StoredWeight)
    ordered = [tensors[t.name.rpartition(".")[2]] for t in spec.tensors]
    ordered[3] = torch.full_like(ordered[3], 99)
    with pytest.raises(InvalidInputError, match="names groups"):
        spec.encoded(ordered)


def _small() -> dict[str, Any]:
    from cases import TINY_CONFIG

    return TINY_CONFIG | {QUANTIZATION: GPTQ}
