"""quantize for llama.cpp of int4, int8 and mxfp4: its blocks hold the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from gguf import GGUFReader, dequantize

from bundle.test_carried_nvfp4 import CONFIG as OF_64
from calibrate.test_calibration import verify_weights
from cases import quantize, read_tensors
from faults import planting
from runtime.checkpoints import write_checkpoint

CONFIG: dict[str, Any] = OF_64 | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
}
QWEN = Path("fixtures/qwen3-5-tiny").resolve()
TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "none", "--quiet")
INT4, INT8, MXFP4 = "weight_only_int4", "weight_only_int8", "weight_only_mxfp4"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)


def in_codes(source: Path, output: Path, base: str, mtp: str, *options: str) -> Path:
    pair = ("--base-quant", base, "--mtp-quant", mtp, "--group-size", "32", "--quiet")
    outcome = quantize(source, output, *pair, "--allow-untested-pair", *options)
    assert outcome.code == 0, outcome.err
    return output


def in_blocks(source: Path, output: Path, base: str, mtp: str, *options: str) -> Path:
    pair = ("--base-quant", base, "--mtp-quant", mtp, "--allow-untested-pair")
    outcome = quantize(source, output, *pair, *TARGET, *options)
    assert outcome.code == 0, outcome.err
    return output


def numbers_of(folder: Path, name: str) -> tuple[str, torch.Tensor]:
    """Return the type and the numbers of a tensor of the GGUF file in a folder."""
    (file,) = folder.glob("*.gguf")
    (tensor,) = (one for one in GGUFReader(file).tensors if one.name == name)
    values = dequantize(tensor.data, tensor.tensor_type)
    return tensor.tensor_type.name, torch.from_numpy(values.copy())


def stored_numbers(folder: Path, layer: int, module: str, bits: int) -> torch.Tensor:
    """Return what compressed-tensors reads of experts' weights: in float32, [E, n, K]."""
    tensors, found = read_tensors(folder), []
    for expert in range(CONFIG["n_routed_experts"]):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{module}"
        scale = tensors[f"{name}.weight_scale"].float()
        shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{name}.weight_packed"], bits, shape)
        found.append(codes.float() * scale.repeat_interleave(shape[1] // scale.shape[1], dim=1))
    return torch.stack(found)


def test_integers_keep_their_numbers(source: Path, tmp_path: Path) -> None:
    """int4 in Q4_0 and int8 in Q8_0; and int4 in Q8_0 too."""
    codes = in_codes(source, tmp_path / "codes", INT4, INT8)
    for base, kind in (("q4_0", "Q4_0"), ("q8_0", "Q8_0")):
        made = in_blocks(codes, tmp_path / base, base, "q8_0")
        for module, part in (("down_proj", "down"), ("up_proj", "up"), ("gate_proj", "gate")):
            found = numbers_of(made / "main", f"blk.1.ffn_{part}_exps.weight")
            assert found[0] == kind
            assert torch.equal(found[1], stored_numbers(codes / "main", 1, module, 4))
            last = CONFIG["num_hidden_layers"]
            found = numbers_of(made / "mtp", f"blk.{last}.ffn_{part}_exps.weight")
            assert found[0] == "Q8_0"
            assert torch.equal(found[1], stored_numbers(codes / "mtp", last, module, 8))
    verify_weights(tmp_path / "q4_0", codes)


def test_mxfp4_keeps_its_numbers(source: Path, tmp_path: Path) -> None:
    codes = in_codes(source, tmp_path / "codes", MXFP4, "bf16")
    made = in_blocks(codes, tmp_path / "blocks", "gguf_mxfp4", "q8_0")
    kind, found = numbers_of(made / "main", "blk.1.ffn_down_exps.weight")
    assert kind == "MXFP4"
    tensors = read_tensors(codes / "main")
    for expert, numbers in enumerate(found):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj"
        packed = tensors[f"{name}.weight_packed"]
        values = unpack_fp4_from_uint8(packed, *numbers.shape, dtype=torch.float32)
        power = torch.exp2(tensors[f"{name}.weight_scale"].float() - 127)
        assert torch.equal(numbers, values * power.repeat_interleave(32, dim=1))


def test_what_blocks_do_not_hold_is_refused(source: Path, tmp_path: Path) -> None:
    """Types that would quantize again, other targets, forms that divide groups, and scales."""
    codes = in_codes(source, tmp_path / "codes", INT4, INT8)
    nets = in_codes(QWEN, tmp_path / "nets", INT8, INT8, "--int8-scope", "linears")
    name = "model.layers.1.mlp.experts.1.down_proj.weight_scale"
    scale = read_tensors(codes / "main")[name]

    def refused(folder: Path, words: tuple[str, ...], base: str = "q4_0", mtp: str = "q8_0") -> str:
        pair = ("--base-quant", base, "--mtp-quant", mtp, "--allow-untested-pair")
        own = tmp_path / f"refused-{len([*tmp_path.iterdir()])}"  # a run of another source's
        outcome = quantize(folder, own, *pair, *words)
        return f"{outcome.code} {outcome.err}"

    again = refused(codes, TARGET, base="q5_0")
    assert again.startswith("4 ") and "whose codes are carried as they are alone" in again
    assert "a precision of q4_0 or q8_0 for it. Found q5_0" in again
    elsewhere = refused(codes, (), base=INT8, mtp=INT8)
    assert elsewhere.startswith("4 ") and "quantize --target llama.cpp" in elsewhere
    turned = refused(nets, TARGET, base="q8_0")
    assert turned.startswith("4 ") and "linear_attn" in turned and "int8_channel" in turned, turned
    typed = refused(codes, (*TARGET, "--tensor-type", "ffn_down_exps=q6_k"))
    assert typed.startswith("4 ") and "expected no other type for it" in typed.lower()
    for number, code, said in ((1e-7, 4, "half precision does not hold"), (torch.nan, 3, "finite")):
        wrong = scale.clone()
        wrong[3, 0] = number
        planting.write(codes / "main", {name: wrong})
        found = refused(codes, TARGET)
        assert found.startswith(f"{code} ") and said in found, found
        assert not [*tmp_path.rglob("*.gguf")]
