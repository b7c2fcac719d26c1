"""MTP modules of checkpoints whose quantization_config is not read here: names alone tell what of
them is not there, and what is there under other names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from verify.foreign import Config, Tensors, rewritten

Encode = Callable[[torch.Tensor], Tensors]


def named(first: str, *others: str) -> Encode:
    """Codes and what lies beside them, by the ends of their names."""
    return lambda weight: {
        first: torch.zeros(weight.numel() // 8).int(),
        **{one: torch.ones(4) for one in others},
    }


FORMATS: dict[str, tuple[dict[str, Any], Encode]] = {
    "a method that is not known": ({"quant_method": "hqq"}, named("W_q", "meta")),
    "scales beside what is not known": ({"quant_method": "aqlm"}, named("codes", "scales")),
    "codes by the weight's own name": (
        {"quant_method": "fbgemm_fp8"},
        lambda weight: {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
    ),
    "codes alone": ({"quant_method": "torchao"}, lambda one: {"weight": one.to(torch.int8)}),
    "bits that are not read": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True, "desc_act": False},
        named("qweight", "qzeros", "scales", "g_idx"),
    ),
    "numbers that are not decoded": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "int3", "qscheme": "per_group"}},
            "exclude": ["re:.*layers\\.3.*"],
        },
        named("weight", "weight_scale"),
    ),
}
MODELS = ("glm4_moe", "qwen3_5_moe", "mimo_v2")
EXPERT = re.compile(r"\.experts\.\d+\.")
# What is damaged, by names of the module's tensors and what each becomes, and what is said of it.
LOST: dict[str, tuple[Callable[[str], str], str]] = {
    "the module": (lambda _: "", r"^config.json announces 1 MTP module .* \(model.layers.3\) is"),
    "a norm": (
        lambda name: "" if ".enorm." in name else name,
        r"^model.layers.3.enorm.weight is missing: no values are there by its name",
    ),
    "a linear": (
        lambda name: "" if ".o_proj." in name else name,
        r"^model.layers.3.self_attn.o_proj.weight is missing: no values are there by its name",
    ),
    "the codes of a linear": (
        lambda name: "" if re.search(r"o_proj\.(W_q|codes|weight|qweight)$", name) else name,
        r"^model.layers.3.self_attn.o_proj.\w+ is (missing: no values|a scale, and its weight)",
    ),
    "the name of a linear": (
        lambda name: name.replace(".o_proj.", ".o_projection."),
        r"under other names \(1\): model.layers.3.self_attn.o_projection.* lies where",
    ),
    "the experts": (
        lambda name: "" if ".experts." in name else name,
        r"^the routed experts of model.layers.3.mlp, all 8, are missing",
    ),
    "names of all": (
        lambda name: f"draft.{name}",
        r"the module are there under other names .* engines look for them without draft\. before",
    ),
    "names of the attention": (
        lambda name: name.replace("self_attn.", "attention."),
        r"under other names \(\d+\): .*begin with model.layers.3.attention, where engines look for"
        r" model.layers.3.self_attn",
    ),
}


def checkpoint(
    model_type: str, form: str, tmp_path: Path, change: Callable[[str], str], *, packs_mtp: bool
) -> Path:
    """A model whose linears are in a form of FORMATS, and names of its module changed, "" to leave
    them out."""
    config = family_config(model_type)
    family, (fields, encode) = family_of(config), FORMATS[form]
    layers = tuple(f"{module.name}." for module in family.mtp)

    def changed(stored: Tensors) -> Tensors:
        found = Tensors()
        for name, one in stored.items():
            is_mtp, spec = name.startswith(layers), family.tensors.get(name)
            parts = {name: one}
            if spec and spec.is_linear_weight and (packs_mtp or not is_mtp):
                module = name.removesuffix("weight")
                parts = {f"{module}{last}": part for last, part in encode(one).items()}
            found |= {new: t for n, t in parts.items() if (new := change(n) if is_mtp else n)}
        return found

    def described(own: Config) -> None:
        own["quantization_config"] = fields

    dense = write_dense(tmp_path / "dense", config=config)
    return rewritten(dense, tmp_path / "unread", changed, described)


@pytest.mark.parametrize("packs_mtp", [False, True])
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("form", FORMATS)
def test_what_names_alone_tell_is_told(
    form: str, lost: str, packs_mtp: bool, tmp_path: Path
) -> None:
    change, words = LOST[lost]
    folder = checkpoint("glm4_moe", form, tmp_path, change, packs_mtp=packs_mtp)
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 7
    first, *_ = (cause["text"] for cause in json.loads(outcome.out)["causes"])
    assert re.search(words, first), first


UNLISTED = [form for form, (fields, _) in FORMATS.items() if "exclude" not in fields]
WHOLE = [
    *((form, one, mtp) for form in UNLISTED for one in MODELS for mtp in (False, True)),
    ("numbers that are not decoded", "glm4_moe", False),
]


@pytest.mark.parametrize(("form", "model_type", "packs_mtp"), WHOLE)
def test_a_whole_module_passes(form: str, model_type: str, packs_mtp: bool, tmp_path: Path) -> None:
    folder = checkpoint(model_type, form, tmp_path, str, packs_mtp=packs_mtp)
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    items = [item for one in json.loads(outcome.out)["checks"] for item in one["items"]]
    assert outcome.code == 0, outcome.out
    assert {item["name"]: item["status"] for item in items}["mtp: config"] == "not tested"


def test_a_tools_own_names_for_main_layers_too_are_no_loss(tmp_path: Path) -> None:
    """Fused, in main layers as in the module."""
    form = "a method that is not known"

    folder = checkpoint("glm4_moe", form, tmp_path, str, packs_mtp=True)

    def change(stored: Tensors) -> Tensors:
        found = {name: one for name, one in stored.items() if not EXPERT.search(name)}
        for name in stored:
            if EXPERT.search(name):
                found[EXPERT.sub(".experts.all.", name)] = torch.zeros(4)
        return found

    fused = rewritten(folder, tmp_path / "fused", change)
    assert run_program("verify", fused, "--level", "files").code == 0
    lost = rewritten(
        fused, tmp_path / "lost", lambda own: {n: t for n, t in own.items() if "3.eh_proj" not in n}
    )
    outcome = run_program("verify", lost, "--level", "files", "--quiet")
    assert outcome.code == 7 and "model.layers.3.eh_proj.weight is missing" in outcome.err
    assert "experts" not in outcome.err
