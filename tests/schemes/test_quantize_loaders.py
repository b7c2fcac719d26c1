"""A bundle's config.json describes every module: to the matching rules that vLLM and SGLang share,
and to transformers, which loads the main part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import MTP_LAYER, make_checkpoint, quantize, read_json, read_tensors
from mtp_checkpoints.formats import Int4Group, Int8Channel
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.load import LoadOptions, load_model
from quantize_rows import CONFIGS, HEADS, ROWS, linears, pair
from runtime.harness import Walk, prompts_of

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
COMPRESSED = [
    name for name, row in ROWS.items()
    if name.startswith(("int", "nvfp4", "mx")) or name == "wint4, vLLM" or row.head != "bf16"
]  # fmt: skip
# It takes one group for all experts, and one for every other linear, a head too. Of nvfp4 experts,
# which it joins, it leaves the number of the matrix out.
READ_BY_TRANSFORMERS = [
    name
    for name in COMPRESSED
    if name not in ("fp8, int8 head", "bf16, int8 head") and not name.startswith(("nvfp4", "mx"))
]
FORM_OF = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8 of compressed-tensors"}
FORM_OF |= {("float", 4, 32): "mxfp4", ("float", 8, 32): "mxfp8"}
FORM_OF |= {("float", 4): "nvfp4", ("float", 4, "local"): "nvfp4 under nvfp4"}
# vLLM looks for the copy of the head by the last name.
ITS_HEADS = (*HEADS, f"model.layers.{MTP_LAYER}.head")
# Modules that no engine may take for a quantized one.
NEVER = [
    "model.embed_tokens",
    "model.layers.1.mlp.gate",
    *(f"model.layers.{MTP_LAYER}.{m}" for m in ("mlp.gate", "eh_proj")),
    f"model.layers.{MTP_LAYER}.embed_tokens",
]


Bundle = Callable[[str], Path]


@pytest.fixture(scope="session")
def source(row_sources: dict[str, Path]) -> Path:
    return row_sources["fp8"]


@pytest.fixture(scope="session")
def bundle_of(row_bundle: Callable[[str, str], Path]) -> Bundle:
    """Bundles of it by their row of the table."""
    return lambda row: row_bundle(row, "fp8")


def form_by_config(config: dict[str, Any], module: str) -> str:
    """Lookup of a module as engines do it: ignored, else by name, else by class."""

    def matches(pattern: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], module) is not None
        return pattern == module

    if any(map(matches, config["ignore"])):
        return "bf16"
    groups = list(config["config_groups"].values())
    by_name = [g for g in groups if any(map(matches, g["targets"]))]
    assert len(by_name) <= 1, module
    by_class = [g for g in groups if "Linear" in g["targets"]]
    (group,) = by_name or by_class
    weights, inputs = group["weights"], group.get("input_activations") or {}
    kind = (weights["type"], weights["num_bits"])
    if weights["type"] == "float" and weights.get("group_size") == 32:
        return FORM_OF[(*kind, 32)]
    return FORM_OF[(*kind, "local") if inputs.get("dynamic") == "local" else kind]


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_main_config_describes_both_parts(name: str, source: Path, bundle_of: Bundle) -> None:
    row, bundle = ROWS[name], bundle_of(name)
    config = read_json(bundle / "main/config.json")["quantization_config"]
    assert read_json(bundle / "mtp/config.json")["quantization_config"] == config
    modules = linears(read_tensors(source))
    for module in modules:
        part = row.mtp if f".{MTP_LAYER}." in module else row.main
        assert form_by_config(config, module) == part.form_of(module), module
        fused = re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", module)
        assert form_by_config(config, fused) == part.form_of(module), fused
    for module in NEVER:
        assert form_by_config(config, module) == "bf16", module
    for module in ITS_HEADS if row.head != "bf16" else HEADS:
        assert form_by_config(config, module) == row.head, module


@pytest.mark.parametrize("name", COMPRESSED)
def test_sglang_finds_the_mtp_layer_under_its_own_name(
    name: str, source: Path, bundle_of: Bundle
) -> None:
    """SGLang's draft replaces the literal layer prefix inside patterns by model.decoder."""
    row, bundle = ROWS[name], bundle_of(name)
    text = (bundle / "mtp/config.json").read_text()
    literal = f"model.layers.{MTP_LAYER}"
    assert "\\\\." not in text, "an escaped pattern would not be found"
    config = read_json(bundle / "mtp/config.json")["quantization_config"]
    renamed = json.loads(json.dumps(config).replace(literal, "model.decoder"))
    for module in linears(read_tensors(source)):
        if module.startswith(f"{literal}."):
            there = module.replace(literal, "model.decoder")
            assert form_by_config(renamed, there) == row.mtp.form_of(module), there


@pytest.mark.parametrize("name", ["wint4, SGLang", "int4", "int4, mse"])
def test_sglang_sees_that_it_must_not_fuse_the_shared_expert(name: str, bundle_of: Bundle) -> None:
    """It fuses the shared expert into the routed ones unless the class Linear is int4."""
    config = read_json(bundle_of(name) / "main/config.json")
    groups = config["quantization_config"]["config_groups"]
    (linear,) = [group for group in groups.values() if "Linear" in group["targets"]]
    assert (linear["weights"]["type"], linear["weights"]["num_bits"]) == ("int", 4)


def test_the_real_layer_number_is_the_config_s(tmp_path: Path, output: Path) -> None:
    config = CONFIGS["bf16"] | {"num_hidden_layers": 2}
    source = make_checkpoint(tmp_path / "source", config)
    assert quantize(source, output, *ROWS["int4"].options).code == 0
    text = (output / "main/config.json").read_text()
    assert "re:model.layers.2.mlp.experts.*" in text
    assert f"layers.{MTP_LAYER}" not in text


@pytest.mark.parametrize("kind", CONFIGS)
def test_native_fp8_keeps_or_gets_the_released_config(
    kind: str, row_bundle: Callable[[str, str], Path]
) -> None:
    for part in ("main", "mtp"):
        stored = read_json(row_bundle("fp8", kind) / part / "config.json")
        assert stored == CONFIGS["fp8"], part


def test_each_folder_of_sglang_s_has_its_own(bundle_of: Bundle) -> None:
    bundle = bundle_of("wint4, SGLang")
    main = read_json(bundle / "main/config.json")["quantization_config"]
    assert main["format"] == "pack-quantized"
    assert main["linear_fp8_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (group,) = main["config_groups"].values()
    assert group["input_activations"]["strategy"] == "token"
    native = CONFIGS["fp8"]["quantization_config"]
    assert read_json(bundle / "mtp/config.json")["quantization_config"] == native


def test_w4afp8(bundle_of: Bundle) -> None:
    bundle = bundle_of("wint4, w4afp8")
    main = read_json(bundle / "main/config.json")["quantization_config"]
    assert main == {"quant_method": "w4afp8"}
    native = CONFIGS["fp8"]["quantization_config"]
    assert read_json(bundle / "mtp/config.json")["quantization_config"] == native


def test_bf16_has_no_quantization_config(bundle_of: Bundle) -> None:
    for part in ("main", "mtp"):
        assert "quantization_config" not in read_json(bundle_of("bf16") / part / "config.json")


def test_a_part_in_bf16_beside_fp8_is_listed(source: Path, output: Path) -> None:
    options = ("--mtp-quant", "bf16", "--allow-untested-pair")
    assert quantize(source, output, *options).code == 0
    config = read_json(output / "main/config.json")["quantization_config"]
    assert f"model.layers.{MTP_LAYER}.mlp.experts" in config["ignored_layers"]
    assert f"model.layers.{MTP_LAYER}.self_attn.o_proj" in config["modules_to_not_convert"]
    assert not [name for name in config["ignored_layers"] if ".0." in name]


def transformers_main(bundle: Path) -> Any:
    """The main part as transformers loads it, with nothing missing; its weights in float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options: dict[str, Any] = {}
    if "quantization_config" in read_json(bundle / "main/config.json"):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        bundle / "main", dtype=torch.float32, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.float()


def logits_error(bundle: Path, vocab: int) -> float:
    """The largest difference between transformers' logits and the runtime's, relative."""
    (tokens,) = prompts_of([40], vocab)
    with torch.no_grad():
        theirs = transformers_main(bundle)(torch.tensor([tokens])).logits[0]
    model = load_model(bundle, LoadOptions(with_mtp=False)).model
    ours = Walk(model).feed(tokens)[0]
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture
def rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers decompresses to the scales' dtype, for integers bf16; the runtime is made to
    round those weights as well. (It computes with code * scale in fp32; the rounding alone moves
    the trained model's logits by 1e-3, over 61 layers and with a router in each.)"""
    for form in (Int8Channel, Int4Group):
        exact = form.decode

        def rounded(
            self: Any, codes: Any, scale: Any, dtype: torch.dtype, exact: Any = exact
        ) -> torch.Tensor:
            return exact(self, codes, scale, torch.bfloat16).to(dtype)  # type: ignore[no-any-return]

        monkeypatch.setattr(form, "decode", rounded)
    monkeypatch.setattr(WeightSource, "packed_form", lambda *_: None)  # but decoded


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*READ_BY_TRANSFORMERS, "bf16"])
def test_transformers_computes_what_the_runtime_does(
    name: str, bundle_of: Bundle, rounded_once: None
) -> None:
    assert logits_error(bundle_of(name), CONFIGS["fp8"]["vocab_size"]) <= 1e-5


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_also_on_the_trained_model(output: Path, rounded_once: None) -> None:
    """61 layers, of which an error in any shows: int4 experts, fp8 blocks and bf16."""
    options = pair("a8w8_fp8_wint4", "a8w8_fp8", "--group-size", "64")
    assert quantize(FIXTURE, output, *options).code == 0
    assert logits_error(output, 2048) <= 1e-5
