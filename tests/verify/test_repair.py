"""The command that makes a bundle again: with the source's address where the manifest has one."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from cases import export, make_checkpoint, read_json, run_program, tree
from hub_server import HubServer
from mtp_export.verify.files.repair import remade

FILES = ("--level", "files", "--json", "--quiet")
OPTIONS = {"part": "mtp", "target": "hf"}
GRAFT = OPTIONS | {"base_quant": "grafted", "mtp_quant": "bf16"}


def damage(bundle: Path) -> None:
    """Change the last byte of a shard of the MTP part."""
    shard = next((bundle / "mtp").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    shard.write_bytes(data)


def repair_of(bundle: Path, *options: object) -> list[str]:
    outcome = run_program("verify", bundle, *FILES, *options)
    assert outcome.code == 7, outcome.err
    items = [item for check in json.loads(outcome.out)["checks"] for item in check["items"]]
    (command,) = {item["repair"] for item in items if item.get("repair")}
    return shlex.split(command)


def test_a_remote_bundle_is_repaired_from_its_address(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the commit that it was made from, though the repository has gone on."""
    server, bundle = HubServer(), tmp_path / "a bundle"
    server.serve("acme/tiny", pristine)
    other = make_checkpoint(tmp_path / "other")
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        assert export("hf://acme/tiny", bundle, "--part", "mtp").code == 0
        whole = tree(bundle)
        server.serve("acme/tiny", other)
        damage(bundle)
        program, *words = repair_of(bundle)
        commit = read_json(bundle / "mtp_export.json")["source"]["commit"]
        assert (program, words[:2]) == (
            "mtp-export",
            ["--input-dir", f"hf://acme/tiny@{commit}"],
        )
        assert run_program(*words).code == 0
    assert tree(bundle) == whole


def test_nothing_in_a_bundle_tells_the_folder_of_its_source(pristine: Path, tmp_path: Path) -> None:
    """A bundle is published as it is, and made of the same source it is the same anywhere."""
    moved = Path(shutil.copytree(pristine, tmp_path / "secret place"))
    bundles = [tmp_path / name / "bundle" for name in ("one", "two")]
    for source, bundle in zip((pristine, moved), bundles, strict=True):
        bundle.parent.mkdir()
        assert export(source, bundle, "--link", "copy").code == 0
    assert tree(bundles[0]) == tree(bundles[1])
    elsewhere = Path(shutil.move(bundles[1], tmp_path / "elsewhere"))
    damage(elsewhere)
    assert repair_of(elsewhere)[:3] == ["mtp-export", "--input-dir", "SOURCE"]
    given = repair_of(elsewhere, "--source", moved)
    assert given[:3] == ["mtp-export", "--input-dir", str(moved)]
    assert run_program(*given[1:]).code == 0
    assert run_program("verify", elsewhere, "--level", "files", "--quiet").code == 0


@pytest.mark.parametrize(
    ("options", "origin", "words"),
    [
        (OPTIONS, {}, "--input-dir SOURCE"),
        (OPTIONS, {"repo": "a/b", "commit": "c", "folder": "d e"}, "--input-dir 'hf://a/b@c/d e'"),
        (OPTIONS, {"url": "s3://bucket/x;y"}, "--input-dir 's3://bucket/x;y'"),
        (OPTIONS, {"repo": "a/b"}, "--input-dir SOURCE"),
        (OPTIONS, {"repo": "a/b", "commit": "c\n"}, "--input-dir SOURCE"),
        (OPTIONS, {"repo": ["a"], "commit": "c"}, "--input-dir SOURCE"),
        (GRAFT, {"mtp": {"url": "gs://b/x"}}, "graft --main MAIN --mtp gs://b/x"),
        (
            GRAFT,
            {"main": {"repo": "a/b", "commit": "c"}, "mtp": 3},
            "graft --main hf://a/b@c --mtp SOURCE",
        ),
    ],
)
def test_an_address_is_a_word_of_the_command(
    options: dict[str, Any], origin: dict[str, Any], words: str
) -> None:
    recorded = {"options": options, "source": origin}
    made = remade(recorded, None, Path("out"))
    assert made.startswith(f"mtp-export {words} --output-dir out")
    own = remade(recorded, Path("here"), Path("out"))
    assert " here --output-dir out" in own and "SOURCE" not in own
