"""Precision schemes by name. A new scheme on known formats is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import (
    Float16,
    Fp8Block,
    Int4Group,
    Int8Channel,
    MxFp4Packed,
    MxFp8,
    NvFp4,
    NvFp4A16,
    NvFp4Packed,
    NvFp4PackedA4,
    Unquantized,
    W4AFp8,
)
from mtp_checkpoints.formats.ggml_blocks import (
    Q4,
    Q4K,
    Q5,
    Q5K,
    Q6K,
    Q8,
    Mxfp4,
    Q4WithMinimum,
    Q5WithMinimum,
)
from mtp_export.schemes.scheme import Scheme, every_linear, gguf_type

# Formats of the language-model head beside those of all linears, by their names.
HEAD_SCHEMES: dict[str, str] = {"weight_only_int8": Int8Channel.storage}

_FP8 = every_linear(Fp8Block.storage)
_INDEXER_IN_BF16 = {Role.INDEXER: Unquantized.storage}
_ATTENTION_IN_BF16 = _INDEXER_IN_BF16 | {Role.ATTENTION: Unquantized.storage}

SCHEMES: dict[str, Scheme] = {
    # int4 groups for routed experts, native fp8 for every other linear, activations in fp8.
    "a8w8_fp8_wint4": Scheme(
        "a8w8_fp8_wint4",
        "int4 + fp8",
        _FP8 | {Role.ROUTED_EXPERT: Int4Group.storage},
        {"format": {"w4afp8": _FP8 | {Role.ROUTED_EXPERT: W4AFp8.storage}}},
        int4_activations_fp8=True,
    ),
    # int4 groups for routed experts, everything else bf16: a weight-only config cannot describe
    # native fp8 beside it. Scope "all" packs shared experts and dense MLPs too, "linears" attention
    # besides, but for what latent attention absorbs.
    "weight_only_int4": Scheme(
        "weight_only_int4",
        "int4 + bf16",
        every_linear(Unquantized.storage) | {Role.ROUTED_EXPERT: Int4Group.storage},
        {
            "int4_scope": {
                "all": every_linear(Int4Group.storage) | _ATTENTION_IN_BF16,
                "linears": every_linear(Int4Group.storage) | _INDEXER_IN_BF16,
            }
        },
    ),
    # Native fp8: e4m3 codes, a scale per 128x128 block, activations quantized at run time.
    "a8w8_fp8": Scheme("a8w8_fp8", "fp8", _FP8),
    # int8 per channel for MLPs and experts; attention in bf16, as SGLang reads kv_b_proj's weight.
    # Scope "linears" packs attention too, but for what latent attention absorbs.
    "weight_only_int8": Scheme(
        "weight_only_int8",
        "int8 + bf16",
        every_linear(Int8Channel.storage) | _ATTENTION_IN_BF16,
        {"int8_scope": {"linears": every_linear(Int8Channel.storage) | _INDEXER_IN_BF16}},
    ),
    # e2m1 codes in groups of 16 for every linear but what latent attention absorbs, and indexers.
    "weight_only_nvfp4": Scheme(
        "weight_only_nvfp4",
        "nvfp4 + bf16",
        every_linear(NvFp4Packed.storage) | _INDEXER_IN_BF16,
        {"format": {"modelopt": every_linear(NvFp4A16.storage) | _INDEXER_IN_BF16}},
    ),
    # The same with inputs in nvfp4 too, under a constant scale.
    "a4w4_nvfp4": Scheme(
        "a4w4_nvfp4",
        "nvfp4",
        every_linear(NvFp4PackedA4.storage) | _INDEXER_IN_BF16,
        {"format": {"modelopt": every_linear(NvFp4.storage) | _INDEXER_IN_BF16}},
    ),
    # The same roles in microscaling formats: groups of 32 under a power of two.
    "weight_only_mxfp4": Scheme(
        "weight_only_mxfp4", "mxfp4 + bf16", every_linear(MxFp4Packed.storage) | _INDEXER_IN_BF16
    ),
    "a8w8_mxfp8": Scheme("a8w8_mxfp8", "mxfp8", every_linear(MxFp8.storage) | _INDEXER_IN_BF16),
    # For hardware without fp8, and the way into engines that quantize at load.
    "bf16": Scheme("bf16", "bf16", every_linear(Unquantized.storage)),
    # Types of llama.cpp, which computes with each as it is stored.
    "f16": gguf_type("f16", Float16.storage, tables=Float16.storage),
    "q8_0": gguf_type("q8_0", Q8.storage),
    "q5_1": gguf_type("q5_1", Q5WithMinimum.storage),
    "q5_0": gguf_type("q5_0", Q5.storage),
    "q4_1": gguf_type("q4_1", Q4WithMinimum.storage),
    "q4_0": gguf_type("q4_0", Q4.storage),
    "q6_k": gguf_type("q6_k", Q6K.storage),
    "q5_k": gguf_type("q5_k", Q5K.storage),
    "q4_k": gguf_type("q4_k", Q4K.storage),
    "gguf_mxfp4": gguf_type("gguf_mxfp4", Mxfp4.storage),
}


def recorded_head(options: Mapping[str, Any]) -> str | None:
    """Return the format of the heads of a bundle by the options that its manifest records; None
    where they are as the source has them."""
    return HEAD_SCHEMES.get(str(options.get("head_quant")))
