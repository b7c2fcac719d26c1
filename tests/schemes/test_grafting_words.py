"""Configs of grafts one by one: what each quantization method is told of a draft, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cases import MTP_LAYER, TINY_CONFIG
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.quantization.method import SGLANG, VLLM, Dialect
from mtp_checkpoints.quantization.native import NATIVE_FP8, quantization_of
from mtp_checkpoints.quantization.stored import stored_model
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.grafting import Draft, GraftDescription, describe_graft
from quantized_by_others import METHODS

LAYER = f"model.layers.{MTP_LAYER}"
INT4, AWQ = METHODS["compressed-tensors, int4"].config, METHODS["awq"].config


def draft_of(scheme: str, dialect: Dialect = VLLM) -> Draft:
    return Draft(stored_model(TINY_CONFIG), SCHEMES[scheme], dialect)


def described(
    quantization: object, scheme: str = "bf16", dialect: Dialect = VLLM, *names: str
) -> GraftDescription:
    return describe_graft(quantization, dict.fromkeys(names), draft_of(scheme, dialect))


def refusal(quantization: object, scheme: str, dialect: Dialect = VLLM) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        described(quantization, scheme, dialect)
    return caught.value


@pytest.mark.parametrize(
    ("name", "key", "left_out"),
    [
        ("awq", "modules_to_not_convert", [LAYER]),
        ("modelopt nvfp4", "ignore", [f"{LAYER}*"]),
        ("compressed-tensors, int4", "ignore", [rf"re:{LAYER}(\..*)?$"]),
        ("compressed-tensors, fp8", "ignore", [rf"re:{LAYER}(\..*)?$"]),
        ("gptq", "dynamic", [rf"-:model\.layers\.{MTP_LAYER}(\..*)?$"]),
    ],
)
def test_an_unquantized_draft_is_left_out(name: str, key: str, left_out: list[str]) -> None:
    theirs = METHODS[name].config
    found = described(theirs)
    assert found.main is not None
    own = theirs.get(key) or []
    assert list(found.main[key]) == [*own, *left_out]
    assert {k: v for k, v in found.main.items() if k != key} == {
        k: v for k, v in theirs.items() if k != key
    }
    assert (found.mtp, found.reader, found.conversion.scheme) == (None, None, "bf16")


def test_fp8_is_told_every_linear_of_the_draft() -> None:
    found = described(NATIVE_FP8).main
    assert found is not None
    names = found["modules_to_not_convert"]
    assert names == found["ignored_layers"]
    assert f"{LAYER}.mlp.experts" in names and f"{LAYER}.self_attn.o_proj" in names
    assert all(name.startswith(f"{LAYER}.") for name in names)
    assert len(names) == len(set(names)) and not any(".experts." in name for name in names)
    partly = described(NATIVE_FP8, "a8w8_fp8")
    assert partly.main == partly.mtp == NATIVE_FP8 and partly.reader is None


def test_linears_that_are_as_they_were_are_listed_where_loaders_look_at_tensors() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.1.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "lm_head.weight",
        f"{LAYER}.self_attn.o_proj.weight",
    ]
    found = described(AWQ, "bf16", VLLM, *names).main
    assert found is not None
    assert found["modules_to_not_convert"] == [
        *(AWQ.get("modules_to_not_convert") or []),
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.experts",
        LAYER,
    ]
    other = described(INT4, "bf16", VLLM, *names).main
    assert other == described(INT4).main


@pytest.mark.parametrize("absent", [None, {}])
def test_an_unquantized_main_model_needs_no_config(absent: Any) -> None:
    found = described(absent)
    assert (found.main, found.mtp, found.reader) == (None, None, None)
    own = described(absent, "a8w8_fp8", SGLANG)
    assert own.main is None and own.reader == "sglang"
    assert own.mtp is not None and own.mtp["quant_method"] == "fp8"


def test_a_draft_in_a_group_of_the_main_model_s() -> None:
    for dialect in (VLLM, SGLANG):
        found = described(INT4, "weight_only_int8", dialect)
        assert found.main == found.mtp is not None and found.reader is None
        assert next(iter(found.main["config_groups"])) == "mtp_int8_channel"
        assert found.conversion.options.fp8_scale_name == "weight_scale"
        assert found.conversion.bf16_modules == draft_of("bf16").family.patterns.absorbed
    blocks = described(INT4, "a8w8_fp8")
    assert blocks.main == blocks.mtp is not None and blocks.reader == "vllm"
    assert blocks.main["format"] == "mixed-precision"
    assert blocks.conversion.storages == SCHEMES["a8w8_fp8"].storages
    alone = described(INT4, "a8w8_fp8", SGLANG)
    assert alone.reader == "sglang" and alone.main != alone.mtp
    assert alone.conversion.options.fp8_scale_name == "weight_scale_inv"
    assert alone.conversion.bf16_modules == ()
    assert alone.conversion.native == stored_model(TINY_CONFIG).native


def test_what_a_draft_fits() -> None:
    fits = {
        (scheme, method, dialect.name)
        for scheme in ("bf16", "a8w8_fp8", "weight_only_int8", "weight_only_int4")
        for method in (None, "fp8", "compressed-tensors", "awq", "modelopt")
        for dialect in (VLLM, SGLANG)
        if scheme != "bf16" and draft_of(scheme, dialect).fits(method)
    }
    assert fits == {
        ("a8w8_fp8", "fp8", "vllm"),
        ("a8w8_fp8", "fp8", "sglang"),
        ("a8w8_fp8", "compressed-tensors", "vllm"),
        ("weight_only_int8", "compressed-tensors", "vllm"),
        ("weight_only_int8", "compressed-tensors", "sglang"),
    }
    assert all(draft_of("bf16").fits(method) for method in (None, "fp8", "awq", "gptq"))
    assert draft_of("a8w8_fp8").storages == {"fp8_block"}


@pytest.mark.parametrize(
    ("quantization", "main"),
    [(AWQ, "quant_method awq"), (None, "an unquantized main model")],
)
def test_a_draft_that_no_config_describes(quantization: Any, main: str) -> None:
    error = refusal(quantization, "weight_only_int8")
    assert error.what == (
        "This draft cannot be described in the main folder's config.json, by which vLLM builds both"
        f" parts: it has no field for int8_channel linears beside {main}"
    )
    assert error.expected == "--mtp-quant bf16, which goes with every main model"
    assert error.found == "--mtp-quant weight_only_int8"
    assert error.todo == "Or use --target sglang: SGLang reads the draft's own config.json"


def test_a_method_that_leaves_nothing_out() -> None:
    error = refusal({"quant_method": "w4afp8"}, "bf16")
    assert error.what == (
        "A draft cannot be described beside a main model of this quantization method"
    )
    assert error.expected == (
        "quant_method fp8 or compressed-tensors or awq or gptq or modelopt or auto-round"
        " or quark or bitsandbytes or mlx"
    )
    assert error.found == "w4afp8"


def test_a_draft_that_would_be_taken_for_another() -> None:
    ignored = {**INT4, "ignore": [*INT4["ignore"], rf"re:{LAYER}.*"]}
    error = refusal(ignored, "weight_only_int8")
    assert error.what.startswith(f"The main model's quantization_config describes {LAYER}.")
    assert error.what.endswith("in another precision than the draft would have")
    assert error.expected == "int8_channel, by --mtp-quant weight_only_int8"
    assert error.found == "bf16, by quant_method compressed-tensors"
    assert error.todo == "Use --mtp-quant bf16, which every method can leave unquantized"
    older = quantization_of({"compression_config": ignored})
    error = refusal(older, "weight_only_int8")
    assert error.what.startswith(f"The main model's compression_config describes {LAYER}.")
