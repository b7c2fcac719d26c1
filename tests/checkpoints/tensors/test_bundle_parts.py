"""Bundles as checkpoints, and their manifests: what is read, and the words of every refusal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import edit_json
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.tensors.bundle_folder import (
    bundle_target,
    is_bundle,
    open_checkpoint,
    open_parts,
)
from mtp_checkpoints.tensors.manifest import manifest_sha256, read_manifest

CONFIG = {"model_type": "x", "num_hidden_layers": 2, "quantization_config": {"a": 1}, "other": 1}
DIGEST = "0" * 32
TENSOR = {"operation": "copy", "xxh3_128": DIGEST, "sources": ["a"]}
WRITTEN = {"size_bytes": 8, "tensors": {"a": TENSOR}}
LINKED = {"size_bytes": 8, "link": "hardlink", "header_sha256": DIGEST}
MANIFEST: dict[str, Any] = {
    "format": "mtp-export bundle",
    "format_version": 1,
    "options": {"target": "xllm", "main_storages": ["bf16"]},
    "source": {"shards": {"x": {"size_bytes": 8}}},
    "parts": {
        "main": {
            "shards": {"written": WRITTEN, "linked": LINKED},
            "files": {"config.json": {"size_bytes": 3, "xxh3_128": DIGEST}},
        }
    },
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two parts of one tensor each."""
    for part in ("main", "mtp"):
        (tmp_path / part).mkdir()
        save_file({part: torch.ones(2)}, tmp_path / part / "model.safetensors")
        config = CONFIG | {"other": part}
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    return tmp_path


def refusal(action: Any, *arguments: object) -> MtpExportError:
    with pytest.raises(MtpExportError) as caught:
        action(*arguments)
    return caught.value


def test_parts_are_read_as_one_checkpoint(bundle: Path) -> None:
    assert is_bundle(bundle)
    found, parts = open_checkpoint(bundle), open_parts(bundle)
    assert parts.mtp is not None
    assert found.tensors.keys() == {"main", "mtp"}
    assert found.config == parts.main.config
    assert found.is_bundle
    assert [shard.path for shard in found.shards] == [
        bundle / part / "model.safetensors" for part in ("main", "mtp")
    ]
    both = parts.main.config_sha256 + parts.mtp.config_sha256
    assert found.config_sha256 == hashlib.sha256(both.encode()).hexdigest()
    assert open_checkpoint(bundle / "main").tensors.keys() == {"main"}


@pytest.mark.parametrize("missing", ["main", "mtp"])
def test_a_bundle_has_both_parts_and_no_config(missing: str, bundle: Path) -> None:
    config = bundle / missing / "config.json"
    config.rename(bundle / "config.json")
    assert not is_bundle(bundle)
    config.write_bytes((bundle / "config.json").read_bytes())
    assert not is_bundle(bundle), "a checkpoint with such folders"
    (bundle / "config.json").unlink()
    assert is_bundle(bundle)


def test_a_bundle_may_lack_its_mtp_part(bundle: Path) -> None:
    for path in (bundle / "mtp").iterdir():
        path.unlink()
    (bundle / "mtp").rmdir()
    assert open_parts(bundle).mtp is None
    assert open_parts(bundle).main.tensors.keys() == {"main"}


def test_parts_that_lie_elsewhere_are_none_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    """Whoever made it must not choose folders of this machine to be read."""
    for part in ("main", "mtp"):
        elsewhere = tmp_path.with_name(f"{tmp_path.name}-{part}")
        (bundle / part).rename(elsewhere)
        (bundle / part).symlink_to(elsewhere)
        error = refusal(open_checkpoint, bundle)
        assert error.what == "A file leads out of the checkpoint"
        assert error.where == bundle / part
        (bundle / part).unlink()
        elsewhere.rename(bundle / part)
    assert open_checkpoint(bundle).is_bundle


@pytest.mark.parametrize("key", ["model_type", "num_hidden_layers", "quantization_config"])
def test_parts_of_two_models(key: str, bundle: Path) -> None:
    for change in ({key: "y"}, {key: None}):
        edit_json(bundle / "mtp/config.json", lambda config, change=change: config.update(change))
        error = refusal(open_checkpoint, bundle)
        assert isinstance(error, UnsupportedError)
        assert error.what == "The two parts of the bundle cannot be read as one checkpoint"
        assert error.where == bundle
        assert error.expected == f"the same {key} in main/config.json and mtp/config.json"
        assert error.found == f"{CONFIG[key]!r} and {change[key]!r}"
        assert "--target hf" in str(error.todo)


def test_a_tensor_in_both_parts(bundle: Path) -> None:
    save_file({"main": torch.ones(2)}, bundle / "mtp/model.safetensors")
    error = refusal(open_checkpoint, bundle)
    assert error.what == "Tensor main is in both parts of the bundle"
    assert (error.where, error.todo) == (bundle, "Export the original checkpoint again")


def test_a_bundle_of_one_part(bundle: Path) -> None:
    (bundle / "mtp/config.json").unlink()
    (bundle / "mtp_export.json").touch()
    error = refusal(open_checkpoint, bundle)
    assert (error.what, error.where) == ("This is a bundle of one part only", bundle)
    assert error.expected == "main and mtp in it, or a checkpoint"
    assert "--part both" in str(error.todo)


def test_no_bundle_at_all(bundle: Path) -> None:
    (bundle / "main/config.json").unlink()
    error = refusal(open_parts, bundle)
    assert error.what == "This bundle has an mtp part alone, which no model can be read from"
    assert (error.where, error.expected) == (bundle, "main beside mtp")
    assert "--part both" in str(error.todo)
    (bundle / "mtp/config.json").unlink()
    error = refusal(open_parts, bundle)
    assert error.what == "There is neither a bundle nor a checkpoint here"
    assert (error.where, error.expected) == (
        bundle,
        "config.json, or config.json in main and in mtp",
    )
    assert str(error.todo).startswith("Point at")


def write_manifest(bundle: Path, content: Any) -> None:
    (bundle / "mtp_export.json").write_text(json.dumps(content))


def test_the_target_of_a_bundle(bundle: Path) -> None:
    assert bundle_target(bundle) == "hf"
    write_manifest(bundle, MANIFEST)
    assert bundle_target(bundle) == "xllm"
    write_manifest(bundle, MANIFEST | {"options": {}})
    assert bundle_target(bundle) == "hf"


def test_a_manifest(bundle: Path) -> None:
    path = bundle / "mtp_export.json"
    error = refusal(read_manifest, bundle)
    assert (error.what, error.where) == ("The bundle has no manifest", path)
    assert error.expected == "the file that every finished export writes last"
    assert str(error.todo).startswith("Name the output folder of a run")
    write_manifest(bundle, MANIFEST)
    assert read_manifest(bundle) == MANIFEST
    for change, found in (
        ({"format": "y"}, "y, version 1"),
        ({"format_version": 2}, "mtp-export bundle, version 2"),
    ):
        write_manifest(bundle, MANIFEST | change)
        error = refusal(read_manifest, bundle)
        assert error.what == "The manifest is in a format that this version does not read"
        assert (error.where, error.found) == (path, found)
        assert error.expected == "mtp-export bundle, version 1"
        assert str(error.todo).startswith("Use the version")


def test_a_manifest_is_named_by_its_digest(bundle: Path) -> None:
    write_manifest(bundle, MANIFEST)
    raw = (bundle / "mtp_export.json").read_bytes()
    assert manifest_sha256(bundle) == hashlib.sha256(raw).hexdigest()


def test_sizes_up_to_the_largest_of_a_file(bundle: Path) -> None:
    for size in (0, (1 << 63) - 1):
        content = MANIFEST | {"source": {"shards": {"x": {"size_bytes": size}}}}
        write_manifest(bundle, content)
        assert read_manifest(bundle) == content


MAIN = ("parts", "main")
SHARD = (*MAIN, "shards", "written")
SIZE, NUMBER = "a size in bytes", "a number or null"


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("options",), [], "an object"),
        *((("options", name), {}, "text") for name in ("part", "target", "reader")),
        *((("options", name), None, "text") for name in ("base_quant", "mtp_quant")),
        (("options", "main_storages"), ["bf16", 1], "a list of texts"),
        (("options", "main_storages"), "bf16", "a list of texts"),
        (("parts",), 5, "an object"),
        (MAIN, "x" * 200, "an object"),
        ((*MAIN, "shards"), None, "an object"),
        (SHARD, [], "an object"),
        ((*SHARD, "size_bytes"), -1, SIZE),
        ((*SHARD, "size_bytes"), 1 << 63, SIZE),
        ((*SHARD, "size_bytes"), True, SIZE),
        ((*SHARD, "size_bytes"), 1.0, SIZE),
        ((*SHARD, "header_sha256"), 5, "text"),
        ((*SHARD, "tensors"), [], "an object"),
        ((*SHARD, "tensors", "a"), None, "an object"),
        ((*SHARD, "tensors", "a", "operation"), None, "text"),
        ((*SHARD, "tensors", "a", "xxh3_128"), 7, "text"),
        ((*SHARD, "tensors", "a", "sqnr_db"), "9", NUMBER),
        ((*MAIN, "shards", "linked", "tensors"), 0, "an object"),
        ((*MAIN, "files", "config.json", "size_bytes"), "3", SIZE),
        ((*MAIN, "files", "config.json", "xxh3_128"), None, "text"),
        (("source", "shards", "x", "size_bytes"), None, SIZE),
    ],
)
def test_a_value_of_another_kind(
    place: tuple[str, ...], value: Any, expected: str, bundle: Path
) -> None:
    content = json.loads(json.dumps(MANIFEST))
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    write_manifest(bundle, content)
    error = refusal(read_manifest, bundle)
    assert isinstance(error, InvalidInputError)
    assert error.what == f"The manifest is damaged at {' → '.join(place)}"
    assert (error.where, error.expected) == (bundle / "mtp_export.json", expected)
    assert (error.found, error.todo) == (repr(value)[:100], "Export again")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ((), "options"),
        ((), "source"),
        ((), "parts"),
        (("source",), "shards"),
        (("source", "shards", "x"), "size_bytes"),
        (MAIN, "shards"),
        (MAIN, "files"),
        (SHARD, "size_bytes"),
        (SHARD, "tensors"),
        ((*SHARD, "tensors", "a"), "operation"),
        ((*SHARD, "tensors", "a"), "xxh3_128"),
        ((*MAIN, "shards", "linked"), "header_sha256"),
        ((*MAIN, "files", "config.json"), "xxh3_128"),
    ],
)
def test_an_entry_that_is_missing(place: tuple[str, ...], name: str, bundle: Path) -> None:
    content = json.loads(json.dumps(MANIFEST))
    inner = content
    for step in place:
        inner = inner[step]
    del inner[name]
    write_manifest(bundle, content)
    error = refusal(read_manifest, bundle)
    where = f" at {' → '.join(place)}" if place else ""
    assert (error.what, error.expected, error.found) == (
        f"The manifest is damaged{where}",
        f"an entry {name}",
        "none",
    )


def test_what_a_manifest_may_have(bundle: Path) -> None:
    content = json.loads(json.dumps(MANIFEST))
    content["more"] = [1]
    shards = content["parts"]["main"]["shards"]
    shards["written"]["tensors"]["a"] |= {"sqnr_db": None, "more": {}}
    shards["linked"]["tensors"] = {"a": TENSOR | {"sqnr_db": 1.5}}
    write_manifest(bundle, content)
    assert read_manifest(bundle) == content
