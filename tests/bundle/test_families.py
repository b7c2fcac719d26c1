"""Every family's small checkpoint through the commands; its numbers are random."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from cases import (
    SAFETENSORS_TARGETS,
    export,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_program,
)
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import FAMILIES, family_of
from mtp_checkpoints.families.base import Role
from mtp_runtime import LLM, SamplingParams
from runtime.checkpoints import COMPUTED, SMALL_CONFIGS

OTHERS = [model_type for model_type in FAMILIES if model_type != "deepseek_v3"]
ROWS = (
    ("weight_only_int4", "weight_only_int8", "vllm"),
    ("a8w8_fp8_wint4", "a8w8_fp8", "vllm"),
    ("a8w8_fp8_wint4", "a8w8_fp8", "sglang"),
)
# Ends of names of families whose tensors are nearly those of another.
SIBLINGS = ("_text", "bailing_moe", "intern_s2_preview", "inkling_model")
# Each row with a model that has an indexer, and with one that has none.
EVERY_PUSH = (
    *(("glm4_moe", ROWS[0]), ("glm4_moe", ROWS[1]), ("glm4_moe_lite", ROWS[2])),
    *(("glm_moe_dsa", ROWS[0]), ("deepseek_v32", ROWS[1]), ("glm_moe_dsa", ROWS[2])),
    *(("hy_v3", ROWS[0]), ("mimo", ROWS[1])),
    *(("qwen3_next", ROWS[0]), ("qwen3_5", ROWS[1]), ("qwen3_5_moe", ROWS[0])),
)


def fits(model_type: str, row: tuple[str, str, str]) -> bool:
    """Return whether a model can be in a row: a dense one has no experts to be in int4 alone,
    and SGLang's mixed layout lists no small matrix."""
    family = family_of(SMALL_CONFIGS[model_type])
    main = [spec for spec in family.tensors.values() if spec.mtp_layer is None]
    experts = [spec for spec in main if spec.role is Role.ROUTED_EXPERT]
    if row[2] not in family.engines or (not experts and row is not ROWS[1]):
        return False
    return row is not ROWS[2] or not family.plain_matrices


QUANTIZED = [(name, row) for name, row in product(OTHERS, ROWS) if fits(name, row)]


@pytest.fixture(
    scope="module",
    params=nightly_but([one for one in OTHERS if not one.endswith(SIBLINGS)], OTHERS),
)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16 with a tokenizer."""
    folder = tmp_path_factory.mktemp(model_type) / "source"
    return write_dense(folder, config=family_config(model_type))


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    known = "vllm" in family_of(read_json(source / "config.json")).engines
    for target in ("vllm", "hf"):
        if target == "vllm" or not known:
            outcome = export(source, folder, "--link", "copy", "--target", target)
            assert outcome.code == (4 if target == "vllm" and not known else 0), outcome.err
            words = "vllm serve" if known else "vLLM is not known to load"
            assert target == "hf" or words in outcome.out + outcome.err
    return folder


def test_an_export_loses_nothing(source: Path, bundle: Path) -> None:
    """Bit for bit, biases, norms of heads and indexers included, under their own names."""
    original, main, mtp = (read_tensors(path) for path in (source, bundle / "main", bundle / "mtp"))
    family = family_of(read_json(source / "config.json"))
    assert family.mtp_layers
    assert main.keys() == {name for name in original if family.mtp_layer_of(name) is None}
    copies = {pair.mtp_name: pair.main_name for pair in family.shared}
    assert mtp.keys() == {*copies, *(original.keys() - main.keys())}
    for name, tensor in (main | mtp).items():
        wanted = original[copies.get(name, name)]
        assert tensor.dtype == wanted.dtype and tensor.equal(wanted), name
    for part in ("main", "mtp"):
        assert read_json(bundle / part / "config.json") == read_json(source / "config.json")


def test_inspect_and_verify(source: Path, bundle: Path) -> None:
    assert run_program("inspect", source).code == 0
    outcome = run_program(
        *("verify", bundle, "--source", source, "--level", "weights", "--quiet"),
    )
    assert outcome.code == 0, outcome.out + outcome.err


def test_graft(source: Path, bundle: Path, tmp_path: Path) -> None:
    """The MTP layers come back to a main model that lost them, by the names that the family has."""
    parts = ("--main", bundle / "main", "--mtp", source)
    outcome = run_program("graft", *parts, "--output-dir", tmp_path / "graft", "--quiet")
    assert outcome.code == 0, outcome.err
    outcome = run_program("verify", tmp_path / "graft", "--level", "files", "--quiet")
    assert outcome.code == 0, outcome.err


def test_generate(bundle: Path, model_type: str) -> None:
    """Drafts change no token; a model that the runtime does not compute is refused by name."""
    if model_type not in COMPUTED:
        refused = run_program("generate", bundle, "--prompt", "def read(")
        assert refused.code == 4 and "The runtime" in refused.err, refused.err
        return
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(bundle).generate(["def read("], params)[0].token_ids
    drafting = LLM(bundle, speculate_method="mtp", speculate_max_draft_token_num=2)
    assert drafting.generate(["def read("], params)[0].token_ids == plain
    options = ("--speculate-method", "mtp", "--max-new-tokens", "4")
    assert run_program("generate", bundle, "--prompt", "def read(", *options).code == 0


@pytest.mark.parametrize(
    ("model_type", "row"),
    nightly_but(EVERY_PUSH, QUANTIZED),
    indirect=["model_type"],
    scope="module",
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_quantized(
    source: Path, tmp_path: Path, model_type: str, row: tuple[str, str, str]
) -> None:
    """Quantized bundles pass verification, decode, and keep what engines read unquantized."""
    folder, (base, mtp, target) = tmp_path / "bundle", row
    options = ("--base-quant", base, "--mtp-quant", mtp, "--group-size", 32, "--target", target)
    outcome = quantize(source, folder, *options, "--link", "copy")
    assert outcome.code == 0, outcome.err
    outcome = run_program("verify", folder, "--source", source, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
    original = read_tensors(source)
    stored = read_tensors(folder / "main") | read_tensors(folder / "mtp")
    kept = (
        *("bias", "_norm.weight", "weights_proj.weight", "eh_proj.weight", "mlp.gate.weight"),
        *("mtp.fc.weight", "conv1d.weight", "A_log", "shared_expert_gate.weight"),
        *("visual.pos_embed.weight", "dt_bias"),
        *("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight", "linear_attn.norm.weight"),
    )
    for name in filter(lambda name: name.endswith(kept), original):
        assert stored[name].equal(original[name]), name
    indexer = {name: tensor for name, tensor in stored.items() if ".wq_b." in name}
    if base == "a8w8_fp8_wint4":
        assert {
            str(tensor.dtype) for name, tensor in indexer.items() if name.endswith("b.weight")
        } <= {"torch.float8_e4m3fn"}
    if model_type not in COMPUTED:
        return
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    drafting = LLM(folder, speculate_method="mtp", speculate_max_draft_token_num=2)
    assert len(drafting.generate(["def read("], params)[0].token_ids) == 4


def test_fused_experts_of_other_names_are_written_one_by_one(tmp_path: Path) -> None:
    """Step's, under names that vLLM loads; SGLang loads them fused alone. The bundle runs."""
    source = write_dense(tmp_path / "source", config=family_config("step3p5"))
    schemes = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
    refused = quantize(source, tmp_path / "no", *schemes, "--target", "sglang")
    assert refused.code == 4 and "moe.gate_proj.weight" in refused.err
    assert "Keep that part in bf16, or add --target vllm" in " ".join(refused.err.split())
    bundle = tmp_path / "bundle"
    outcome = quantize(source, bundle, *schemes, "--target", "vllm", "--link", "copy")
    assert outcome.code == 0, outcome.err
    stored, fused = read_tensors(bundle / "main"), read_tensors(source)
    assert not any(name.endswith("moe.gate_proj.weight") for name in stored)
    for part in ("gate", "up", "down"):
        for expert, wanted in enumerate(fused[f"model.layers.1.moe.{part}_proj.weight"]):
            module = f"model.layers.1.moe.experts.{expert}.{part}_proj"
            words, scale = (stored[f"{module}.weight_{end}"] for end in ("packed", "scale"))
            codes = torch.stack([(words >> (8 * at)) & 255 for at in range(4)], dim=2).flatten(1)
            found = (codes - 128).float() * scale.float()
            assert float((found - wanted.float()).norm() / wanted.float().norm()) < 0.02, module
    assert run_program("verify", bundle, "--source", source, "--level", "weights").code == 0
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    drafting = LLM(bundle, speculate_method="mtp", speculate_max_draft_token_num=2)
    assert len(drafting.generate(["def read("], params)[0].token_ids) == 2


def test_layouts_of_deepseek_are_refused(source: Path, tmp_path: Path) -> None:
    model_type = read_json(source / "config.json")["model_type"]
    for target in set(SAFETENSORS_TARGETS) - {"hf"}:
        refused = export(source, tmp_path / target, "--target", target)
        assert refused.code == 4, target
        assert f"Target {target} has no layout for this model" in refused.err
        assert f"'{model_type}'" in refused.err


@pytest.mark.nightly
def test_another_dtype_of_deepseek_v4s_experts_is_found(tmp_path: Path) -> None:
    """Quantization writes one beside its config, and no other passes for it."""
    source = write_dense(tmp_path / "source", config=family_config("deepseek_v4"))
    precision = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")
    options = (*precision, "--group-size", 32, "--target", "vllm", "--link", "copy")
    assert quantize(source, tmp_path / "bundle", *options).code == 0
    path = tmp_path / "bundle/main/config.json"
    path.write_text(json.dumps(read_json(path) | {"expert_dtype": "fp4"}))
    told = run_program("verify", tmp_path / "bundle", "--source", source, "--level", "weights")
    assert "expert_dtype is 'fp4'" in " ".join(told.out.split())
