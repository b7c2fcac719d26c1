"""Bundles of Qwen3-Next and Qwen3.5: both layouts of the MTP module's experts, a vision tower that
is carried, and modules that others lost, found out and grafted back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from cases import Outcome, edit_json, export, read_json, read_tensors, run_program
from faults.small_model import family_config, write_dense

FUSED = ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj")
CARRIED = "main: tensors of other parts"
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Next": ("qwen3_next", ()),
    "3.5 dense, tied": ("qwen3_5", ()),
    "3.5 experts": ("qwen3_5_moe", ()),
    "3.6 experts": ("qwen3_5_moe", FUSED),
}


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model_type, names = KINDS[request.param]
    return write_dense(tmp_path / "source", config=family_config(model_type), names=names)


def without_mtp(source: Path, folder: Path) -> Path:
    """The source as quantizers leave it that know main models alone: announced, and not there."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    kept = {name: one for name, one in read_tensors(source).items() if not is_mtp(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def verified(place: Path, *options: object) -> tuple[Outcome, dict[str, dict[str, Any]]]:
    outcome = run_program("verify", place, "--level", "weights", "--json", "--quiet", *options)
    report = json.loads(outcome.out)
    return outcome, {item["name"]: item for check in report["checks"] for item in check["items"]}


def test_both_parts_hold_every_tensor(source: Path, tmp_path: Path) -> None:
    """The vision tower is in the main part, and neither layout of experts is changed."""
    bundle = tmp_path / "bundle"
    assert export(source, bundle, "--link", "copy", "--quiet").code == 0
    original = read_tensors(source)
    main, mtp = read_tensors(bundle / "main"), read_tensors(bundle / "mtp")
    assert mtp.keys() == set(filter(is_mtp, original))
    assert main.keys() == original.keys() - mtp.keys()
    assert all(tensor.equal(original[name]) for name, tensor in (main | mtp).items())
    vision = [name for name in main if name.startswith("model.visual.")]
    assert bool(vision) == ("vision_config" in read_json(source / "config.json"))
    outcome, items = verified(bundle, "--source", source)
    assert outcome.code == 0, outcome.err
    assert items["MTP layers advertised"]["figure"] == "1"
    assert items["mtp: norms as the main model's"]["status"] == "pass"


def test_a_lost_module_is_found_out_and_grafted_back(source: Path, tmp_path: Path) -> None:
    lost = without_mtp(source, tmp_path / "lost")
    outcome, items = verified(lost, "--source", source)
    assert outcome.code == 7
    presence = items["MTP modules announced and there"]
    assert (presence["status"], presence["figure"]) == ("fail", "0 of 1")
    repair = presence["repair"]
    assert repair == f"mtp-export graft --main {lost} --mtp {source} --output-dir BUNDLE"
    bundle = tmp_path / "bundle"
    repaired = run_program(*repair.replace("BUNDLE", str(bundle)).split()[1:])
    assert repaired.code == 0, repaired.err
    mtp = read_tensors(bundle / "mtp")
    assert mtp.keys() == set(filter(is_mtp, read_tensors(source)))
    outcome, _ = verified(bundle)
    assert outcome.code == 0, outcome.err


def test_an_uncounted_module_is_counted_after_a_graft(tmp_path: Path) -> None:
    """A quantizer that dropped the field too: the grafted main config has it where it was."""
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    lost = without_mtp(source, tmp_path / "lost")
    field = "mtp_num_hidden_layers"
    edit_json(lost / "config.json", lambda config: config["text_config"].pop(field))
    _, items = verified(lost)
    assert items["MTP modules announced and there"]["status"] == "not tested"
    bundle = tmp_path / "bundle"
    grafted = run_program(
        "graft", "--main", lost, "--mtp", source, "--output-dir", bundle, "--quiet"
    )
    assert grafted.code == 0, grafted.err
    for part in ("main", "mtp"):
        assert read_json(bundle / part / "config.json")["text_config"][field] == 1


def test_a_module_in_place_is_not_grafted_over(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    refused = run_program("graft", "--main", source, "--mtp", other, "--output-dir", tmp_path / "b")
    assert refused.code == 3
    assert "no tensor of mtp" in refused.err and "has an MTP layer already" in refused.err


def test_a_module_of_which_tensors_lack_is_no_source(source: Path, tmp_path: Path) -> None:
    tensors = read_tensors(source)
    lost = next(name for name in reversed(tensors) if is_mtp(name) and "experts" not in name)
    folder = tmp_path / "part"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused = export(folder, tmp_path / "bundle")
    assert refused.code == 3 and lost in refused.err


@pytest.mark.parametrize(("field", "code"), [("mtp_num_hidden_layers", 4), (None, 4)])
def test_a_source_without_a_module_is_told_where_it_would_be(
    field: str | None, code: int, tmp_path: Path
) -> None:
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    lost = without_mtp(source, tmp_path / "lost")
    if field is not None:
        edit_json(lost / "config.json", lambda config: config["text_config"].update({field: 0}))
    refused = export(lost, tmp_path / "bundle")
    assert refused.code == code
    assert "text_config.mtp_num_hidden_layers" in refused.err and "(mtp.*)" in refused.err


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda tensors, name: tensors.update({name: 2 * tensors[name]}), "is not the source's"),
        (lambda tensors, name: tensors.pop(name), "of the source is not there"),
        (lambda tensors, name: tensors.update({f"{name}.x": 2 * tensors[name]}), "no counterpart"),
    ],
    ids=["changed", "lost", "added"],
)
def test_a_vision_tower_is_compared_with_the_source(
    how: Callable[[dict[str, Any], str], object], words: str, tmp_path: Path
) -> None:
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    tensors, name = read_tensors(source), "model.visual.pos_embed.weight"
    outcome, items = verified(source, "--source", source)
    assert (outcome.code, items[CARRIED]["figure"]) == (0, "1 tensor, 256 B")
    how(tensors, name)
    folder = without_mtp(source, tmp_path / "other")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    outcome, items = verified(folder, "--source", source)
    assert outcome.code == 7
    assert items[CARRIED]["status"] == "fail" and words in items[CARRIED]["cause"]


def test_a_nested_field_that_was_changed_is_named_alone(tmp_path: Path) -> None:
    """Of the draft beside main, and of a checkpoint beside its source."""
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    bundle = tmp_path / "bundle"
    assert export(source, bundle, "--quiet").code == 0

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["rms_norm_eps"] = 0.5

    edit_json(bundle / "mtp/config.json", change)
    _, items = verified(bundle, "--source", source)
    for name in ("draft and main of one model: configs", "config is the source's"):
        assert items[name]["status"] == "fail"
        assert "text_config.rms_norm_eps is 0.5" in items[name]["cause"]
    assert items["main: tokenizer"]["status"] == "pass"


def test_norms_that_had_one_added_are_named(tmp_path: Path) -> None:
    """Norms of 1 + w, of which a conversion stored 1 + w: engines add one again."""
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    tensors = read_tensors(source)
    name = "mtp.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name] + 1
    folder = without_mtp(source, tmp_path / "shifted")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    outcome, items = verified(folder)
    assert outcome.code == 7
    item = items["mtp: norms as the main model's"]
    assert item["status"] == "fail" and name in item["cause"]


def test_norms_of_gated_delta_nets_are_of_their_own_kind(tmp_path: Path) -> None:
    """They lie around one in a model whose others lie around zero."""
    source = write_dense(tmp_path / "source", config=family_config("qwen3_5"))
    tensors = read_tensors(source)
    own = [name for name in tensors if name.endswith("linear_attn.norm.weight")]
    assert len(own) == 3 and all(float(tensors[name].mean()) > 0.8 for name in own)
    outcome, _ = verified(source)
    assert outcome.code == 0, outcome.err
