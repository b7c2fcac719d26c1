"""Damaged and good checkpoints of others: the right verdict at the lowest level that can tell."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but, run_program
from verify.foreign_damages import (
    Damage,
    config,
    experts_pruned,
    lose,
    pruned,
    quantization,
    unquantized_under_its_config,
)
from verify.foreign_folders import DAMAGED, GOOD, Folder, deepseek, glm
from verify.foreign_sources import GLM, Checkpoint


def verified(folder: Path, level: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the items that failed."""
    outcome = run_program("verify", folder, "--level", level, "--json", "--quiet")
    assert outcome.code in (0, 7), outcome.err
    checks = json.loads(outcome.out)["checks"]
    items = [item for check in checks for item in check["items"]]
    return outcome.code, [item for item in items if item["status"] == "fail"]


def judged(level: str) -> list[Folder]:
    return [one for one in DAMAGED if one.level == level]


def name_of(case: Folder) -> str:
    return case.name


def assert_told(case: Folder, folder: Path) -> None:
    code, failed = verified(case.write(folder / "checkpoint"), case.level)
    assert code == 7
    told = "\n".join(f"{item['subject']} {item['cause']} {item['repair']}" for item in failed)
    assert [words for words in case.words if not re.search(words, told)] == [], told


@pytest.mark.parametrize("case", judged("files"), ids=name_of)
def test_headers_tell(tmp_path: Path, case: Folder) -> None:
    assert_told(case, tmp_path)


@pytest.mark.parametrize(
    "case", nightly_but(judged("weights")[::4], judged("weights")), ids=name_of
)
def test_weights_tell(tmp_path: Path, case: Folder) -> None:
    assert_told(case, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("case", judged("run"))
def test_drafts_tell(tmp_path: Path, case: Folder) -> None:
    assert_told(case, tmp_path)


def test_a_folder_of_mtp_that_has_none_is_named(tmp_path: Path) -> None:
    folder = DAMAGED[0].write(tmp_path / "checkpoint")
    outcome = run_program("verify", folder, "--mtp", folder, "--level", "files", "--quiet")
    assert outcome.code == 7
    assert f"{folder}, which --mtp names, has no tensor of any" in outcome.err


@pytest.mark.parametrize("case", nightly_but(GOOD[::6], GOOD), ids=name_of)
def test_good_ones_pass(tmp_path: Path, case: Folder) -> None:
    code, failed = verified(case.write(tmp_path / "checkpoint"), "weights")
    assert (code, [item["name"] for item in failed]) == (0, [])


def test_lists_are_corrected_in_the_field_that_is_there(tmp_path: Path) -> None:
    (case,) = (one for one in DAMAGED if one.name.startswith("int4 in compression_config"))
    folder = case.write(tmp_path / "checkpoint")
    outcome = run_program("verify", folder, "--level", "files", "--quiet")
    assert "in compression_config of config.json: " in outcome.err.replace("\n", " ")
    (item,) = verified(folder, "files")[1]
    written = json.loads((folder / "config.json").read_text())
    written["compression_config"] |= json.loads(f"{{{item['repair']}}}")
    (folder / "config.json").write_text(json.dumps(written))
    assert verified(folder, "files") == (0, [])


def test_a_named_cause_is_not_followed_by_its_consequences(tmp_path: Path) -> None:
    """Where values told, drafts that are refused have no other cause."""
    (case,) = (one for one in DAMAGED if one.name == "AWQ's words in plain order")
    folder = case.write(tmp_path / "checkpoint")
    few = ("--max-new-tokens", "16", "--k", "1")
    outcome = run_program("verify", folder, *few, "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    failed = {i["name"]: i for c in checks for i in c["items"] if i["status"] == "fail"}
    order = "mtp: codes in the order of their scales"
    assert failed.keys() == {order, "sanity band of draft 1"}
    assert failed["sanity band of draft 1"]["cause"].endswith(f"as check ledger, {order} says")
    told = " ".join(item["cause"] for item in failed.values())
    assert "experts" not in told.replace(".experts.", "")


def test_what_values_alone_do_not_tell_is_said(tmp_path: Path) -> None:
    """A sound layer of a sister model passes where nothing runs."""
    (case,) = (one for one in DAMAGED if one.name == "of another training")
    folder = case.write(tmp_path / "checkpoint")
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    items = {
        item["name"]: item for check in json.loads(outcome.out)["checks"] for item in check["items"]
    }
    assert outcome.code == 0
    why = items["weights against the source"]["cause"]
    assert "another finetune or merge" in why and "acceptance at level run tells" in why


def test_an_mtp_layer_among_the_main_ones_fails_once(tmp_path: Path) -> None:
    """By names it may be whole; its values tell that a merge wrote over it."""
    (case,) = (one for one in DAMAGED if "that a merge inserted" in one.name)
    folder = case.write(tmp_path / "checkpoint")
    _, failed = verified(folder, "files")
    assert [item["name"] for item in failed] == ["MTP modules announced and there"]
    told = " ".join(run_program("verify", folder, "--level", "weights").out.split())
    assert "a merge wrote a main layer over the module" in told
    assert "which --level weights tells" not in told


def test_no_graft_is_advised_that_would_be_refused(tmp_path: Path) -> None:
    """Experts were pruned from the main layers, and the layer that had all of them was lost."""

    def damage(checkpoint: Checkpoint) -> None:
        experts_pruned("layers", 6, said=6)(checkpoint)
        lose("")(checkpoint)

    folder = Folder("", glm(), damage, "files", ()).write(tmp_path / "checkpoint")
    words = ("verify", folder, "--level", "files", "--source", GLM, "--json", "--quiet")
    (item,) = (
        item
        for check in json.loads(run_program(*words).out)["checks"]
        for item in check["items"]
        if item["status"] == "fail"
    )
    assert "Experts were pruned from the main model" in item["cause"]
    assert item["repair"] == ""


def test_no_field_is_to_blame_where_nothing_is_quantized(tmp_path: Path) -> None:
    def damage(checkpoint: Checkpoint) -> None:
        unquantized_under_its_config(checkpoint)
        quantization(weight_block_size=[64, 64], ignored_layers=["model"])(checkpoint)

    folder = Folder("", deepseek, damage, "files", ()).write(tmp_path / "checkpoint")
    assert verified(folder, "files") == (0, [])


def test_a_field_that_differs_from_the_source_is_told_once(tmp_path: Path) -> None:
    folder = Folder("", glm(), config(rms_norm_eps=0.1), "weights", ()).write(tmp_path / "a")
    outcome = run_program("verify", folder, "--level", "weights", "--source", GLM, "--quiet")
    assert outcome.code == 7
    assert outcome.err.count("rms_norm_eps is 0.1 in config.json") == 1


MENDS: dict[str, Damage] = {
    "experts pruned from the main layers alone": pruned(r"layers\.3\.", 6),
    "experts pruned from the MTP layer alone": experts_pruned("layers", 6, said=6),
    "experts pruned from both, and counted as before": config(n_routed_experts=6),
    "bf16 under the quantization_config that it had before": config(quantization_config=None),
    "a permutation that desc_act false makes engines pass over": quantization(desc_act=True),
}


@pytest.mark.parametrize("name", MENDS)
def test_what_is_advised_mends_it(tmp_path: Path, name: str) -> None:
    (case,) = (one for one in DAMAGED if one.name == name)

    def mended(checkpoint: Checkpoint) -> None:
        case.damage(checkpoint)
        MENDS[name](checkpoint)

    folder = replace(case, damage=mended).write(tmp_path / "checkpoint")
    assert verified(folder, "weights") == (0, [])


@pytest.mark.parametrize(
    "name",
    [
        "experts pruned from the MTP layer alone",
        "channels of the MTP layer that are all in group 0",
        "the main model's last norm as hnorm",
        "one half of eh_proj for both",
    ],
)
def test_the_advised_graft_mends_it(tmp_path: Path, name: str) -> None:
    (case,) = (one for one in DAMAGED if one.name == name)
    _, failed = verified(case.write(tmp_path / "checkpoint"), case.level)
    (command,) = {item["repair"] for item in failed}
    program, *words = shlex.split(command)
    places = {"ORIGINAL": GLM, "BUNDLE": tmp_path / "bundle"}
    outcome = run_program(*(places.get(word, word) for word in words))
    assert (program, outcome.code) == ("mtp-export", 0), outcome.err
    assert verified(tmp_path / "bundle", "weights") == (0, [])
