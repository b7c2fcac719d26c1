"""Bundles of a tuned bundle: drafts in folders of their own and records of trainings come along, or
are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bundle.commands import check_nothing_looks_whole
from cases import (
    Outcome,
    edit_json,
    export,
    looks_finished,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_in_a_fork,
    run_program,
    tree,
)
from quantized_by_others import write
from runtime.drafts import ffn_layout, write_eagle3, write_heads

MANIFEST = "mtp_export.json"
DRAFTS = ("eagle3", "parallel_heads")
TRAININGS = {"mtp": {"steps": 3}, "eagle3": {"steps": 2}}
INT8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")


@pytest.fixture(scope="module")
def module_bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned") / "bundle"
    assert export(pristine, folder, "--link", "copy", "--quiet").code == 0
    config = read_json(folder / "main/config.json")
    write_eagle3(folder / "eagle3", config)
    write_heads(
        folder / "parallel_heads",
        ffn_layout(hidden=config["hidden_size"], vocab=config["vocab_size"]),
    )
    edit_json(folder / MANIFEST, lambda manifest: manifest["options"].update(tune=TRAININGS))
    return folder


@pytest.fixture
def bundle(module_bundle: Path, tmp_path: Path) -> Path:
    """A bundle with two drafts in folders of their own, and records of two trainings."""
    return Path(shutil.copytree(module_bundle, tmp_path / "bundle"))


def in_shares(source: Path, output: Path, *options: object) -> Outcome:
    """An export in two shares, and their end."""
    for share in ("2/2", "1/2"):
        assert export(source, output, "--share", share, *options).code == 0
    return run_program("finish", output, *options)


COMMANDS: dict[str, Callable[[Path, Path], Outcome]] = {
    "export": export,
    "copies": lambda source, output: export(source, output, "--link", "copy"),
    "another layout": lambda source, output: export(source, output, "--target", "xllm"),
    "quantize": lambda source, output: quantize(source, output, *INT8),
    "shares": in_shares,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_drafts_and_trainings_come_along(name: str, bundle: Path, output: Path) -> None:
    outcome = COMMANDS[name](bundle, output)
    assert outcome.code == 0, outcome.err
    assert "left out" not in outcome.err
    manifest = read_json(output / MANIFEST)
    assert set(manifest["parts"]) == {"main", "mtp", *DRAFTS}
    assert manifest["options"]["tune"] == TRAININGS
    assert "eagle3/model.safetensors" in manifest["source"]["shards"]
    for draft in DRAFTS:
        before, after = read_tensors(bundle / draft), read_tensors(output / draft)
        assert before.keys() == after.keys()
        assert all(before[each].equal(after[each]) for each in before)
        assert read_json(output / draft / "config.json") == read_json(
            bundle / draft / "config.json"
        )
        shard = output / draft / "model.safetensors"
        assert shard.samefile(bundle / draft / shard.name) == (name != "copies")
    items = file_items(output)
    for draft in DRAFTS:
        for what in ("files", "shards", "checksums", "headers and index"):
            assert items[f"{draft}: {what}"]["status"] == "pass"


def file_items(output: Path) -> dict[str, Any]:
    report = json.loads(run_program("verify", output, "--level", "files", "--json").out)
    return {item["name"]: item for check in report["checks"] for item in check["items"]}


@pytest.mark.parametrize(("part", "kept"), [("mtp", {"mtp": {"steps": 3}}), ("main", None)])
def test_a_single_part_leaves_drafts_out_and_says_so(
    part: str, kept: object, bundle: Path, output: Path
) -> None:
    said = [
        f"{bundle / draft} is left out: drafts in folders of their own go with --part both."
        for draft in DRAFTS
    ]
    planned = export(bundle, output, "--part", part, "--dry-run", "--json")
    assert json.loads(planned.out)["remarks"] == said and planned.err == ""
    made = export(bundle, output, "--part", part)
    shown = "".join(made.err.split())  # however a terminal wraps it
    assert all("".join(line.split()) in shown for line in said)
    manifest = read_json(output / MANIFEST)
    assert set(manifest["parts"]) == {part}
    assert manifest["options"].get("tune") == kept


def test_a_draft_of_another_format_is_left_out_and_named(bundle: Path, output: Path) -> None:
    """As Medusa's file of heads; one that the manifest lists has lost its weights, an error."""
    heads = bundle / "parallel_heads"
    (heads / "model.safetensors").rename(heads / "medusa_lm_head.safetensors")
    outcome = export(bundle, output, "--json")
    (said,) = json.loads(outcome.out)["remarks"]
    assert said.startswith(f"{heads} is left out: it has no weights in a format of safetensors")
    assert set(read_json(output / MANIFEST)["parts"]) == {"main", "mtp", "eagle3"}
    assert set(read_json(output / MANIFEST)["options"]["tune"]) == {"mtp", "eagle3"}
    entry: dict[str, Any] = {"shards": {}, "files": {}}
    edit_json(bundle / MANIFEST, lambda manifest: manifest["parts"].update(parallel_heads=entry))
    listed = export(bundle, output, "--overwrite")
    assert listed.code == 3 and str(heads) in listed.err


def test_a_draft_elsewhere_is_refused(bundle: Path, output: Path, tmp_path: Path) -> None:
    (bundle / "eagle3").rename(tmp_path / "eagle3")
    (bundle / "eagle3").symlink_to(tmp_path / "eagle3")
    outcome = export(bundle, output)
    assert outcome.code == 3 and "eagle3" in outcome.err
    assert not output.exists()


def test_other_records_of_trainings_are_refused(bundle: Path, output: Path) -> None:
    edit_json(bundle / MANIFEST, lambda manifest: manifest["options"].update(tune={"draft": "mtp"}))
    outcome = export(bundle, output)
    assert outcome.code == 3 and "damaged at options → tune → draft" in outcome.err


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("step", nightly_but([29], [1, 29]))
def test_an_export_with_drafts_resumes(step: int, bundle: Path, tmp_path: Path) -> None:
    assert export(bundle, tmp_path / "whole", "--link", "copy", "--quiet").code == 0
    whole = tree(tmp_path / "whole")
    died = 0
    for call_number in range(1, 2000, step):
        output = tmp_path / f"died-at-{call_number}"
        run = partial(export, bundle, output, "--link", "copy", "--quiet")
        if run_in_a_fork(run, call_number) == 0:
            break
        died += 1
        check_nothing_looks_whole(output, [whole])
        if not looks_finished(output):
            outcome = run()
            assert outcome.code == 0, (call_number, outcome.err)
        assert tree(output) == whole, call_number
        shutil.rmtree(output)
    assert died > 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_unfinished_export_knows_the_config_of_a_draft(bundle: Path, output: Path) -> None:
    run = partial(export, bundle, output, "--link", "copy", "--quiet")
    assert run_in_a_fork(run, 40) == 9
    edit_json(bundle / "eagle3/config.json", lambda config: config.update(more=1))
    outcome = run()
    assert outcome.code == 8 and "The source changed" in outcome.err


def test_a_graft_keeps_what_its_layer_comes_with(
    bundle: Path, pristine: Path, output: Path
) -> None:
    """The layer was trained; the drafts are for the model that the main one was made from."""
    main = output.parent / "main"
    write(pristine, main, "awq")
    outcome = run_program("graft", "--main", main, "--mtp", bundle, "--output-dir", output)
    assert outcome.code == 0 and "left out" not in outcome.err
    manifest = read_json(output / MANIFEST)
    assert set(manifest["parts"]) == {"main", "mtp", *DRAFTS}
    assert manifest["options"]["tune"] == TRAININGS
    assert "mtp/eagle3/model.safetensors" in manifest["source"]["shards"]
    items = file_items(output)
    assert {items[f"{draft}: checksums"]["status"] for draft in DRAFTS} == {"pass"}
