"""Bundles whose run was stopped: every command that reads one says so, and how to go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cases import export, run_program
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export.bundle.journal import Journal
from mtp_export.commands.unfinished import refuse_unfinished

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as a run leaves it that was stopped before the first shard was done."""
    bundle = tmp_path_factory.mktemp("stopped") / "bundle"
    assert export(FIXTURE, bundle, "--quiet").code == 0
    manifest = json.loads((bundle / "mtp_export.json").read_text())
    (bundle / "mtp_export.json").unlink()
    for part in (MAIN, MTP):
        (bundle / part / "config.json").unlink()
    identity = {"options": manifest["options"], "source": manifest["source"]}
    with Journal(bundle) as journal:
        files = frozenset({"main/a.safetensors", "mtp/b.safetensors", "main/c"})
        journal.begin(identity, files, ("export", "--input-dir", str(FIXTURE)))
    return bundle


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "BUNDLE", "--prompt", "a"),
        ("generate", "BUNDLE", "--dry-run"),
        ("serve", "BUNDLE"),
        ("inspect", "BUNDLE"),
        ("quantize", "BUNDLE", "--output-dir", "OUT"),
        ("launch", "BUNDLE"),
        ("compile", "BUNDLE", "--output", "OUT"),
        ("push", "BUNDLE", "org/name", "--dry-run"),
        ("export", "BUNDLE", "OUT"),
        ("graft", "BUNDLE", str(FIXTURE), "--output-dir", "OUT"),
    ],
    ids=lambda words: words[0],
)
def test_a_stopped_run_is_named_with_the_command_that_goes_on(
    words: tuple[str, ...], stopped: Path, tmp_path: Path
) -> None:
    places = {"BUNDLE": str(stopped), "OUT": str(tmp_path / "out.pt2")}
    outcome = run_program(*(places.get(word, word) for word in words))
    assert outcome.code == 3 and not outcome.out
    again = f"mtp-export export --input-dir {FIXTURE} --output-dir {stopped}"
    assert outcome.err == (
        f"mtp-export: error: {stopped} is unfinished (0 of 2 shards): its run was stopped, or still"
        f" runs. To finish it: {again}\n"
    )


def test_verify_says_it_in_the_same_words(stopped: Path) -> None:
    outcome = run_program("verify", stopped, "--level", "files", "--json")
    items = json.loads(outcome.out)["checks"][0]["items"]
    assert outcome.code == 7 and len(items) == 1
    refused = run_program("inspect", stopped).err
    assert items[0]["cause"] in refused and items[0]["repair"] in refused


def test_the_command_finishes_it(stopped: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(stopped, bundle)
    (bundle / ".mtp_export.journal").unlink()
    refuse_unfinished([bundle, FIXTURE, None, tmp_path / "nothing"])  # none of them is one
    assert "unfinished" not in run_program("inspect", bundle).err


def test_a_finished_bundle_with_a_journal_is_left_to_its_readers(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert export(FIXTURE, bundle, "--quiet").code == 0
    with Journal(bundle) as journal:
        journal.begin({"options": {"part": "both"}, "source": {}}, frozenset())
    refuse_unfinished([bundle])


def test_a_run_that_no_option_makes_again_is_named_alone(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.begin({"options": {"other": 1}, "source": {}}, frozenset())
    assert run_program("launch", tmp_path).err.endswith("Run the command that makes it.\n")


@pytest.mark.parametrize("shares", [("2/3",), ("2/3", "1/3", "3/3")])
def test_shares_are_named_with_the_command_that_goes_on(
    shares: tuple[str, ...], tmp_path: Path
) -> None:
    bundle = tmp_path / "a b"
    for share in shares:
        assert export(FIXTURE, bundle, "--quiet", "--share", share).code == 0
    place = f"'{bundle}'"
    said = f"{bundle} is unfinished: of its 3 shares, 2 are missing or still made (1/3, 3/3)."
    made = f"mtp-export export --input-dir {FIXTURE} --quiet"
    command = f"{made} --output-dir {place} --share 1/3"
    if len(shares) == 3:
        said = f"{bundle} is unfinished: its 3 shares are made and not put together."
        command = f"mtp-export finish {place}"
    refused = f"mtp-export: error: {said} To finish it: {command}\n"
    for words in (("inspect", bundle), ("generate", bundle, "--prompt", "a"), ("launch", bundle)):
        outcome = run_program(*words)
        assert (outcome.code, outcome.err) == (3, refused)
    (item,) = json.loads(run_program("verify", bundle, "--level", "files", "--json").out)["checks"][
        0
    ]["items"]
    assert item["cause"] == said.rstrip(".") and item["repair"] == command
    if len(shares) == 3:
        assert run_program("finish", bundle, "--quiet").code == 0
        assert run_program("inspect", bundle).code == 0


def test_a_share_beside_a_whole_run_is_refused_with_the_command_of_that(stopped: Path) -> None:
    outcome = export(FIXTURE, stopped, "--share", "1/2")
    again = f"mtp-export export --input-dir {FIXTURE} --output-dir {stopped}"
    assert outcome.code == 8 and "was not divided into shares" in outcome.err
    assert outcome.err.endswith(f" or finish that run by its own command: {again}\n")
