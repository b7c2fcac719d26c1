"""kv_b_proj of mlx-lm's models, put together of its halves when it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cases import run_program
from decoded_mains import affine
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.tensors.reader import Checkpoint
from quantized_by_others import LINEAR, unquantized
from verify.foreign_sources import DEEPSEEK, shortened
from verify.foreign_sources import Checkpoint as Held

NAME = "model.layers.1.self_attn.kv_b_proj.weight"
NOPE, V, HEADS, LATENTS = 32, 32, 4, 512  # of the miniature


def held(bits: int | None) -> tuple[Held, torch.Tensor]:
    """A main model of five layers as mlx-lm has it, in groups of 32 or unquantized, its MTP layer
    as released; and one of its kv_b_proj."""
    found = shortened(DEEPSEEK, 5)
    released = unquantized(found.tensors)
    found.config.pop("quantization_config")
    if bits is not None:
        found.config["quantization"] = {"group_size": 32, "bits": bits}
    found.tensors = {}
    for name, one in released.items():
        matrices = {name: one}
        if name.startswith(found.layer) or not LINEAR.match(name):
            found.tensors[name] = one
            continue
        if name.endswith("kv_b_proj.weight"):
            heads = one.view(HEADS, NOPE + V, LATENTS)
            module = name.removesuffix("kv_b_proj.weight")
            keys, values = heads[:, :NOPE].transpose(1, 2).contiguous(), heads[:, NOPE:]
            matrices = {f"{module}embed_q.weight": keys, f"{module}unembed_out.weight": values}
        for own, matrix in matrices.items():
            parts = {"weight": matrix.contiguous()}
            if bits is not None:
                flat = affine(matrix.reshape(-1, matrix.shape[-1]), bits, 32)
                parts = {key: t.view(*matrix.shape[:-1], -1) for key, t in flat.items()}
            found.tensors |= {f"{own.removesuffix('weight')}{end}": t for end, t in parts.items()}
    return found, released[NAME]


@pytest.mark.parametrize("bits", [None, 6, 8])
def test_both_halves_are_one(bits: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    checkpoint, wanted = held(bits)
    checkpoint.save(folder)
    opened = Checkpoint.open(folder)
    found = opened.tensor(NAME)
    assert not [name for name in opened.tensors if "embed_q" in name or "unembed_out" in name]
    assert {*opened.written} == {*checkpoint.tensors}
    if bits is None:
        assert torch.equal(found, wanted)
    else:
        noise = (found - wanted.float()).square().sum() / wanted.float().square().sum()
        assert 0 < noise < 10 * 4.0**-bits
    outcome = run_program("verify", folder, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_half_that_is_damaged_is_named(damage: str, tmp_path: Path) -> None:
    folder, name = tmp_path / "mlx", NAME.replace("kv_b_proj.weight", "embed_q.scales")
    checkpoint, _ = held(4)
    scales = checkpoint.tensors.pop(name)
    if damage == "cut":
        checkpoint.tensors[name] = scales[:, :, :0]
    checkpoint.save(folder)
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    items = [i for check in json.loads(outcome.out)["checks"] for i in check["items"]]
    failed = [item for item in items if item["status"] == "fail"]
    assert outcome.code == 7 and NAME in json.dumps(failed), outcome.err


@pytest.mark.parametrize("end", ["scales", "biases"])
def test_numbers_of_groups_that_are_not_finite_are_refused(end: str, tmp_path: Path) -> None:
    folder, name = tmp_path / "mlx", NAME.replace("kv_b_proj.weight", f"unembed_out.{end}")
    checkpoint, _ = held(4)
    checkpoint.tensors[name] = checkpoint.tensors[name].clone()
    checkpoint.tensors[name][1, 2, 0] = torch.nan
    checkpoint.save(folder)
    with pytest.raises(InvalidInputError, match=f"{name} is damaged"):
        Checkpoint.open(folder).tensor(NAME)
    outcome = run_program("verify", folder, "--level", "weights", "--quiet")
    assert outcome.code == 7 and name in outcome.err, (outcome.out, outcome.err)
