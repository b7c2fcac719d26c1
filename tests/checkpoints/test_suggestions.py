"""Suggestions: the known name that was meant, and none where nothing is alike."""

from __future__ import annotations

import pytest

from mtp_checkpoints.suggestions import did_you_mean, nearest

SCHEMES = ("a8w8_fp8_wint4", "weight_only_int4", "a8w8_fp8", "weight_only_int8", "bf16", "keep")
ENGINES = ("hf", "vllm", "sglang", "tensorrt-llm", "lightllm")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("int4", SCHEMES, "weight_only_int4"),
        ("int8", SCHEMES, "weight_only_int8"),
        ("fp8", SCHEMES, "a8w8_fp8_wint4"),
        ("BF16", SCHEMES, "bf16"),
        ("weight-only-int4", SCHEMES, "weight_only_int4"),
        ("wint4", SCHEMES, "a8w8_fp8_wint4"),
        ("vlm", ENGINES, "vllm"),
        ("trtllm", ENGINES, "tensorrt-llm"),
        ("sg-lang", ENGINES, "sglang"),
        ("nothing", ENGINES, None),
        ("", ENGINES, None),
        ("--", ENGINES, None),
        ("vllm", (), None),
    ],
)
def test_the_nearest_name(name: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(name, known) == meant
    assert did_you_mean(name, known) == (None if meant is None else f"Did you mean {meant}?")


def test_the_likest_of_several_is_taken() -> None:
    assert nearest("verfy", ("verify", "very", "serve")) == "verify"
    assert nearest("--base-qant", ("--mtp-quant", "--base-quant")) == "--base-quant"
