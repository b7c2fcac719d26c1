"""GPTQ beside llm-compressor's own, of the same weight, Hessian and scales."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_runs import SCRIPTS, TOOLS

from mtp_kernels.quantize import quantize_int4_group
from mtp_kernels.quantize.block_floats import nvfp4_divisor, quantize_nvfp4
from mtp_kernels.quantize.gptq import Factor, Grid, gptq, output_energy

ROWS, COLUMNS, DEAD, GROUP = 96, 512, 7, 64
CLOSE = 0.01  # of the loss


def test_it_loses_as_much(tmp_path: Path) -> None:
    """In int4 and nvfp4, columns in static order, with a dead one; half of what rounding loses."""
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(ROWS, COLUMNS, generator=random) * 0.02
    mixed = torch.randn(2048, 64, generator=random) @ torch.randn(64, COLUMNS, generator=random)
    x = (mixed + torch.randn(mixed.shape, generator=random)) * torch.linspace(0.1, 4, COLUMNS)
    x[:, DEAD] = 0
    hessian = x.t() @ x
    int4 = quantize_int4_group(weight, group_size=GROUP)[0].scale.float()
    divisor = nvfp4_divisor(float(weight.abs().max()))
    nvfp4 = quantize_nvfp4(weight, divisor, sweep=False)[1].float()
    given = {"weight": weight, "hessian": hessian, "int4.scale": int4, "nvfp4.scale": nvfp4}
    save_file(given | {"nvfp4.global": torch.tensor([divisor])}, tmp_path / "given")
    command = [TOOLS["llm-compressor"].python, SCRIPTS / "gptq_of_llm_compressor.py"]
    subprocess.run([*command, tmp_path / "given", tmp_path / "theirs"], check=True)
    grids = {"int4": Grid.int4(int4, GROUP), "nvfp4": Grid.nvfp4(nvfp4 / divisor)}
    theirs = load_file(tmp_path / "theirs")
    assert theirs.keys() == grids.keys()
    for name, grid in grids.items():
        kept = {
            "ours": grid.values(gptq(weight, Factor.of(hessian), grid)),
            "theirs": theirs[name],
            "nearest": grid.values(grid.rounded(weight)),
        }
        lost = {of: float(output_energy(weight - one, hessian)) for of, one in kept.items()}
        assert lost["ours"] == pytest.approx(lost["theirs"], rel=CLOSE)
        assert lost["theirs"] < 0.5 * lost["nearest"]
