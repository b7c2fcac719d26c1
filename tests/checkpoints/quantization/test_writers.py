"""The tool that wrote a checkpoint, told by its quantization_config and the names of its files."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_checkpoints.quantization.absent import as_engines_take, with_absent_listed
from mtp_checkpoints.quantization.tools import LOSSES, Tool, known_loss, tool_of

WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("compressed-tensors 0.12.2", {"quant_method": "compressed-tensors", "version": "0.12.2"}),
    ("compressed-tensors", {"quant_method": "compressed-tensors", "version": 5}),
    ("AutoRound 0.16.1", {"quant_method": "auto-round", "autoround_version": "0.16.1"}),
    ("AutoRound 0.8", {"quant_method": "gptq", "autoround_version": "0.8"}),
    ("AutoRound 0.8", {"quant_method": "awq", "autoround_version": "0.8"}),
    ("GPTQ", {"quant_method": "gptq"}),
    ("AutoAWQ", {"quant_method": "awq", "meta": {"quantizer": []}}),
    ("GPTQModel 7.1", {"quant_method": "gptq", "meta": {"quantizer": ["gptqmodel:7.1", "x:2"]}}),
    ("other 3", {"quant_method": "awq", "meta": {"quantizer": "other:3"}}),
    ("ModelOpt 0.47.0", {"quant_method": "modelopt", "producer": {"version": "0.47.0"}}),
    ("ModelOpt", {"quant_method": "modelopt_fp4", "producer": {"version": 1}}),
    ("Quark 1", {"quant_method": "quark", "version": "1", "quark_version": "2"}),
    ("Quark 2", {"quant_method": "quark", "quark_version": "2"}),
    ("bitsandbytes 3", {"quant_method": "bitsandbytes", "version": "3"}),
    ("torchao 4", {"quant_method": "TorchAO", "version": "4"}),
    ("HQQ", {"quant_method": "hqq"}),
    ("FBGEMM", {"quant_method": "fbgemm_fp8"}),
    ("MXFP4", {"quant_method": "mxfp4"}),
]


@pytest.mark.parametrize(("words", "quantization"), WRITTEN)
def test_the_writer_is_told(words: str, quantization: dict[str, Any]) -> None:
    assert str(tool_of({"quantization_config": quantization}, ())) == words


def test_signs_beside_the_quantization_config() -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors", "version": "0.1"}}
    written = tool_of(config, ["recipe.yaml"])
    assert str(written) == "llm-compressor (compressed-tensors 0.1)"
    assert tool_of({"quantization": {"group_size": 64}}, ()) == Tool("mlx-lm")
    assert tool_of({}, ["mergekit_config.yml"]) == Tool("mergekit")
    assert tool_of({}, ["config.json"]) is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization": {"bits": 4}},
        {"quantization": ["group_size"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": None}},
        {"quantization_config": {"quant_method": ["awq"]}},
    ],
)
def test_a_release_tells_no_tool(config: dict[str, Any]) -> None:
    assert tool_of(config, ["recipe.yaml"]) is None


def test_losses_are_those_of_the_versions_that_were_run() -> None:
    for name, loss in LOSSES.items():
        for version in loss.versions:
            assert known_loss(Tool(name, version)).startswith(f"{name} {loss.shown} saves no MTP")
        assert known_loss(Tool(name, "99")) == known_loss(Tool(name)) == ""
    assert known_loss(Tool("AutoRound", "0.47.0")) == ""


@pytest.mark.parametrize("quantization", [None, {}, "text", {"quant_method": "fp8"}])
def test_what_lists_no_absent_linears_is_taken_as_it_is(quantization: Any) -> None:
    config = {"model_type": "no model", "quantization_config": quantization}
    assert with_absent_listed(config, ()) == config


@pytest.mark.parametrize("config", [{}, {"quantization_config": {}}])
def test_engines_take_an_unquantized_config_as_it_is(config: dict[str, Any]) -> None:
    assert as_engines_take(config, ["x.weight"]) == config
