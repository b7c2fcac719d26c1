"""Checkpoints that people reported, each rebuilt in a small folder and named after its thread: what
`verify` says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import run_program
from hub_server import HubServer
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from verify import foreign_damages as damages
from verify.foreign import Config, headers
from verify.foreign_damages import Damage, FolderDamage
from verify.foreign_folders import INT4, MTP_OF_GLM, both, but_of, deepseek, glm, lost, unquantized
from verify.foreign_sources import Checkpoint

PRESENCE, COMPLETE = "MTP modules announced and there", "MTP modules complete"
Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Report:
    """A folder, the item of the verdict that tells, its status, and words of it.

    At level files it is judged over the Hub, from its headers alone.
    """

    thread: str
    make: Make
    item: str
    status: str
    words: tuple[str, ...] = ()
    level: str = "files"


def by_names(config: Config, *names: str, **dtypes: torch.dtype) -> Make:
    """A folder of tiny tensors, unquantized but for those whose name ends as dtypes says."""

    def dtype_of(name: str) -> torch.dtype | None:
        return dtypes.get(name.rpartition(".")[2])

    return lambda folder: headers(folder, config, {name: dtype_of(name) for name in names})


def whole(model_type: str) -> Make:
    """A whole checkpoint of a family, of random numbers."""
    return lambda folder: write_checkpoint(folder, SMALL_CONFIGS[model_type])


def nothing(_: object) -> None:
    """No damage."""


def of(
    start: Callable[[], Checkpoint], damage: Damage = nothing, written: FolderDamage = nothing
) -> Make:
    """A folder of a miniature's weights."""

    def make(folder: Path) -> Path:
        checkpoint = start()
        damage(checkpoint)
        checkpoint.save(folder)
        written(folder)
        return folder

    return make


def below(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def transposed_projection(folder: Path) -> Path:
    config = late_layers("ernie4_5_moe", 1) | {"hidden_size": 4}
    shapes = {"model.mtp_linear_proj.0.weight": (8, 4), "model.mtp_emb_norm.0.weight": (4,)}
    headers(folder, config, {})
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors | dict.fromkeys(MAIN[:1], torch.ones(4)), folder / "model.safetensors")
    return folder


def transposed(folder: Path) -> Path:
    """Not that layer alone, but every linear that takes the hidden state."""
    transposed_projection(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.ones(4, 6)
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantized(config: Config, method: str, **fields: Any) -> Config:
    return config | {"quantization_config": {"quant_method": method, **fields}}


MODELOPT = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quant_algo": "NVFP4"}
QWEN = {
    "model_type": "of_no_family",
    "text_config": {"num_hidden_layers": 2, "mtp_num_hidden_layers": 1, "num_experts": 2},
}
QWEN_MAIN = below("model.language_model.layers", "0.norm.weight", "1.norm.weight")
QWEN_MTP = below(
    *(
        "mtp",
        "fc.weight",
        "norm.weight",
        "pre_fc_norm_hidden.weight",
        "pre_fc_norm_embedding.weight",
    ),
    *("layers.0.self_attn.q_proj.weight", "layers.0.input_layernorm.weight"),
)
PER_EXPERT = below("mtp.layers.0.mlp.experts", "0.up_proj.weight", "1.up_proj.weight")
FUSED = below("mtp.layers.0.mlp.experts", "gate_up_proj", "down_proj")
MAIN = below("model.layers", "0.input_layernorm.weight", "1.input_layernorm.weight")
LATE = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "self_attn.o_proj.weight")


def late_layers(model_type: str, count: int) -> Config:
    return {"model_type": model_type, "num_hidden_layers": 2, "num_nextn_predict_layers": count}


V4 = quantized(SMALL_CONFIGS["deepseek_v4"], "fp8", weight_block_size=[128, 128])
V4_MTP = ("e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "attn.wq_a.weight")

LOST = [
    Report("llm-compressor#1630", of(lost(INT4)), PRESENCE, "fail", ("0 of 1", "graft --main")),
    Report(
        "llm-compressor#2735",
        by_names(quantized(QWEN, "compressed-tensors", version="0.14.0.1"), *QWEN_MAIN),
        PRESENCE,
        "fail",
        ("text_config.mtp_num_hidden_layers",),
    ),
    Report(
        "auto-round#1477",
        by_names(quantized(QWEN, "auto-round", autoround_version="0.12.0"), *QWEN_MAIN),
        PRESENCE,
        "fail",
        ("0 of 1", "no tensor of any is there"),
    ),
    Report("GPTQModel#2643", of(lost("gptq")), PRESENCE, "fail", ("0 of 1", "graft --main")),
    Report("Model-Optimizer#733", of(lost("modelopt nvfp4")), PRESENCE, "fail", ("graft",)),
    Report(
        "Model-Optimizer#2427",
        by_names(quantized(QWEN, "modelopt", **MODELOPT), *QWEN_MAIN),
        PRESENCE,
        "fail",
        ("0 of 1", "saves no MTP layer"),
    ),
    Report(
        "compressed-tensors#788",
        by_names(quantized(late_layers("step3", 3), "compressed-tensors", version="0.12"), *MAIN),
        PRESENCE,
        "fail",
        ("0 of 3", "num_nextn_predict_layers"),
    ),
    Report("unsloth#11042", by_names(QWEN, *QWEN_MAIN), PRESENCE, "fail", ("no tensor",)),
    Report("ms-swift#7848", of(glm(1), damages.lose("")), PRESENCE, "fail", ("graft",)),
    Report(
        "mlx-lm#1543",
        by_names(QWEN | {"quantization": {"group_size": 64, "bits": 4}}, *QWEN_MAIN),
        PRESENCE,
        "fail",
        ("0 of 1",),
    ),
    Report(
        "MiniMax-M2#47",
        by_names({"model_type": "minimax_m2", "num_hidden_layers": 2, "num_mtp_modules": 3}, *MAIN),
        PRESENCE,
        "fail",
        ("3 MTP modules (num_mtp_modules)",),
    ),
    Report(
        "vllm#52001",
        by_names(late_layers("kimi_k3", 0), *MAIN),
        PRESENCE,
        "not tested",
        ("announces no MTP module",),
    ),
]

PARTLY = [
    Report(
        "sglang-jax#1256",
        by_names(
            {"model_type": "mimo_v2_flash", "num_hidden_layers": 2},
            *MAIN,
            *below("model.mtp.layers.0", *LATE),
        ),
        PRESENCE,
        "fail",
        ("1 of 3", "mimo_v2_flash"),
    ),
    Report(
        "llama.cpp#24340",
        by_names(
            late_layers("step3", 3),
            *MAIN,
            *(name for number in (2, 3) for name in below(f"model.layers.{number}", *LATE)),
        ),
        PRESENCE,
        "fail",
        ("2 of 3",),
    ),
    Report(
        "sglang#35797",
        by_names(
            quantized(late_layers("bailing_hybrid", 1), "fp8"),
            *MAIN,
            *below("model.layers.2", "eh_proj.weight", "mlp.up_proj.qweight"),
            qweight=torch.int32,
        ),
        COMPLETE,
        "fail",
        ("mlp.up_proj.qweight holds I32 codes, and no scale",),
    ),
    Report(
        "AReaL#1403",
        by_names(QWEN, *QWEN_MAIN, *QWEN_MTP[1:], *PER_EXPERT),
        COMPLETE,
        "fail",
        ("projection",),
    ),
]

KINDS = [
    Report(
        "vllm#52165",
        by_names(V4 | {"dspark_block_size": 5}, *MAIN, *below("mtp.0", *V4_MTP)),
        "MTP modules",
        "not tested",
        ("DSpark, not MTP", "dspark_block_size"),
    ),
    Report(
        "llama.cpp#25784",
        by_names(V4, *MAIN, *below("mtp.0", *V4_MTP, "main_norm.weight", "markov_head.weight")),
        "MTP modules",
        "not tested",
        ("DSpark, not MTP",),
    ),
    Report(
        "recipes#717",
        by_names(V4, *MAIN, *below("mtp.0", *V4_MTP)),
        PRESENCE,
        "pass",
        ("1 of 1",),
    ),
    Report(
        "tokenspeed#879",
        by_names(
            {
                "model_type": "kimi_k3",
                "architectures": ["DSparkDraftModel"],
                "num_hidden_layers": 2,
            },
            *below("layers.0", "input_layernorm.weight"),
        ),
        "MTP modules",
        "not tested",
        ("DSpark, not MTP",),
    ),
]

WHOLE = [
    Report("mbridge#145", by_names(QWEN, *QWEN_MAIN, *QWEN_MTP, *FUSED), COMPLETE, "pass"),
    Report(
        "vllm#53906",
        whole("glm5_next"),
        PRESENCE,
        "pass",
        ("1 of 1",),
    ),
    Report(
        "vllm#54160",
        whole("hy_v4"),
        PRESENCE,
        "pass",
        ("1 of 1",),
    ),
    Report(
        "Model-Optimizer#1494",
        whole("nemotron_h"),
        PRESENCE,
        "pass",
    ),
    Report(
        "ROCmFPX#57",
        whole("bailing_hybrid"),
        PRESENCE,
        "pass",
        ("1 of 1",),
    ),
    Report(
        "vllm#48302",
        by_names(
            {"model_type": None, "num_hidden_layers": 2},
            *MAIN,
            *below("model.mtp.layers.0", *LATE),
        ),
        PRESENCE,
        "fail",
        ("no field that counts",),
    ),
]

CONTENTS = [
    Report("sglang#7657", transposed_projection, COMPLETE, "fail", ("stored transposed, [8, 4]",)),
    Report("all as Paddle stores it", transposed, COMPLETE, "fail", ("the whole checkpoint",)),
    Report(
        "vllm#44333",
        of(unquantized(INT4)),
        "mtp: left out of quantization as stored",
        "fail",
        ("to ignore", "model.layers.3"),
    ),
    Report(
        "sglang#38574",
        of(unquantized(INT4, MTP_OF_GLM)),
        "mtp: precision as SGLang reads it",
        "fail",
        ("model.decoder",),
    ),
    Report(
        "vllm#47828",
        of(both("compressed-tensors, fp8", MTP_OF_GLM)),
        "mtp: precision as vLLM reads it",
        "fail",
        ("layers\\.3", "ignore"),
    ),
    Report(
        "vllm#43455", of(but_of(INT4, "v_proj")), "mtp: config", "fail", ("v_proj", "fused names")
    ),
    Report(
        "mlxcel#1315",
        of(glm(own_file="mtp.safetensors"), written=damages.unindexed(r"layers\.3\.")),
        "MTP modules in the index, as vLLM reads it",
        "fail",
        ("mtp.safetensors",),
    ),
    Report(
        "Rapid-MLX#1214",
        of(glm(), damages.each(r"norm\.weight", damages.add(-1))),
        "mtp: norms multiply by w",
        "fail",
        ("1 + w",),
        "weights",
    ),
    Report(
        "colibri#397",
        of(glm(), damages.eh_proj_rounded_by_rows),
        "mtp: halves of eh_proj",
        "fail",
        ("eh_proj",),
        "weights",
    ),
    Report(
        "vllm#38493",
        of(deepseek, damages.copy_of_another("shared_head.head.weight")),
        "draft's shared_head.head.weight is the main model's",
        "fail",
        ("differs from lm_head.weight",),
        "weights",
    ),
    Report(
        "vllm#34385",
        of(deepseek, damages.each("embed_tokens", damages.put(float("nan"), 0, 9))),
        "mtp: finite values, sound scales",
        "fail",
        ("embed_tokens", "NaN"),
        "weights",
    ),
]

REPORTS = [*LOST, *PARTLY, *KINDS, *WHOLE, *CONTENTS]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.thread)
def test_reported_cases(tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = report.make(tmp_path / "checkpoint")
    if report.level == "files":
        server = HubServer()
        server.serve("acme/upload", folder)
        with server.running():
            monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
            outcome = run_program(
                "verify", "hf://acme/upload", "--level", "files", "--json", "--quiet"
            )
    else:
        outcome = run_program("verify", folder, "--level", report.level, "--json", "--quiet")
    assert outcome.code == (7 if report.status == "fail" else 0), outcome.err
    checks = json.loads(outcome.out)["checks"]
    items = {item["name"]: item for check in checks for item in check["items"]}
    item = items[report.item]
    told = f"{item['figure']} {item['subject']} {item['cause']} {item['repair']}"
    assert item["status"] == report.status, told
    assert [words for words in report.words if words not in told] == [], told
