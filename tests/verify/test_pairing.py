"""Main and draft that were not made together are told apart at level files, whole bundles pass, and
those of earlier versions are not tested."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json, export, quantize, read_json, run_program
from faults import planting
from mtp_checkpoints.tensors.model_identity import recorded_main_identity

MAIN, PAIR = "main: the model that was exported", "draft and main of one bundle"
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"  # of few layers
DEEPSEEK = FIXTURE.parent / "deepseek-v3-tiny"
INDEX = "model.safetensors.index.json"


def items_of(bundle: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The items of check `files`, by name."""
    outcome = run_program("verify", bundle, "--level", "files", "--json", "--quiet", *options)
    assert outcome.code in (0, 7), outcome.err
    return {item["name"]: item for item in json.loads(outcome.out)["checks"][0]["items"]}


def failed(items: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, item in items.items() if item["status"] == "fail"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose files are its own; not to be changed."""
    folder = tmp_path_factory.mktemp("good") / "bundle"
    assert export(FIXTURE, folder, "--link", "copy", "--quiet").code == 0
    return folder


@pytest.fixture
def bundle(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bundle"))


def other_main(folder: Path, bundle: Path) -> Path:
    """A bundle whose main model was trained further: the same headers, other values."""
    other = Path(shutil.copytree(bundle, folder))
    names = planting.names(other / "main", "input_layernorm.weight")
    planting.change_all(other / "main", names, lambda weight: weight * 1.01)
    return other


def test_a_whole_bundle_passes(good: Path) -> None:
    items = items_of(good)
    assert not failed(items)
    identity = read_json(good / "mtp_export.json")["main_identity"]
    assert recorded_main_identity(good / "mtp") == identity
    for name in (MAIN, PAIR):
        assert (items[name]["status"], items[name]["figure"]) == ("pass", identity[:16])


def test_links_and_shard_sizes_do_not_matter(trained_bundle: Path, tmp_path: Path) -> None:
    """A linked export of the bundle's own parts, and its quantization without a change of main."""
    identity = read_json(trained_bundle / "mtp_export.json")["main_identity"]
    copied = shutil.copytree(DEEPSEEK, tmp_path / "source")
    made = export(copied, tmp_path / "linked", "--link", "hardlink", "--target", "lightllm")
    assert made.code == 0, made.err
    rows = ("--base-quant", "keep", "--mtp-quant", "bf16", "--allow-untested-pair")
    made = quantize(trained_bundle, tmp_path / "kept", *rows)
    assert made.code == 0, made.err
    for name in ("linked", "kept"):
        assert read_json(tmp_path / name / "mtp_export.json")["main_identity"] == identity
        assert not failed(items_of(tmp_path / name))


def test_a_main_model_that_was_exchanged(bundle: Path, tmp_path: Path) -> None:
    """By the other bundle's main, and with its manifest too: headers and configs are the same."""
    other = other_main(tmp_path / "other", bundle)
    assert not failed(items_of(other))
    shutil.rmtree(bundle / "main")
    shutil.copytree(other / "main", bundle / "main")
    items = items_of(bundle)
    assert {MAIN} < failed(items) and items[PAIR]["status"] == "pass"
    assert "is not the one that was exported" in items[MAIN]["cause"]
    assert items[MAIN]["subject"] == "main"
    # As somebody would put a bundle together: main and manifest of one, the draft of another.
    shutil.copy(other / "mtp_export.json", bundle)
    items = items_of(bundle)
    assert PAIR in failed(items) and items[MAIN]["status"] == "pass"
    assert "the draft was made with the main model" in items[PAIR]["cause"]
    assert items[PAIR]["subject"] == "mtp"
    assert "`mtp-export graft` pairs the two" in items[PAIR]["cause"]


def test_a_draft_beside_another_main_without_a_manifest(bundle: Path, tmp_path: Path) -> None:
    other = other_main(tmp_path / "other", bundle)
    pair = tmp_path / "pair"
    shutil.copytree(other / "main", pair / "main")
    shutil.copytree(bundle / "mtp", pair / "mtp")
    items = items_of(pair)
    assert failed(items) == {"manifest", PAIR}
    assert items[MAIN]["status"] == "not tested"


def test_bundles_of_earlier_versions_are_not_tested(bundle: Path) -> None:
    edit_json(bundle / "mtp_export.json", lambda manifest: manifest.pop("main_identity"))
    edit_json(bundle / "mtp" / INDEX, lambda index: index["metadata"].pop("main_identity"))
    edit_json(bundle / "mtp_export.json", lambda manifest: planting._sign(bundle, manifest))
    items = items_of(bundle)
    assert not failed(items)
    assert items[MAIN]["status"] == "not tested" and PAIR not in items
    assert "made by an earlier version, or apart" in items[MAIN]["cause"]


def test_headers_alone_are_read_without_checksums(bundle: Path) -> None:
    items = items_of(bundle, "--no-checksums")
    assert "--no-checksums" in items[MAIN]["cause"] and PAIR not in items


def test_a_draft_that_records_none(bundle: Path) -> None:
    edit_json(bundle / "mtp" / INDEX, lambda index: index["metadata"].pop("main_identity"))
    edit_json(bundle / "mtp_export.json", lambda manifest: planting._sign(bundle, manifest))
    items = items_of(bundle)
    assert items[MAIN]["status"] == "pass"
    assert items[PAIR]["cause"] == "the draft records no main model"


@pytest.fixture(scope="module")
def alone(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MTP part, exported alone."""
    folder = tmp_path_factory.mktemp("alone") / "bundle"
    made = export(FIXTURE, folder, "--part", "mtp", "--quiet")
    assert made.code == 0, made.err
    return folder


def test_parts_that_are_alone(tmp_path: Path, good: Path, alone: Path) -> None:
    """Both have the identity of the main model; beside a draft alone, verify says that it is
    missing."""
    made = export(good, tmp_path / "main", "--part", "main", "--quiet")
    assert made.code == 0, made.err
    assert items_of(tmp_path / "main")[MAIN]["status"] == "pass"
    assert PAIR not in items_of(tmp_path / "main")
    identity = read_json(good / "mtp_export.json")["main_identity"]
    assert read_json(alone / "mtp_export.json")["main_identity"] == identity
    assert recorded_main_identity(alone / "mtp") == identity
    for place in (alone, alone / "mtp"):  # as a bundle, and the folder of its draft
        items = items_of(place)
        assert items[PAIR]["status"] == "not tested" and MAIN not in items
        assert f"{identity[:16]}…, is not here" in items[PAIR]["cause"]


def test_a_draft_alone_beside_a_main_model(alone: Path, good: Path, tmp_path: Path) -> None:
    """Its own, one that was trained further, and nothing but headers."""
    draft = ("--mtp", str(alone / "mtp"))
    assert items_of(FIXTURE, *draft)[PAIR]["status"] == "pass"
    items = items_of(other_main(tmp_path / "other", good) / "main", *draft)
    assert items[PAIR]["status"] == "not tested" and PAIR not in failed(items)
    assert "the draft was made with the main model" in items[PAIR]["cause"]
    assert "--no-checksums" in items_of(FIXTURE, *draft, "--no-checksums")[PAIR]["cause"]


def test_a_main_model_that_would_be_converted_is_not_recorded(tmp_path: Path) -> None:
    """A quantized one is another model, and is not there to be known again."""
    rows = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8", "--part", "mtp", "--quiet")
    made = quantize(FIXTURE, tmp_path / "bundle", *rows)
    assert made.code == 0, made.err
    assert recorded_main_identity(tmp_path / "bundle/mtp") is None
    assert PAIR not in items_of(tmp_path / "bundle")
