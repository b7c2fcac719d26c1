"""Pushes that succeed: every byte arrives, nothing twice, and a commit lists all of it at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from cases import read_json, tree
from hub_server import HubServer
from mtp_runtime.drafters import extra_drafts
from publish.pushing import NAME, content, facts, is_untouched, push, requests, sent_shards

MANIFEST, CARD = "mtp_export.json", "README.md"


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        name: data
        for name, data in files.items()
        if name != CARD and not name.startswith("verification/")
    }


def test_the_whole_bundle_arrives_and_a_second_push_sends_nothing(
    hub: HubServer, exported: Path
) -> None:
    found = facts(exported)
    assert without_card(content(hub)) == tree(exported / "bundle")
    assert found["commit"] == hub.repositories[NAME].revisions["main"]
    assert found["checked_files"] == len(content(hub)) == len(found["uploaded"])
    assert (found["new"], found["private"], found["verified"]) == (True, False, "pass")
    hub.log.clear()
    again = facts(exported)
    assert (again["commit"], again["uploaded"], again["new"]) == (found["commit"], [], False)
    assert sorted(again["kept"]) == sorted(found["uploaded"])
    assert not requests(hub, "PUT") and not requests(hub, "POST")


def test_weights_come_first_and_one_commit_lists_everything(hub: HubServer, exported: Path) -> None:
    seen: list[bool] = []
    hub.during_upload = lambda: seen.append(is_untouched(hub))
    push(exported)
    kinds = [r.path for r in hub.log if r.method in ("PUT", "POST")]
    (commit,) = [n for n, path in enumerate(kinds) if "/commit/" in path]
    assert all(seen) and len(seen) == sent_shards(hub) > 5
    assert commit > max(n for n, path in enumerate(kinds) if path.startswith("/upload/"))


@pytest.mark.parametrize("part", [(), ("--part", "both")])
@pytest.mark.parametrize("method", extra_drafts())
def test_a_draft_of_the_bundle_arrives_too(
    method: str, part: tuple[str, ...], hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported / "bundle", tmp_path / "bundle")
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle / "mtp", bundle / method)
    manifest = read_json(bundle / MANIFEST)
    manifest["parts"][method] = manifest["parts"]["mtp"]
    manifest["options"]["calibrate"] = {"method": "gptq", "texts": 8}
    manifest["options"]["tune"] = {"mtp": {"k": 3}, method: {"k": 2}}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    found = facts(tmp_path, "--unverified", *part)
    assert without_card(content(hub)) == tree(bundle)
    assert found["parts"] == ["main", "mtp", method]
    card = content(hub)[CARD].decode()
    assert f"with a draft for `{method}`" in card
    assert f"`calibrate` gptq, `tune` `mtp`, `{method}`." in card


@pytest.mark.parametrize("part", ["mtp", "main"])
def test_one_part_lies_at_the_top(part: str, hub: HubServer, exported: Path) -> None:
    found = facts(exported, "--part", part, "--private")
    assert without_card(content(hub)) == tree(exported / "bundle" / part)
    assert found["parts"] == [part] and found["private"]
    assert hub.repositories[NAME].private


def test_large_files_are_sent_in_parts(hub: HubServer, exported: Path) -> None:
    hub.part_bytes = 20_000
    push(exported)
    assert without_card(content(hub)) == tree(exported / "bundle")
    assert len(requests(hub, "PUT", "part=2")) > 4


def test_a_dry_run_changes_nothing_and_needs_no_token(
    hub: HubServer, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    found = facts(exported, "--dry-run")
    shards = list((exported / "bundle").rglob("*.safetensors"))
    assert found["uploaded_bytes"] > sum(path.stat().st_size for path in shards)
    assert found["new"] and "commit" not in found
    assert not hub.repositories and not requests(hub, "POST") and not requests(hub, "PUT")
    shown = push(exported, "--dry-run")
    assert "Plan for hf://org/name" in shown.out and "Nothing was uploaded." in shown.out


@pytest.mark.parametrize("allowed", [True, False])
def test_shards_of_the_base_model_are_copied_where_the_hub_can(
    allowed: bool, hub: HubServer, exported: Path
) -> None:
    hub.serve("acme/base", exported / "source")
    hub.repositories["acme/base"].is_xet = True
    if not allowed:
        hub.plant("no copies")
    manifest = read_json(exported / "bundle" / MANIFEST)["parts"]
    linked = {f"{part}/{name}" for part in manifest
              for name, shard in manifest[part]["shards"].items() if "link" in shard}  # fmt: skip
    planned = facts(exported, "--base-model", "acme/base", "--dry-run")
    assert set(planned["copied"]) == linked
    found = facts(exported, "--base-model", "acme/base")
    assert set(found["copied"]) == (linked if allowed else set())
    assert without_card(content(hub)) == tree(exported / "bundle")
    shards = [name for name in content(hub) if name.endswith(".safetensors")]
    tokenizer = 1  # the same for both parts
    sent = len(shards) - (len(linked) if allowed else 0)
    assert sent_shards(hub) == sent + tokenizer


def test_shards_that_a_repository_has_elsewhere_are_copied_in_it(
    hub: HubServer, exported: Path
) -> None:
    push(exported, "--part", "mtp")
    hub.log.clear()
    found = facts(exported, "--overwrite")
    assert set(found["copied"]) == {n for n in content(hub) if "mtp/model-" in n}
    assert {path.name for path in (exported / "bundle/mtp").glob("*.safetensors")} <= set(
        found["removed"]
    )
    assert without_card(content(hub)) == tree(exported / "bundle")
    assert sent_shards(hub) == 4


def test_overwrite_replaces_another_model_in_one_commit(
    hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    push(exported)
    old = hub.repositories[NAME].revisions["main"]
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    assert push(folder, "--unverified").code == 8  # its card says something else
    found = facts(folder, "--part", "main", "--overwrite")
    assert without_card(content(hub)) == tree(exported / "bundle/main")
    assert {"mtp/config.json", "main/config.json", MANIFEST} <= set(found["removed"])
    assert old in hub.repositories[NAME].commits


def test_xet_takes_the_shards_where_the_server_has_it(
    hub: HubServer, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.xet_store = tmp_path / "xet"
    hub.xet_store.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    push(exported, name="org/without")
    assert requests(hub, "PUT")
    hub.log.clear()
    arguments = ["push", exported / "bundle", NAME, "--report", exported / "report.json", "--quiet"]
    # A process of its own: the Xet client starts threads, and other tests fork.
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "mtp_export", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not requests(hub, "PUT") and not requests(hub, "POST", "objects/batch")
    listed = hub.repositories[NAME].commits[hub.repositories[NAME].revisions["main"]]
    shards = {n: f for n, f in listed.items() if n.endswith(".safetensors")}
    local = tree(exported / "bundle")
    assert {n: f.size for n, f in shards.items()} == {n: len(local[n]) for n in shards}
    assert sum(p.stat().st_size for p in hub.xet_store.rglob("*") if p.is_file()) > 100_000
