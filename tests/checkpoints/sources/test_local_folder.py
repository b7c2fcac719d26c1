"""Files of a checkpoint's folder: regular ones of a fitting size, and links that stay inside."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import Outcome, export, hub_cache, make_checkpoint, run_program, tree
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.local_folder import LocalFolder

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00008.safetensors"
SMALL_FILES = ("config.json", INDEX, "tokenizer.json", "generation_config.json", "tool.py")
COPIED = (
    *("tokenizer.model", "tokenizer.json", "LICENSE", "modeling.py", "merges.txt", "vocab.json"),
    *("generation_config.json", "chat_template.jinja", "additional_chat_templates/x.jinja"),
)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/{path.name}")  # the path itself may be too long
    os.close(here)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


def make_folder(path: Path) -> None:
    path.mkdir()


def assert_refused(outcome: Outcome, path: Path) -> None:
    assert outcome.code == 3, outcome.err
    assert len(outcome.err.splitlines()) == 1 and path.name in outcome.err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [make_fifo, make_socket, link_to_a_device, link_to_a_fifo])
def test_special_files_are_refused_at_once(
    make: Callable[[Path], None], pristine: Path, tmp_path: Path
) -> None:
    """Whatever reads them: a pipe is never opened, a device never read."""
    for name in (*SMALL_FILES, SHARD):
        source, output = tmp_path / f"source-{name}", tmp_path / "output"
        shutil.copytree(pristine, source, copy_function=os.link)
        (source / name).unlink(missing_ok=True)
        make(source / name)
        assert_refused(export(source, output), source / name)
        if name in ("config.json", INDEX, SHARD):
            assert_refused(run_program("inspect", source), source / name)
        assert not output.exists()


@pytest.mark.timeout(60)
def test_a_lone_file_that_is_special_is_refused_at_once(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    for path in source.glob("model*"):
        path.unlink()
    make_fifo(source / "model.safetensors")
    assert_refused(export(source, output), source / "model.safetensors")


@pytest.mark.timeout(60)
def test_a_bundle_s_special_files_are_refused_at_once(pristine: Path, output: Path) -> None:
    """Manifest and tokenizer, as generate and verify read them."""
    assert export(pristine, output, "--link", "copy", "--quiet").code == 0
    (output / "mtp_export.json").unlink()
    make_fifo(output / "mtp_export.json")
    (output / "main/tokenizer.json").unlink(missing_ok=True)
    make_fifo(output / "main/tokenizer.json")
    assert run_program("generate", output, "--prompt", "x").code == 3
    (output / "mtp_export.json").unlink()
    assert_refused(run_program("generate", output, "--prompt", "x"), Path("tokenizer.json"))


def test_a_folder_in_a_file_s_place_is_refused(source: Path, output: Path) -> None:
    (source / "config.json").unlink()
    make_folder(source / "config.json")
    assert_refused(export(source, output), source / "config.json")


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD, *COPIED])
def test_links_out_of_the_checkpoint_are_refused(name: str, source: Path, output: Path) -> None:
    """Also to a file that would be good: nothing that the checkpoint's maker chose is read."""
    path, secret = source / name, source.parent / "secret"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(secret)
    else:
        secret.write_text("secret")
    path.symlink_to(secret)
    for options in ((), ("--dry-run",)):
        outcome = export(source, output, *options)
        assert_refused(outcome, path)
        assert "leads out of the checkpoint" in outcome.err
    assert not output.exists()


def test_links_within_the_checkpoint_are_followed(source: Path, output: Path) -> None:
    (source / "kept").mkdir()
    for name in ("config.json", "tokenizer_config.json", SHARD):
        (source / name).rename(source / "kept" / name)
        (source / name).symlink_to(f"../{source.name}/kept/{name}")
    assert export(source, output).code == 0
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    found = (output / "main/tokenizer_config.json").read_bytes()
    assert found == (source / "kept/tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_s_cache_is_read_like_a_folder(
    shared: bool, pristine: Path, source: Path, tmp_path: Path
) -> None:
    snapshot = hub_cache(source, tmp_path / "cache", shared=shared)
    alias = tmp_path / "alias"
    alias.symlink_to(snapshot)
    assert export(pristine, tmp_path / "expected", "--link", "copy").code == 0
    for number, folder in enumerate((snapshot, alias)):
        output = tmp_path / f"output-{number}"
        outcome = export(folder, output, "--link", "copy")
        assert outcome.code == 0, outcome.err
        assert tree(output) == tree(tmp_path / "expected")


@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_leads_to_its_own_blobs_alone(
    shared: bool, source: Path, output: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    snapshot = hub_cache(source, tmp_path / "cache", shared=shared)
    blob = snapshot.parent.parent / "blobs/evil"
    blob.symlink_to(secret)
    (snapshot / "tokenizer.model").symlink_to(f"../../blobs/{blob.name}")
    assert_refused(export(snapshot, output), snapshot / "tokenizer.model")
    blob.unlink()
    shutil.move(snapshot.parent.parent, tmp_path / "cache/name")  # no repository's folder
    (tmp_path / "cache/name/blobs/evil").write_text("a tokenizer")
    moved = tmp_path / "cache/name/snapshots" / snapshot.name
    assert "leads out of the checkpoint" in export(moved, output).err


def test_a_bundle_s_part_elsewhere_is_not_exported_again(pristine: Path, tmp_path: Path) -> None:
    bundle, private = tmp_path / "bundle", tmp_path / "private"
    assert export(pristine, bundle, "--link", "copy").code == 0
    (bundle / "main").rename(private)
    (bundle / "main").symlink_to(private)
    outcome = export(bundle, tmp_path / "output")
    assert outcome.code == 3 and "leads out of the checkpoint" in outcome.err


@pytest.mark.parametrize("name", [*SMALL_FILES, "mtp_export.json", "LICENSE"])
def test_files_too_large_for_what_they_are_are_refused(
    name: str, source: Path, output: Path
) -> None:
    """Without being read: these are holes of 1 TB."""
    (source / name).touch()
    os.truncate(source / name, 10**12)
    with pytest.raises(InvalidInputError, match="too large for what it is"):
        LocalFolder(source).read(name)
    if name != "mtp_export.json":
        assert_refused(export(source, output), source / name)
        assert not output.exists()
