"""Quantized bundles of Qwen3-Next and Qwen3.5: fused experts become single ones, and what engines
read unquantized is left out by every name that they have for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import save_file

from bundle.test_qwen_bundles import FUSED
from cases import edit_json, quantize, read_json, read_tensors, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import read_rows

INT4_INT8 = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")
MAIN_EXPERTS = "model.language_model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of all layers fused, as in Qwen3.6."""
    folder = tmp_path_factory.mktemp("qwen") / "source"
    return write_dense(folder, config=family_config("qwen3_5_moe"), names=FUSED)


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    options = (*INT4_INT8, "--group-size", 32, "--target", "vllm", "--quiet")
    outcome = quantize(source, folder, *options)
    assert outcome.code == 0, outcome.err
    return folder


def matrices(fused: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Single experts of a fused tensor, by the ends of their names."""
    for number, expert in enumerate(fused):
        if name.endswith("down_proj"):
            yield f"{number}.down_proj", expert
        else:
            gate, up = expert.chunk(2)
            yield from ((f"{number}.gate_proj", gate), (f"{number}.up_proj", up))


def test_fused_experts_are_written_one_by_one(source: Path, bundle: Path) -> None:
    """Each is what the library of compressed-tensors decodes to the slice of its own."""
    original = read_tensors(source)
    for part, experts, bits in (
        ("main", MAIN_EXPERTS, 4),
        ("mtp", "mtp.layers.0.mlp.experts", 8),
    ):
        stored = read_tensors(bundle / part)
        assert not any(name.endswith((".gate_up_proj", "experts.down_proj")) for name in stored)
        config = read_json(bundle / part / "config.json")["quantization_config"]
        groups = QuantizationConfig.model_validate(config).config_groups.values()
        (scheme,) = (group for group in groups if group.weights.num_bits == bits)
        codec: Any = BaseCompressor.get_value_from_registry("pack-quantized")
        for fused in ("gate_up_proj", "down_proj"):
            for end, wanted in matrices(original[f"{experts}.{fused}"], fused):
                module = f"{experts}.{end}"
                tensors = {
                    last: stored[f"{module}.{last}"]
                    for last in ("weight_packed", "weight_scale", "weight_shape")
                }
                found = codec.decompress(tensors, scheme)["weight"]
                error = (found.float() - wanted.float()).norm() / wanted.float().norm()
                assert float(error) < (0.15 if bits == 4 else 0.02), module


def test_the_bundle_is_compared_with_its_fused_source(source: Path, bundle: Path) -> None:
    options = ("--source", source, "--level", "weights", "--json", "--quiet")
    outcome = run_program("verify", bundle, *options)
    assert outcome.code == 0, outcome.err
    checks = json.loads(outcome.out)["checks"]
    figures = {item["name"]: item["figure"] for check in checks for item in check["items"]}
    assert figures["main: routed expert as int4_group"].startswith("96: ")
    assert figures["mtp: routed expert as int8_channel"].startswith("24: ")
    assert figures["main: weights that the source has"] == "160"


def test_an_expert_of_another_number_is_found(source: Path, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    for part in ("main", "mtp"):
        (folder / part).mkdir(parents=True)
        for file in (bundle / part).iterdir():
            if file.suffix != ".safetensors" and "index" not in file.name:
                (folder / part / file.name).write_bytes(file.read_bytes())
        tensors = read_tensors(bundle / part)
        if part == "main":
            for last in ("weight_packed", "weight_scale"):
                one, other = (f"{MAIN_EXPERTS}.{n}.up_proj.{last}" for n in (2, 5))
                tensors[one], tensors[other] = tensors[other], tensors[one]
        save_file(tensors, folder / part / "model.safetensors", metadata={"format": "pt"})
    outcome = run_program("verify", folder, "--source", source, "--level", "weights", "--quiet")
    assert outcome.code == 7
    assert f"it holds {MAIN_EXPERTS}.5.up_proj" in outcome.err


# Names of modules in vLLM and in SGLang, and the bits that each is to be built with (0: plain).
MODULES = {
    "language_model.model.layers.0.linear_attn.in_proj_ba": 0,
    "language_model.model.layers.0.linear_attn.in_proj_qkvz": 0,
    "language_model.model.layers.0.linear_attn.conv1d": 0,
    "language_model.model.layers.3.self_attn.qkv_proj": 0,
    "language_model.model.layers.1.mlp.gate": 0,
    "language_model.model.layers.1.mlp.shared_expert_gate": 0,
    "language_model.model.layers.1.mlp.shared_expert.gate_up_proj": 0,
    "language_model.model.layers.1.mlp.experts.0.gate_proj": 4,
    "language_model.model.layers.1.mlp.experts": 4,
    "language_model.lm_head": 0,
    "visual.blocks.0.attn.qkv": 0,
    "model.visual.blocks.0.mlp.linear_fc1": 0,
    "mtp.fc": 0,
    "mtp.layers.0.self_attn.qkv_proj": 0,
    "mtp.layers.0.mlp.gate": 0,
    "mtp.layers.0.mlp.shared_expert_gate": 0,
    "mtp.layers.0.mlp.shared_expert.gate_up_proj": 8,
    "mtp.layers.0.mlp.experts.0.down_proj": 8,
}


def bits_of(config: dict[str, Any], module: str) -> int:
    """By the rules of both engines: ignored names and patterns first, then targets by name, then
    the class of linears. vLLM's head is no linear."""

    def matches(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target.removeprefix("re:"), module) is not None
        return target in (module, module.rpartition(".")[2])

    if any(map(matches, config["ignore"])):
        return 0
    groups = [(target, g) for g in config["config_groups"].values() for target in g["targets"]]
    named = [group for target, group in groups if matches(target)]
    by_class = [group for target, group in groups if target == "Linear"]
    (group, *_) = (*named, *by_class)
    return int(group["weights"]["num_bits"])


@pytest.mark.parametrize(("module", "bits"), MODULES.items())
def test_engines_build_each_module_as_it_is_stored(bundle: Path, module: str, bits: int) -> None:
    config = read_json(bundle / "main/config.json")["quantization_config"]
    assert bits_of(config, module) == bits


def test_native_fp8_lists_what_stays_by_whole_names(source: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "fp8"
    options = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8", "--quiet")
    assert quantize(source, bundle, *options).code == 0
    quantization = read_json(bundle / "main/config.json")["quantization_config"]
    listed = set(quantization["modules_to_not_convert"])
    stored = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    plain = {
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if tensor.dim() > 1 and tensor.dtype == torch.bfloat16
    }
    tables = {"lm_head", "model.language_model.embed_tokens"}
    assert listed == plain - tables
    assert f"{MAIN_EXPERTS}.7.down_proj.weight_scale_inv" in stored


@pytest.mark.parametrize("scheme", ["weight_only_int8", "a8w8_fp8"])
def test_a_projection_that_no_list_leaves_out_is_named(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    """vLLM builds it by the main config as any linear; SGLang never quantizes it."""
    bundle = tmp_path / "bundle"
    pair = ("--base-quant", scheme, "--mtp-quant", scheme)
    assert quantize(source, bundle, *pair, "--quiet").code == 0
    assert run_program("verify", bundle, "--level", "files", "--quiet").code == 0

    def listing(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        for key in {"ignore", "modules_to_not_convert", "ignored_layers"} & quantization.keys():
            quantization[key] = [name for name in quantization[key] if "mtp.fc" not in name]

    for part in ("main", "mtp"):
        edit_json(bundle / part / "config.json", listing)
    outcome = run_program("verify", bundle, "--level", "files", "--json", "--quiet")
    items = [item for check in json.loads(outcome.out)["checks"] for item in check["items"]]
    causes = {item["name"]: item["cause"] for item in items if item["status"] == "fail"}
    assert "mtp.fc is stored unquantized" in causes["mtp: precision as vLLM reads it"]
    assert "mtp: precision as SGLang reads it" not in causes


def whole_folder(source: Path, bundle: Path, folder: Path, ignored: str) -> Path:
    """One checkpoint as quantizers leave it: single experts in codes, and the module as it was."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundle / "main" / name).read_bytes())
    edit_json(folder / "config.json", lambda c: c["quantization_config"]["ignore"].append(ignored))
    mtp = {name: one for name, one in read_tensors(source).items() if name.startswith("mtp.")}
    tensors = read_tensors(bundle / "main") | mtp
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_folder_that_others_quantized_is_judged(
    source: Path, bundle: Path, tmp_path: Path
) -> None:
    """A fused module in bf16 beside single experts in codes; by a list that leaves it out, and by
    one that does not."""
    options = ("--level", "weights", "--quiet")
    good = whole_folder(source, bundle, tmp_path / "good", "re:^mtp.*")
    judged = run_program("verify", good, *options)
    assert judged.code == 0, judged.err
    for number, (ignored, words) in enumerate(
        [
            ("re:.*mtp_block.*", "stored unquantized"),
            ("re:mtp.*(self_attn|shared_expert).*", f"{FUSED[0]} is stored unquantized"),
        ]
    ):
        bad = whole_folder(source, bundle, tmp_path / str(number), ignored)
        judged = run_program("verify", bad, *options)
        assert judged.code == 7
        assert words in judged.err, judged.err


def test_experts_that_are_kept_stay_fused(source: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    pair = ("--base-quant", "weight_only_int8", "--mtp-quant", "bf16", "--allow-untested-pair")
    assert quantize(source, bundle, *pair, "--quiet").code == 0
    assert set(FUSED) <= read_tensors(bundle / "mtp").keys()
    assert f"{MAIN_EXPERTS}.0.up_proj.weight_packed" in read_tensors(bundle / "main")
    options = ("--source", source, "--level", "weights", "--quiet")
    assert run_program("verify", bundle, *options).code == 0


def test_sglang_s_draft_has_a_config_of_its_own(source: Path, tmp_path: Path) -> None:
    """It may know the module by the name of a main layer."""
    bundle = tmp_path / "bundle"
    options = (*INT4_INT8, "--group-size", 32, "--target", "sglang", "--quiet")
    assert quantize(source, bundle, *options).code == 0
    for part, bits in (("main", 4), ("mtp", 8)):
        config = read_json(bundle / part / "config.json")["quantization_config"]
        assert bits_of(config, "model.layers.0.mlp.experts.0.down_proj") == bits


@pytest.mark.parametrize("target", ["sglang", "vllm"])
def test_a_draft_of_qwen3_next_is_read_by_the_engine_that_it_is_for(
    target: str, tmp_path: Path
) -> None:
    """SGLang knows its layer as a main one, which another engine's config describes otherwise."""
    source = write_dense(tmp_path / "source", config=family_config("qwen3_next"))
    bundle = tmp_path / "bundle"
    options = (*INT4_INT8, "--group-size", 32, "--target", target, "--quiet")
    assert quantize(source, bundle, *options).code == 0
    title = {"sglang": "SGLang", "vllm": "vLLM"}[target]

    def read_by() -> dict[str, str]:
        outcome = run_program("verify", bundle, "--level", "files", "--json", "--quiet")
        items = [item for check in json.loads(outcome.out)["checks"] for item in check["items"]]
        return {item["name"]: item["status"] for item in items if " as " in item["name"]}

    assert read_by() == {f"mtp: precision as {title} reads it": "pass"}
    if target == "sglang":
        config = read_json(bundle / "main/config.json")
        (bundle / "mtp/config.json").write_text(json.dumps(config))
        assert read_by() == {"mtp: precision as SGLang reads it": "fail"}


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("qwen3_5", INT4_INT8, "routed expert linears alone"),
        (
            "qwen3_next",
            ("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8", "--target", "sglang"),
            "cannot leave matrices unquantized",
        ),
        (
            "qwen3_next",
            (
                *("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8"),
                *("--target", "sglang", "--format", "w4afp8"),
            ),
            "--format w4afp8 cannot leave matrices",
        ),
    ],
)
def test_what_no_engine_reads_is_refused(
    model_type: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = write_dense(tmp_path / "source", config=family_config(model_type))
    if "--base-quant" not in options:
        options = ("--base-quant", "weight_only_int8", *options)
    refused = quantize(source, tmp_path / "bundle", *options)
    assert refused.code == 4, refused
    assert words in refused.err.replace("\n", " ")
    assert not (tmp_path / "bundle").exists()


def test_experts_apart_are_slices_of_the_fused_ones(source: Path) -> None:
    """Of main layers, of the MTP module, or of both; a checkpoint without any is itself."""
    checkpoint = Checkpoint.open(source)
    family = family_of(checkpoint.config, checkpoint.tensors)
    original = read_tensors(source)
    apart = experts_apart(checkpoint, family)
    for fused in (*FUSED, f"{MAIN_EXPERTS}.gate_up_proj"):
        assert fused not in apart.tensors
        experts, _, last = fused.rpartition(".")
        for end, wanted in matrices(original[fused], last):
            info = apart.tensors[f"{experts}.{end}.weight"]
            assert read_rows(info, 0, info.shape[0]).equal(wanted), info.name
    of_mtp = experts_apart(checkpoint, family, main=False)
    assert f"{MAIN_EXPERTS}.down_proj" in of_mtp.tensors and FUSED[0] not in of_mtp.tensors
    of_main = experts_apart(checkpoint, family, mtp=False)
    assert f"{MAIN_EXPERTS}.down_proj" not in of_main.tensors and FUSED[0] in of_main.tensors
    assert experts_apart(apart, family_of(apart.config, apart.tensors)) is apart
