"""Faults that any model can have, planted into the bundles of every family."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from cases import nightly_but
from faults import planting
from faults.fault import Fault
from faults.matrix import Bundles, verified
from faults.small_model import family_config
from faults.weight_faults import halves_swapped, mtp, noisy, one_bit, swapped
from runtime.checkpoints import SMALL_CONFIGS

OTHERS = [model_type for model_type in SMALL_CONFIGS if model_type != "deepseek_v3"]


def expert_missing(layer: str, bundle: Path) -> None:
    names = planting.names(bundle / "mtp", f"{layer}.mlp.experts.3.")
    planting.write(bundle / "mtp", dict.fromkeys(names))


def main_layer_for_the_mtp_layer(layer: str, bundle: Path) -> None:
    name = f"{layer}.self_attn.o_proj.weight"
    theirs = planting.read(bundle / "main", name.replace(layer, "model.layers.2"))
    planting.write(bundle / "mtp", {name: theirs})


def faults_of(model_type: str) -> list[Fault]:
    layer = f"model.layers.{family_config(model_type)['num_hidden_layers']}"
    expert, bias = f"{layer}.mlp.experts.1", f"{layer}.mlp.gate.e_score_correction_bias"
    fault = partial(Fault, needs=model_type)
    return [
        fault("expert missing", partial(expert_missing, layer), "files", "is missing"),
        fault("norm at one", mtp(f"{layer}.hnorm.weight", torch.ones_like), "ledger", "constant"),
        fault("router bias dropped", mtp(bias, torch.zeros_like), "ledger", "dropped and filled"),
        fault("head of another", mtp(f"{layer}.shared_head.head.weight", noisy), "ledger",
              "of another checkpoint"),
        fault("layer for layer", partial(main_layer_for_the_mtp_layer, layer), "ledger",
              "one was taken for the other"),
        fault("concatenation reversed", mtp(f"{layer}.eh_proj.weight", halves_swapped), "weights",
              "two halves of columns are swapped"),
        fault("gate and up swapped",
              partial(swapped, "mtp", f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"),
              "weights", f"it holds {expert}.up_proj.weight"),
        fault("norms swapped",
              partial(swapped, "mtp", f"{layer}.enorm.weight", f"{layer}.hnorm.weight"),
              "weights", f"it holds {layer}.hnorm.weight"),
        fault("one bit", mtp(f"{expert}.down_proj.weight", one_bit), "weights",
              "elements differ: damaged"),
    ]  # fmt: skip


@pytest.mark.parametrize("model_type", nightly_but(["glm_moe_dsa"], OTHERS))
def test_each_is_named(model_type: str, tmp_path: Path) -> None:
    bundles = Bundles(tmp_path / "good")
    options = ("--level", "weights", "--source", bundles.source_of(model_type))
    for number, fault in enumerate(faults_of(model_type)):
        code, report = verified(fault, bundles, tmp_path / str(number), *options)
        failed = [
            item["cause"]
            for check in report["checks"]
            if check["name"] == fault.caught_by
            for item in check["items"]
            if item["status"] == "fail"
        ]
        assert code == 7 and fault.cause in " ".join(failed), (fault.name, failed)
