"""Experts that a module stores in one tensor are judged one by one, as those that are apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import run_program
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from verify.foreign import GLM, Tensors, as_is, rewritten, without

EXPERTS = "mtp.layers.0.mlp.experts."
FUSED = GATE_UP, DOWN = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused") / "source"
    config = SMALL_CONFIGS["qwen3_5_moe_text"] | {"moe_intermediate_size": 64}
    main = [name.replace("mtp", "model").replace("0", f"{n}") for name in FUSED for n in range(4)]
    return write_checkpoint(folder, config, names=(*FUSED, *main))


def failures(folder: Path) -> dict[str, dict[str, Any]]:
    """Failed items of check `ledger` by name."""
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    (ledger,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "ledger")
    found = {item["name"]: item for item in ledger["items"] if item["status"] == "fail"}
    assert outcome.code == (7 if found else 0), outcome.err
    return found


def up_lost(stored: Tensors) -> None:
    stored[GATE_UP][:, 64:] = 0


def twice(stored: Tensors) -> None:
    stored[DOWN][5] = stored[DOWN][2]


def main_layers(stored: Tensors) -> None:
    """The experts of a main layer, all of them."""
    for name in FUSED:
        stored[name] = stored[name.replace("mtp.layers.0", "model.layers.3")].clone()


def columns_lost(stored: Tensors) -> None:
    stored[DOWN][3, :, 32:] = 0


TWICE = "no matrix of a layer is stored twice"


@pytest.mark.parametrize(
    ("damage", "item", "subject"),
    [
        (up_lost, "mtp: no constant tensor", f"{EXPERTS}0.up_proj.weight"),
        (columns_lost, "mtp: no block rounded to zero", f"{EXPERTS}3.down_proj.weight"),
        (twice, TWICE, f"{EXPERTS}5.down_proj.weight"),
        (main_layers, TWICE, f"{EXPERTS}0.gate_proj.weight"),
    ],
)
def test_damage_is_found_and_mended(
    damage: Callable[[Tensors], None], item: str, subject: str, source: Path, tmp_path: Path
) -> None:
    found = failures(rewritten(source, tmp_path / "damaged", damage))[item]
    assert found["subject"] == subject
    assert "mtp-export graft" in found["repair"]
    last = "down_proj" if "down" in subject else "gate_up_proj"
    assert f"{EXPERTS}{last}" in found["data"]["fused_in"]


def test_experts_are_named_by_their_numbers_and_with_what_holds_them(
    source: Path, tmp_path: Path
) -> None:
    def lost(stored: Tensors) -> None:
        stored[DOWN][2:5] = 0

    outcome = run_program("verify", rewritten(source, tmp_path / "zero", lost), "--level=weights")
    told = " ".join(outcome.out.split())
    also = f"likewise {EXPERTS}3-4.down_proj.weight (stored fused, in {DOWN})"
    assert f"{EXPERTS}2.down_proj.weight is constant (zero)" in told and also in told, told


def test_sound_ones_pass(source: Path, tmp_path: Path) -> None:
    assert not failures(rewritten(source, tmp_path / "good", as_is))


def test_a_hole_over_fused_experts_is_told_with_its_bytes(source: Path, tmp_path: Path) -> None:
    """Once, though they are judged one by one."""
    folder = rewritten(source, tmp_path / "hole", as_is)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    places = sorted(
        one["data_offsets"][0]
        for name, one in json.loads(data[8:header]).items()
        if name.startswith(("model.layers.1.mlp", "model.layers.2.mlp.e"))
    )
    start, stop = header + places[0], header + places[-1] + 3000
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    (item,) = failures(folder).values()
    assert f"is zero from byte {start:,} of {len(data):,} to {stop:,}, " in item["cause"]


def test_ones_at_the_end_of_a_file_that_was_not_written_are_named_once(
    source: Path, tmp_path: Path
) -> None:
    """The end of the file is told, and not each expert in it."""
    folder = rewritten(source, tmp_path / "cut", as_is)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    places = {
        name: one["data_offsets"][0]
        for name, one in json.loads(data[8 : 8 + header]).items()
        if name != "__metadata__"
    }
    start = 8 + header + places["model.layers.3.mlp.experts.gate_up_proj"]
    path.write_bytes(data[:start] + bytes(len(data) - start))
    assert [*failures(folder)] == ["files written to their end"]


@pytest.mark.parametrize("fused", [True, False])
def test_lost_ones_are_named_as_the_main_layers_have_theirs(
    fused: bool, source: Path, tmp_path: Path
) -> None:
    """Once, and not each expert's matrices."""
    layer = "mtp.layers.0.mlp" if fused else "model.layers.3.mlp"
    whole = source if fused else GLM
    folder = rewritten(whole, tmp_path / "lost", without(f"{layer}.experts."))
    outcome = run_program("verify", folder, "--level", "files")
    text = " ".join(outcome.out.split())
    single = ", ".join(f"{layer}.experts.*.{one}_proj.weight" for one in ("gate", "up", "down"))
    names = f"{GATE_UP}, {DOWN}" if fused else single
    assert outcome.code == 7 and f"main layers have for theirs: {names}" in text
    assert f"the routed experts of {layer}, all 8, are missing, and" in text
    assert "is missing" not in text and "mtp-export graft" in text


def test_experts_of_one_rank_alone_are_no_other_models(source: Path, tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        for name in FUSED:
            stored[name] = stored[name][:4].clone()

    folder = rewritten(source, tmp_path / "rank", change)
    outcome = run_program("verify", folder, "--level", "files", "--quiet")
    assert outcome.code == 7 and "hold 4 of 8 experts: the others were lost" in outcome.err
    assert "another model" not in outcome.err
