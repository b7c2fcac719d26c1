"""Pushes that are refused: one paragraph, the right exit code, and nothing on the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import edit_json, run_program
from hub_server import HubServer
from publish.pushing import NAME, push

Change = Callable[[Path], object]


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def _truncate(folder: Path) -> None:
    path = folder / "bundle/main/model-00004-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _secret_link(folder: Path) -> None:
    (folder / "secret").write_text("{}")
    path = folder / "bundle/mtp/generation_config.json"
    path.unlink()
    path.symlink_to(folder / "secret")


def _part_elsewhere(folder: Path) -> None:
    (folder / "bundle/mtp").rename(folder / "elsewhere")
    (folder / "bundle/mtp").symlink_to(folder / "elsewhere")


def _fail_an_item(report: dict) -> None:  # type: ignore[type-arg]
    report["checks"][0]["items"][0] |= {"status": "fail", "cause": "planted"}


def _edit(name: str, change: Callable[[dict], object]) -> Change:  # type: ignore[type-arg]
    return lambda folder: edit_json(folder / name, change)


BUNDLES: list[tuple[str, Change, int, str]] = [
    ("no bundle", lambda f: shutil.rmtree(f / "bundle") or (f / "bundle").mkdir(), 3, "no bundle"),
    ("unfinished", lambda f: (f / "bundle/.mtp_export.journal").touch(), 3, "not finished"),
    ("no manifest", _remove("bundle/mtp_export.json"), 3, "no manifest"),
    ("no shard", _remove("bundle/main/model-00004-of-00004.safetensors"), 3, "missing"),
    ("no config", _remove("bundle/mtp/config.json"), 3, "missing"),
    ("short shard", _truncate, 3, "another size"),
    ("edited config", lambda f: edit_json(f / "bundle/main/config.json", dict.clear), 3, "size"),
    ("link out of it", _secret_link, 3, "leads out"),
    ("part elsewhere", _part_elsewhere, 3, "leads out"),
    ("report of another", _edit("bundle/mtp_export.json", lambda m: m.update(x=1)), 3, "another"),
    ("report is none", lambda f: (f / "report.json").write_text("[]"), 3, "no report"),
    ("report is no JSON", lambda f: (f / "report.json").write_text("{"), 3, "no JSON"),
    ("report is missing", _remove("report.json"), 6, "cannot be read"),
    ("report is damaged", _edit("report.json", lambda r: r["checks"].append(3)), 3, "damaged"),
    ("report failed", _edit("report.json", _fail_an_item), 7, "did not pass"),
]
SECRET = {"size_bytes": 2, "xxh3_128": ""}
MANIFESTS: list[tuple[str, Callable[[dict], object], str]] = [  # type: ignore[type-arg]
    ("file above", lambda m: m["parts"]["mtp"]["files"].update({"../../report.json": SECRET}),
     "no export writes"),
    ("file of git", lambda m: m["parts"]["mtp"]["files"].update({".git/config": SECRET}),
     "no export writes"),
    ("target", lambda m: m["options"].update(target="engine"), "KeyError('engine')"),
    ("scheme", lambda m: m["options"].update(base_quant="int3"), "KeyError('int3')"),
    ("no version", lambda m: m.pop("tool_version"), "KeyError('tool_version')"),
    ("no parts", lambda m: m["parts"].clear(), "a manifest without parts"),
    ("no shard", lambda m: m["parts"]["mtp"]["shards"].clear(), "manifest does not list"),
    ("no config", lambda m: m["parts"]["mtp"]["files"].pop("config.json"), "does not list"),
    ("repository", lambda m: m["source"].update(repo="a b/c", commit="0"), "no address"),
]  # fmt: skip
ADDRESSES: list[tuple[str, int, str]] = [
    ("name", 3, "no address of a model"),
    ("org/na me", 3, "no address of a model"),
    ("hf://datasets/org/name", 3, "a dataset"),
    ("org/name@v2", 2, "@v2"),
    ("org/name/main", 2, "the folder main"),
    ("s3://bucket/name", 3, "no address of a model"),
]


def assert_refused(outcome, code: int, words: str, hub: HubServer) -> None:  # type: ignore[no-untyped-def]
    assert outcome.code == code, outcome.err
    assert words in outcome.err, outcome.err
    assert outcome.err.count("\n") == 1 and outcome.err.startswith("mtp-export: error: ")
    assert not [r for r in hub.log if r.method in ("POST", "PUT") and r.status == 200]


@pytest.mark.parametrize(
    ("change", "code", "words"), [case[1:] for case in BUNDLES], ids=[case[0] for case in BUNDLES]
)
def test_bundles_and_reports(
    change: Change, code: int, words: str, hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    change(folder)
    assert_refused(push(folder, "--quiet"), code, words, hub)


@pytest.mark.parametrize(("kind", "change", "words"), MANIFESTS)
def test_manifests(
    kind: str, change: Callable[[dict], object], words: str, hub: HubServer, exported: Path,  # type: ignore[type-arg]
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    edit_json(folder / "bundle/mtp_export.json", change)
    assert_refused(push(folder, "--unverified", "--quiet"), 3, words, hub)


@pytest.mark.parametrize(("address", "code", "words"), ADDRESSES)
def test_addresses(address: str, code: int, words: str, hub: HubServer, exported: Path) -> None:
    assert_refused(push(exported, "--quiet", name=address), code, words, hub)


def test_an_unverified_bundle_is_refused_unless_told(hub: HubServer, exported: Path) -> None:
    outcome = run_program("push", exported / "bundle", NAME, "--quiet")
    assert_refused(outcome, 2, "--unverified", hub)
    verify = f"mtp-export verify {exported / 'bundle'} --report"
    assert f"Verify it first: {verify} report.json. Or push" in outcome.err
    missing = run_program("push", exported / "bundle", NAME, "--report", exported / "no.json")
    assert_refused(missing, 6, f"which writes it: {verify} {exported / 'no.json'}.", hub)
    assert push(exported, "--unverified", "--quiet").code == 0


@pytest.mark.parametrize(
    ("token", "words"), [("", "no token"), ("hf_reader", "may not write"), ("hf_x", "may not")]
)
def test_tokens(
    token: str, words: str, hub: HubServer, exported: Path, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    outcome = push(exported, "--quiet")
    assert_refused(outcome, 3, words, hub)
    assert not token or token not in outcome.err


def test_a_token_that_may_not_write_to_a_repository_that_is_there(
    hub: HubServer, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(exported, "--part", "mtp", name="org/other")
    hub.serve(NAME, exported / "source")
    hub.log.clear()
    monkeypatch.setenv("HF_TOKEN", hub.reader_token)
    assert_refused(push(exported, "--quiet", "--overwrite"), 3, "may not write", hub)


def test_a_repository_with_another_model(hub: HubServer, exported: Path) -> None:
    hub.serve(NAME, exported / "source")
    assert_refused(push(exported, "--quiet"), 8, "config.json", hub)
    assert_refused(push(exported, "--quiet", "--part", "main"), 8, "and 7 more", hub)


def test_a_public_repository_where_a_private_one_is_wanted(hub: HubServer, exported: Path) -> None:
    push(exported)
    hub.log.clear()
    assert_refused(push(exported, "--quiet", "--private"), 8, "is public", hub)


def test_a_base_model_that_is_not_there(hub: HubServer, exported: Path) -> None:
    assert_refused(push(exported, "--quiet", "--base-model", "a/b"), 3, "no such repository", hub)


def test_a_part_that_the_bundle_lacks(hub: HubServer, exported: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    arguments = ("--input-dir", exported / "source", "--output-dir", bundle, "--part", "mtp")
    assert run_program(*arguments, "--quiet").code == 0
    for part in ("main", "both"):
        outcome = run_program("push", bundle, NAME, "--unverified", "--part", part, "--quiet")
        assert_refused(outcome, 3, "no main", hub)
    assert run_program("push", bundle, NAME, "--unverified", "--quiet").code == 0
