"""Refusals of quantize: exit code and words of each; no output is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import (
    TINY_CONFIG,
    UNQUANTIZED,
    export,
    make_checkpoint,
    quantize,
    read_json,
    run_program,
    shard_of,
)
from mtp_checkpoints.layouts import target_names
from mtp_export.schemes.table import PAIRS
from quantize_rows import INT8_HEAD, pair

HEAD_IS_READ_BY = "read a head in int8_channel. Expected --target hf or vllm"
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            pair("weight_only_int4", "bf16"),
            4,
            "goes with --mtp-quant weight_only_int8. Found --mtp-quant bf16",
        ),
        (pair("weight_only_int4", "keep"), 4, "Found --mtp-quant keep (the source's a8w8_fp8)"),
        (pair("keep", "weight_only_int8"), 4, "a8w8_fp8 goes with --mtp-quant a8w8_fp8"),
        (pair("weight_only_int4", "weight_only_int8"), 4, "K divisible by 128"),
        (pair("weight_only_int4", "weight_only_int8"), 4, "Pass --group-size 64 (or 32)."),
        (pair("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8"), 4, "K divisible by 128"),
        (pair("a8w8_fp8_wint4", "a8w8_fp8", "--group-size", "48"), 2, "32, 64, 128"),
        (
            pair("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8", "--group-size", "64"),
            2,
            "--group-size 128",
        ),
        (
            pair("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8", "--target", "vllm"),
            4,
            "--target hf or sglang",
        ),
        (pair("a8w8_fp8", "a8w8_fp8", "--int4-scope", "all"), 2, "does not apply"),
        (pair("a8w8_fp8", "a8w8_fp8", "--format", "w4afp8"), 2, "does not apply"),
        (pair("weight_only_int8", "weight_only_int8", "--target", "lightllm"), 4, "lightllm"),
        (pair("a8w8_fp8", "a8w8_fp8", "--target", "xllm"), 4, "--mtp-quant bf16"),
        *(
            (pair("a8w8_fp8", "a8w8_fp8", *INT8_HEAD, "--target", target), 4, HEAD_IS_READ_BY)
            for target in target_names()
            if target not in ("hf", "vllm")
        ),
        (
            pair("a8w8_fp8_wint4", "a8w8_fp8", *INT8_HEAD, "--format", "w4afp8"),
            4,
            "Format w4afp8 has no field for a quantized head",
        ),
        (("--head-quant", "int3"), 2, "keep"),
        (pair("bf16", "bf16", "--target", "paddlenlp"), 4, "--mtp-quant a8w8_fp8"),
        (pair("bf16", "bf16", "--target", "paddlenlp"), 4, "the input of an export"),
        *(
            (pair("a8w8_fp8_wint4", "a8w8_fp8", "--target", target), 4, "--target hf or vllm")
            for target in ("lightllm", "paddlenlp", "tensorrt-llm")
        ),
        (("--base-quant", "int3"), 2, "int3"),
        (("--mtp-quant", "weight_only_int4"), 4, "a8w8_fp8 goes with --mtp-quant a8w8_fp8"),
        (("--mtp-quant", "a8w8_fp8_wint4"), 2, "a8w8_fp8_wint4"),
    ],
)
def test_options(
    options: tuple[str, ...], code: int, says: str, pristine: Path, output: Path
) -> None:
    outcome = quantize(pristine, output, *options)
    assert outcome.code == code, outcome.err
    assert says in outcome.err
    assert outcome.err.count("\n") == 1
    assert not output.exists()


def test_a_refused_pair_points_at_the_table(pristine: Path, output: Path) -> None:
    outcome = quantize(pristine, output, *pair("weight_only_int4", "bf16"))
    assert "mtp-export quantize --list" in outcome.err
    table = run_program("quantize", "--list").out
    assert all(row.base in table and row.mtp in table for row in PAIRS)
    assert "--allow-untested-pair" in outcome.err


@pytest.mark.parametrize(
    ("base", "mtp"),
    [
        ("a8w8_fp8", "weight_only_int8"),
        ("weight_only_int8", "bf16"),
        ("bf16", "a8w8_fp8"),
        ("a8w8_fp8_wint4", "weight_only_int8"),
    ],
)
@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_an_untested_pair_is_marked(
    base: str, mtp: str, target: str, pristine: Path, output: Path
) -> None:
    options = pair(base, mtp, "--group-size", "32", "--target", target)
    assert quantize(pristine, output, *options).code == 4
    outcome = quantize(pristine, output, *options, "--allow-untested-pair")
    assert outcome.code == 0, outcome.err
    assert "outside the precision table" in " ".join(outcome.err.split())
    assert read_json(output / "mtp_export.json")["options"]["pair_in_table"] is False


def test_a_base_left_in_bf16_goes_with_anything(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "source", UNQUANTIZED)
    outcome = quantize(source, output, "--mtp-quant", "a8w8_fp8")
    assert outcome.code == 0, outcome.err
    assert read_json(output / "mtp_export.json")["options"]["pair_in_table"] is False
    config = read_json(output / "mtp/config.json")["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert "model.layers.0.mlp.gate_proj" in config["ignored_layers"]


def overwrite_bytes(folder: Path, tensor: str, data: bytes) -> None:
    """Put bytes at the start of a tensor."""
    from mtp_checkpoints.containers.safetensors_header import read_header
    from mtp_checkpoints.sources.local_folder import LocalFolder

    path = shard_of(folder, tensor)
    (info,) = [
        t for t in read_header(LocalFolder(path.parent).file(path.name)).tensors if t.name == tensor
    ]
    with path.open("r+b") as file:
        file.seek(info.offset_bytes)
        file.write(data)


@pytest.mark.parametrize(
    ("tensor", "data", "says"),
    [
        (EXPERT, b"\x7f", "finite e4m3"),
        (EXPERT, b"\x38\xff", "finite e4m3"),
        (f"{EXPERT}_scale_inv", bytes(4), "found 0"),
        (f"{EXPERT}_scale_inv", b"\x00\x00\xc0\x7f", "nan"),
        (f"{EXPERT}_scale_inv", b"\x00\x00\x80\xbf", "-1"),
    ],
)
@pytest.mark.parametrize("scheme", ["weight_only_int8", "bf16"])
def test_damaged_weights(
    scheme: str, tensor: str, data: bytes, says: str, source: Path, output: Path
) -> None:
    overwrite_bytes(source, tensor, data)
    outcome = quantize(source, output, *pair(scheme, scheme))
    assert outcome.code == 3, outcome.err
    assert EXPERT in outcome.err
    assert says in outcome.err
    assert not output.exists()


def test_infinite_bf16_weights(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "source", UNQUANTIZED)
    overwrite_bytes(source, EXPERT, b"\x80\x7f")
    outcome = quantize(source, output, *pair("a8w8_fp8", "a8w8_fp8"))
    assert outcome.code == 3
    assert EXPERT in outcome.err
    assert "finite" in outcome.err


def test_a_zero_block_is_exactly_zero(source: Path, output: Path) -> None:
    """A zero scale over zero codes means zeros, and is written so in every scheme."""
    from cases import read_tensors

    rows, columns = read_tensors(source)[EXPERT].shape
    overwrite_bytes(source, EXPERT, bytes(rows * columns))
    overwrite_bytes(source, f"{EXPERT}_scale_inv", bytes(4))
    options = pair("weight_only_int4", "weight_only_int8", "--group-size", "32")
    assert quantize(source, output, *options).code == 0
    stored = read_tensors(output / "main")
    assert (stored[EXPERT + "_packed"] == -0x77777778).all()
    assert (stored[EXPERT + "_scale"] == 1).all()


def test_a_quantized_bundle_is_no_source(pristine: Path, tmp_path: Path, output: Path) -> None:
    options = pair("weight_only_int8", "weight_only_int8")
    assert quantize(pristine, tmp_path / "int8", *options).code == 0
    outcome = quantize(tmp_path / "int8", output, *options)
    assert outcome.code == 4
    assert "original checkpoint" in outcome.err


def test_a_bundle_in_another_layout_is_no_source(
    pristine: Path, tmp_path: Path, output: Path
) -> None:
    assert export(pristine, tmp_path / "bundle", "--target", "lightllm").code == 0
    outcome = quantize(tmp_path / "bundle", output, *pair("bf16", "bf16"))
    assert outcome.code == 4
    assert "--target hf" in outcome.err


def test_what_a_release_left_out_of_fp8_stays(tmp_path: Path, output: Path) -> None:
    left_out = "model.layers.2.mlp.shared_experts"
    fp8 = TINY_CONFIG["quantization_config"] | {"modules_to_not_convert": [left_out]}
    source = make_checkpoint(tmp_path / "source", TINY_CONFIG | {"quantization_config": fp8})
    options = pair("weight_only_int8", "weight_only_int8")
    assert quantize(source, output, *options).code == 0
    from cases import read_tensors

    stored = read_tensors(output / "main")
    assert f"{left_out}.up_proj.weight" in stored
    assert "model.layers.1.mlp.shared_experts.up_proj.weight_packed" in stored
    ignored = read_json(output / "main/config.json")["quantization_config"]["ignore"]
    assert any(left_out in pattern for pattern in ignored)
    refused = quantize(
        source,
        tmp_path / "refused",
        *pair("a8w8_fp8_wint4", "a8w8_fp8", "--group-size", "32", "--target", "sglang"),
    )
    assert refused.code == 4
    assert left_out in refused.err


def test_a_cuda_device_must_be_there(pristine: Path, output: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    options = pair("weight_only_int8", "weight_only_int8")
    outcome = quantize(pristine, output, *options, "--device", "cuda")
    assert outcome.code == 4
    assert quantize(pristine, output, *options, "--device", "auto").code == 0
