"""Quark's layouts, by tensors and values that its own export and import made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.dtypes import dtype_name
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import (
    FORMATS,
    QuarkFp8,
    QuarkInt4,
    QuarkInt8,
    QuarkMxFp4,
    WeightFormat,
)
from mtp_checkpoints.quantization.methods import quant_config_of
from recorded_tensors import Rows, tensor_of

MADE = json.loads(Path(__file__).with_name("quark.json").read_text())
SHAPE = (8, 64)
FORMS: dict[str, WeightFormat] = {
    "int4": QuarkInt4(32, signed=True),
    "uint4": QuarkInt4(32, signed=False),
    "int8": QuarkInt8(per_channel=False, has_input_scale=True),
    "int8 per channel": QuarkInt8(per_channel=True, has_input_scale=False),
    "fp8": QuarkFp8(per_channel=False, has_input_scale=True),
    "fp8 per channel": QuarkFp8(per_channel=True, has_input_scale=False),
    "mxfp4": QuarkMxFp4(),
}
LINEAR = "model.layers.1.self_attn.q_proj"


def ordered(name: str) -> list[torch.Tensor]:
    """The tensors that Quark wrote, in the format's order: all of them, in its shapes."""
    form, stored = FORMS[name], MADE[name]["tensors"]
    layout = form.tensors("a.weight", SHAPE)
    assert {one.name for one in layout} == {f"a.{last}" for last in stored}
    tensors = [tensor_of(stored[one.name.removeprefix("a.")]) for one in layout]
    assert [one.shape for one in layout] == [tuple(one.shape) for one in tensors]
    for one, tensor in zip(layout, tensors, strict=True):
        assert dtype_name(tensor.dtype) in form.accepted_dtypes(one)
    return tensors


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_that_quark_imports(name: str) -> None:
    form, tensors = FORMS[name], ordered(name)
    assert FORMATS[form.storage] is type(form)
    found = form.encoded(tensors)
    values, own = found.dequantize(), tensor_of(MADE[name]["values"]).float()
    assert found.shape == values.shape == SHAPE
    torch.testing.assert_close(values, own, atol=1e-5, rtol=1 / 128)  # own are in bf16
    rows = form.encoded_rows(Rows(tensors), 0, SHAPE[0])
    assert torch.equal(rows.dequantize(), values)
    assert found.scale is not None
    packed = form.row_codes(found.codes, found.scale).values()
    torch.testing.assert_close(packed, values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [one for one in FORMS if "int4" not in one])
def test_some_rows(name: str) -> None:
    form, tensors = FORMS[name], ordered(name)
    values = form.encoded(tensors).dequantize()
    assert torch.equal(form.encoded_rows(Rows(tensors), 3, 5).dequantize(), values[3:5])


def test_zero_points_are_taken_off() -> None:
    for name in ("uint4", "int8 per channel"):
        codes, scale, zeros = ordered(name)
        assert zeros.count_nonzero()
        other = FORMS[name].encoded((codes, scale, torch.zeros_like(zeros))).dequantize()
        own = tensor_of(MADE[name]["values"]).float()
        assert (other - own).abs().max() > own.abs().max() / 4


@pytest.mark.parametrize("name", FORMS)
def test_configs_that_quark_writes(name: str) -> None:
    found = quant_config_of(MADE[name]["config"])
    assert found.format_of(LINEAR, Role.ATTENTION) == FORMS[name]
    assert found.format_of("lm_head", Role.HEAD) is None
    assert found.format_of("model.embed_tokens", Role.EMBEDDING) is None
    assert not found.loads_together


def test_what_leaves_modules_out() -> None:
    own = MADE["mxfp4"]["config"]
    entries = ["re:model.layers.3.*experts$", "model.layers.2", LINEAR]
    entries += ["*o_proj", "model.layers.4.mlp.experts.0.up_proj", r"re:model\.layers\.5(\.|$)"]
    found = quant_config_of(own | {"exclude": entries})
    for module, is_left_out in {
        "model.layers.3.mlp.experts.7.up_proj": True,
        "model.layers.3.mlp.up_proj": False,
        "model.layers.2.mlp.up_proj": False,
        "model.layers.4.mlp.experts.7.up_proj": True,
        "model.layers.5.mlp.up_proj": True,
        "model.layers.50.mlp.up_proj": False,
        "model.layers.20.self_attn.o_proj": False,
        LINEAR: True,
        "lm_head": False,
    }.items():
        assert (found.format_of(module, Role.ATTENTION) is None) is is_left_out, module


def test_configs_by_pattern() -> None:
    of_fp8 = MADE["fp8"]["config"]["global_quant_config"]
    named = {"*q_proj": of_fp8, "*layers.1.*": {"weight": None}}
    found = quant_config_of(MADE["mxfp4"]["config"] | {"layer_quant_config": named})
    assert found.format_of(LINEAR, Role.ATTENTION) == FORMS["fp8"]
    assert found.format_of("model.layers.1.mlp.up_proj", Role.DENSE_MLP) is None
    assert found.format_of("model.layers.2.mlp.up_proj", Role.DENSE_MLP) == QuarkMxFp4()
    alone = {"global_quant_config": None, "layer_quant_config": named}
    others = quant_config_of(MADE["mxfp4"]["config"] | alone)
    assert others.format_of("model.layers.2.mlp.up_proj", Role.DENSE_MLP) is None


def changed(name: str, part: str = "weight", **fields: Any) -> dict[str, Any]:
    own = MADE[name]["config"]
    usual = own["global_quant_config"]
    return own | {"global_quant_config": usual | {part: (usual[part] or {}) | fields}}


@pytest.mark.parametrize(
    "config",
    [
        changed("int4", dtype="int3"),
        changed("int4", group_size=24),
        changed("int4", is_dynamic=True),
        changed("int8 per channel", qscheme="per_group", group_size=32),
        changed("mxfp4", scale_format="e4m3"),
        changed("mxfp4", group_size=16),
        changed("fp8", dtype="fp8_e5m2"),
        changed("mxfp4", "input_tensors", is_dynamic=False),
        changed("fp8", "output_tensors", dtype="fp8_e4m3"),
        changed("fp8", "bias", dtype="fp8_e4m3"),
        MADE["fp8"]["config"] | {"layer_type_quant_config": {"Linear": {}}},
        MADE["int4"]["config"] | {"export": {"pack_method": "order"}},
        MADE["int4"]["config"] | {"global_quant_config": {"weight": [{}, {}]}},
        {"quant_method": "quark"},
    ],
)
def test_other_numbers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="does not read these numbers of Quark"):
        quant_config_of(config)


@pytest.mark.parametrize(
    "fields",
    [{"exclude": ["re:("]}, {"layer_quant_config": ["a"]}, {"global_quant_config": "fp8"}],
)
def test_unusable_fields_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        quant_config_of(MADE["fp8"]["config"] | fields)
