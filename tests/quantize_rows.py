"""The rows of the precision table as the engines' loaders want them on disk, written out by hand,
and configs of sources to quantize."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cases import MTP_LAYER, UNQUANTIZED, WHOLE_TILES

# Form of a linear -> the tensors (last component) it is stored as.
FORMS = {
    "bf16": {"weight": "BF16"},
    "fp8": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "fp8 of compressed-tensors": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "int8": {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    "int4": {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    "w4afp8": {"weight": "I8", "weight_scale_inv": "F32"},
    "nvfp4": {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
    "mxfp4": {"weight_packed": "U8", "weight_scale": "U8"},
    "mxfp8": {"weight": "F8_E4M3", "weight_scale": "U8"},
    "nvfp4 of modelopt": {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
}


@dataclass(frozen=True)
class Part:
    """The form of every kind of linear in one part."""

    experts: str
    shared: str
    dense: str
    attention: str
    kv_b: str

    def form_of(self, module: str) -> str:
        if module.endswith("kv_b_proj"):
            return self.kv_b
        if ".self_attn." in module:
            return self.attention
        if ".experts." in module:
            return self.experts
        return self.shared if ".shared_experts." in module else self.dense


@dataclass(frozen=True)
class Row:
    """Options, and what they must make of the two parts and of the heads of both."""

    options: tuple[str, ...]
    main: Part
    mtp: Part
    head: str = "bf16"


def pair(base: str, mtp: str, *more: str) -> tuple[str, ...]:
    return ("--base-quant", base, "--mtp-quant", mtp, *more)


CT = "fp8 of compressed-tensors"
NATIVE = Part("fp8", "fp8", "fp8", "fp8", "fp8")
INT8 = Part("int8", "int8", "int8", "bf16", "bf16")
FORMS |= {
    "nvfp4 under nvfp4": FORMS["nvfp4"] | {"input_global_scale": "F32"},
    "nvfp4 under nvfp4 of modelopt": FORMS["nvfp4 of modelopt"] | {"input_scale": "F32"},
}


def packed_part(form: str) -> Part:
    return Part(form, form, form, form, "bf16")


NVFP4 = packed_part("nvfp4")
BF16 = Part("bf16", "bf16", "bf16", "bf16", "bf16")
FP8_CT = Part(CT, CT, CT, CT, "bf16")
WINT4 = ("a8w8_fp8_wint4", "a8w8_fp8")
INT8_HEAD = ("--head-quant", "weight_only_int8")
ROWS = {
    "wint4, vLLM": Row(
        pair(*WINT4), Part("int4", CT, CT, CT, "bf16"), Part(CT, CT, CT, CT, "bf16")
    ),
    "wint4, SGLang": Row(
        pair(*WINT4, "--target", "sglang"), Part("int4", "fp8", "fp8", "fp8", "fp8"), NATIVE
    ),
    "wint4, w4afp8": Row(
        pair(*WINT4, "--format", "w4afp8", "--target", "sglang"),
        Part("w4afp8", "fp8", "fp8", "fp8", "fp8"),
        NATIVE,
    ),
    "int4": Row(
        pair("weight_only_int4", "weight_only_int8"),
        Part("int4", "bf16", "bf16", "bf16", "bf16"),
        INT8,
    ),
    "int4 everywhere": Row(
        pair("weight_only_int4", "weight_only_int8", "--int4-scope", "all", "--group-size", "64"),
        Part("int4", "int4", "int4", "bf16", "bf16"),
        INT8,
    ),
    "int4 linears": Row(
        pair("weight_only_int4", "weight_only_int8", "--int4-scope", "linears"),
        Part("int4", "int4", "int4", "int4", "bf16"),
        INT8,
    ),
    "int4, mse": Row(
        pair("weight_only_int4", "weight_only_int8", "--scale", "mse", "--group-size", "32"),
        Part("int4", "bf16", "bf16", "bf16", "bf16"),
        INT8,
    ),
    "fp8": Row(pair("a8w8_fp8", "a8w8_fp8"), NATIVE, NATIVE),
    "int8": Row(pair("weight_only_int8", "weight_only_int8"), INT8, INT8),
    "int8 linears": Row(
        pair("weight_only_int8", "weight_only_int8", "--int8-scope", "linears"),
        Part("int8", "int8", "int8", "int8", "bf16"),
        INT8,
    ),
    "nvfp4": Row(pair("weight_only_nvfp4", "weight_only_nvfp4"), NVFP4, NVFP4),
    "nvfp4, mse": Row(
        pair("weight_only_nvfp4", "weight_only_nvfp4", "--scale", "mse"), NVFP4, NVFP4
    ),
    "mxfp4": Row(
        pair("weight_only_mxfp4", "weight_only_mxfp4"), packed_part("mxfp4"), packed_part("mxfp4")
    ),
    "mxfp8": Row(pair("a8w8_mxfp8", "a8w8_mxfp8"), packed_part("mxfp8"), packed_part("mxfp8")),
    "nvfp4 under nvfp4": Row(
        pair("a4w4_nvfp4", "a4w4_nvfp4"),
        packed_part("nvfp4 under nvfp4"),
        packed_part("nvfp4 under nvfp4"),
    ),
    "nvfp4 beside fp8": Row(pair("weight_only_nvfp4", "a8w8_fp8"), NVFP4, FP8_CT),
    "nvfp4 under nvfp4 beside fp8": Row(
        pair("a4w4_nvfp4", "a8w8_fp8"), packed_part("nvfp4 under nvfp4"), FP8_CT
    ),
    "modelopt nvfp4": Row(
        pair("weight_only_nvfp4", "bf16", "--format", "modelopt"),
        packed_part("nvfp4 of modelopt"),
        BF16,
    ),
    "modelopt nvfp4 under nvfp4": Row(
        pair("a4w4_nvfp4", "bf16", "--format", "modelopt"),
        packed_part("nvfp4 under nvfp4 of modelopt"),
        BF16,
    ),
    "bf16": Row(pair("bf16", "bf16"), BF16, BF16),
    "int4, int8 head": Row(
        pair("weight_only_int4", "weight_only_int8", "--group-size", "64", *INT8_HEAD),
        Part("int4", "bf16", "bf16", "bf16", "bf16"),
        INT8,
        head="int8",
    ),
    "fp8, int8 head": Row(pair("a8w8_fp8", "a8w8_fp8", *INT8_HEAD), FP8_CT, FP8_CT, head="int8"),
    "bf16, int8 head": Row(pair("bf16", "bf16", *INT8_HEAD), BF16, BF16, head="int8"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": WHOLE_TILES,
    "bf16": {key: WHOLE_TILES[key] for key in UNQUANTIZED},
}
MTP_PREFIX = f"model.layers.{MTP_LAYER}."
HEADS = ("lm_head", f"{MTP_PREFIX}shared_head.head")
INPUT_SCALES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def linears(names: Iterable[str]) -> list[str]:
    """The modules among a source's tensors that a scheme may quantize, but for an indexer's keys:
    engines dequantize those as they load them, and never ask."""
    inside = (".self_attn.", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj", "experts.")
    return [
        name.removesuffix(".weight")
        for name in names
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".indexer.wq_b.weight"))
        if any(part in name for part in inside) and not name.endswith(".weights_proj.weight")
    ]
