"""Experts of a layer in one tensor, as mlx-lm and Quark leave them, read one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases import edit_json
from decoded_mains import fused, write_quark
from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.sources.local_folder import LocalFile, LocalFolder
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.stacked_experts import with_single_experts
from quantized_by_others import read_all
from verify.foreign import GLM, GLM_MTP, rewritten


@pytest.mark.parametrize(("experts", "count"), [(0, 1), (3, 3), (1 << 30, 1)])
def test_experts_in_one_tensor(experts: int, count: int, tmp_path: Path) -> None:
    """Those of no layer stay as they are."""
    file = LocalFile(LocalFolder(tmp_path), "model.safetensors")
    name, shape = "model.layers.1.mlp.switch_mlp.up_proj.scales", (experts, 4, 2)
    whole = TensorInfo(name, DType.F16, shape, file, 100, experts * 16)
    shard = with_single_experts(ShardHeader("safetensors", file, 0, "", "", (whole,)), {})
    assert shard.written == (whole,) and len(shard.tensors) == count
    if count > 1:
        last = shard.tensors[-1]
        assert last.name == "model.layers.1.mlp.experts.2.up_proj.scales"
        assert (last.shape, last.offset_bytes, last.size_bytes) == ((4, 2), 132, 16)


def test_experts_of_quark_have_their_own_values(tmp_path: Path) -> None:
    folder = write_quark(GLM, tmp_path / "quark", GLM_MTP, packs_experts=False)
    found, source = Checkpoint.open(folder), read_all(GLM)
    names = [name for name in source if ".mlp.experts." in name and not name.startswith(GLM_MTP)]
    assert names and not any(name.endswith("gate_up_proj") for name in found.tensors)
    assert all(torch.equal(found.tensor(name), source[name]) for name in names)
    assert "model.layers.1.mlp.experts.gate_up_proj" in found.written


def test_experts_of_an_mtp_layer_and_of_other_tools_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever they are, no engine looks for an MTP layer's there."""
    folder = rewritten(GLM, tmp_path / "fused", fused)
    stacked = "model.layers.{}.mlp.experts.gate_up_proj"
    assert {stacked.format(1), stacked.format(3)} < Checkpoint.open(folder).tensors.keys()
    own = {"quantization_config": {"quant_method": "quark"}}
    edit_json(folder / "config.json", lambda config: config.update(own))
    found = Checkpoint.open(folder).tensors
    assert stacked.format(1) not in found and stacked.format(3) in found
