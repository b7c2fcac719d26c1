"""MTP shards that stay whole are linked, and what is linked is checksummed all the same."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cases import (
    MTP_LAYER,
    export,
    looks_finished,
    make_checkpoint,
    nightly_but,
    quantize,
    read_json,
    read_shard,
    read_tensors,
    run_in_a_fork,
    tree,
)

PREFIX = f"model.layers.{MTP_LAYER}."
COPIES = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}shared_head.head.weight")


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MTP layer begins in a shard of the main model and fills some of its own."""
    folder = tmp_path_factory.mktemp("layered") / "source"
    return make_checkpoint(folder, max_shard_bytes=300_000, parted=False)


def shards_of(output: Path, part: str) -> dict[str, dict[str, Any]]:
    shards: dict[str, dict[str, Any]] = read_json(output / "mtp_export.json")["parts"][part][
        "shards"
    ]
    return shards


def whole_mtp_shards(source: Path) -> set[str]:
    """Shards all of whose tensors are the MTP layer's."""
    index = read_json(source / "model.safetensors.index.json")["weight_map"]
    mixed = {file for name, file in index.items() if not name.startswith(PREFIX)}
    return set(index.values()) - mixed


def checksums(path: Path) -> dict[str, str]:
    """Checksums of every tensor of a shard, computed directly."""
    header, data = read_shard(path)
    return {
        name: xxhash.xxh3_128(data[slice(*entry["data_offsets"])]).hexdigest()
        for name, entry in header.items()
        if name != "__metadata__"
    }


def noted(facts: dict[str, Any]) -> dict[str, str]:
    return {name: entry["xxh3_128"] for name, entry in facts["tensors"].items()}


@pytest.mark.parametrize("size", ["5GB", "200kB"])
def test_whole_shards_are_linked_whatever_their_size(
    size: str, layered: Path, output: Path
) -> None:
    assert len(whole_mtp_shards(layered)) > 2
    assert export(layered, output, "--link", "hardlink", "--max-shard-size", size).code == 0
    shards = shards_of(output, "mtp")
    linked = {name: facts["source_shard"] for name, facts in shards.items() if "link" in facts}
    assert set(linked.values()) == whole_mtp_shards(layered)
    assert len(shards) > len(linked), "what the boundary shard holds is packed anew"
    for name, source_shard in linked.items():
        assert (output / "mtp" / name).samefile(layered / source_shard)


def test_the_part_holds_the_same_whether_linked_or_copied(layered: Path, tmp_path: Path) -> None:
    for link in ("hardlink", "copy"):
        assert export(layered, tmp_path / link, "--link", link).code == 0
    linked, copied = (read_tensors(tmp_path / link / "mtp") for link in ("hardlink", "copy"))
    index = read_json(tmp_path / "hardlink/mtp/model.safetensors.index.json")
    assert linked.keys() == copied.keys() == index["weight_map"].keys()
    assert all(linked[name].equal(copied[name]) for name in linked)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in linked.values())
    assert len(list((tmp_path / "copy/mtp").glob("*.safetensors"))) == 1, "packed up to 5 GB"


@pytest.mark.parametrize(
    "options",
    [("--target", "lightllm"), ("--target", "xllm"), ("--target", "paddlenlp"), ("--link", "copy")],
)
def test_what_changes_is_not_linked(options: tuple[str, str], layered: Path, output: Path) -> None:
    assert export(layered, output, *options).code == 0
    assert not [facts for facts in shards_of(output, "mtp").values() if "link" in facts]


def test_drop_rewrites_the_shards_that_hold_copies(layered: Path, output: Path) -> None:
    index = read_json(layered / "model.safetensors.index.json")["weight_map"]
    holders = {index[name] for name in COPIES}
    assert holders & whole_mtp_shards(layered)
    assert export(layered, output, "--shared-weights", "drop").code == 0
    facts = shards_of(output, "mtp").values()
    linked = {entry["source_shard"] for entry in facts if "link" in entry}
    assert linked == whole_mtp_shards(layered) - holders
    assert not read_tensors(output / "mtp").keys() & set(COPIES)


def test_a_weight_without_its_scale_is_no_whole_shard(pristine: Path, output: Path) -> None:
    index = read_json(pristine / "model.safetensors.index.json")["weight_map"]
    apart = {
        file
        for name in index
        if name.endswith("_scale_inv") and name.startswith(PREFIX)
        for file in (index[name], index[name.removesuffix("_scale_inv")])
        if index[name] != index[name.removesuffix("_scale_inv")]
    }
    assert apart & whole_mtp_shards(pristine)
    assert export(pristine, output).code == 0
    linked = {f["source_shard"] for f in shards_of(output, "mtp").values() if "link" in f}
    assert linked == whole_mtp_shards(pristine) - apart


def test_a_native_fp8_quantization_links_them_too(layered: Path, output: Path) -> None:
    options = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8")
    assert quantize(layered, output, *options).code == 0
    linked = {f["source_shard"] for f in shards_of(output, "mtp").values() if "link" in f}
    assert linked == whole_mtp_shards(layered)


@pytest.mark.parametrize(
    "options", [(), ("--link", "copy"), ("--target", "paddlenlp"), ("--shared-weights", "drop")]
)
def test_copies_that_differ_are_found_whatever_becomes_of_them(
    options: tuple[str, ...], tmp_path: Path, output: Path
) -> None:
    source = make_checkpoint(tmp_path / "s", max_shard_bytes=300_000, parted=False)
    index = read_json(source / "model.safetensors.index.json")["weight_map"]
    path = source / index[COPIES[1]]
    assert path.name in whole_mtp_shards(source)
    header, data = read_shard(path)
    at = path.stat().st_size - len(data) + header[COPIES[1]]["data_offsets"][1] - 1
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at - path.stat().st_size] ^ 1]))
    outcome = export(source, output, *options)
    assert outcome.code == 3
    assert COPIES[1] in outcome.err
    assert not output.exists()


@pytest.mark.parametrize("wanted", ["written", "all"])
def test_linked_shards_are_checksummed(wanted: str, layered: Path, output: Path) -> None:
    """Those of the MTP part always, those of the main part when asked for."""
    assert export(layered, output, "--checksums", wanted, "--link", "hardlink").code == 0
    assert read_json(output / "mtp_export.json")["options"]["checksums"] == wanted
    for part in ("main", "mtp"):
        for name, facts in shards_of(output, part).items():
            if part == "main" and wanted == "written" and "link" in facts:
                assert facts.keys() == {"size_bytes", "link", "source_shard", "header_sha256"}
                continue
            assert noted(facts) == checksums(output / part / name)
            assert {entry["operation"] for entry in facts["tensors"].values()} == {"copy"}
            assert all(entry["sources"] == [key] for key, entry in facts["tensors"].items())


def test_the_plan_counts_what_is_only_read(layered: Path, output: Path) -> None:
    plan = json.loads(export(layered, output, "--dry-run", "--json").out)["parts"]
    assert plan["main"]["checksummed_bytes"] == 0
    assert plan["mtp"]["checksummed_bytes"] == plan["mtp"]["linked_bytes"] > 0
    every = json.loads(export(layered, output, "--checksums", "all", "--json").out)["parts"]
    assert every["main"]["checksummed_bytes"] == every["main"]["linked_bytes"] > 0
    assert "linked and checksummed" in export(layered, output, "--overwrite").out


def test_a_shard_that_cannot_be_read_is_not_taken_on_trust(
    layered: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shard counts as finished, and the same command resumes when the disk reads again."""
    assert export(layered, output.with_name("good")).code == 0
    bad = sorted(whole_mtp_shards(layered))[0]
    inode, real = (layered / bad).stat().st_ino, os.preadv

    def fail(file: int, *arguments: Any) -> int:
        if os.fstat(file).st_ino == inode:
            raise OSError(5, "Input/output error")
        return real(file, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        outcome = export(layered, output, "--workers", "1", "--allow-untied")
    assert outcome.code == 6
    assert bad in outcome.err
    assert not looks_finished(output)
    assert export(layered, output, "--allow-untied").code == 0
    assert tree(output / "mtp") == tree(output.with_name("good") / "mtp")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("first", nightly_but([1], range(1, 25, 2)))
def test_death_at_every_disk_call_with_linked_mtp_shards(
    first: int, layered: Path, tmp_path: Path
) -> None:
    options = ("--link", "hardlink", "--checksums", "all", "--workers", "2", "--quiet")
    assert export(layered, tmp_path / "whole", *options).code == 0
    whole, original = tree(tmp_path / "whole"), tree(layered)
    for call_number in range(first, 2000, 24):
        output = tmp_path / f"died-at-{call_number}"
        if run_in_a_fork(partial(export, layered, output, *options), call_number) == 0:
            break
        if not looks_finished(output):
            outcome = export(layered, output, *options)
            assert outcome.code == 0, (call_number, outcome.err)
        assert tree(output) == whole, call_number
    assert call_number > 60
    assert tree(layered) == original


def test_a_checksummed_shard_is_not_read_again(
    layered: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends before its last files finds every checksum in the journal."""
    options = ("--checksums", "all", "--allow-untied")
    with monkeypatch.context() as patch:
        patch.setattr("mtp_export.bundle.build.write_json", _full_disk)
        assert export(layered, output, *options).code == 6
    monkeypatch.setattr(os, "preadv", _full_disk)
    assert export(layered, output, *options).code == 0
    every = [f for part in ("main", "mtp") for f in shards_of(output, part).values()]
    assert all("tensors" in facts for facts in every)


def _full_disk(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_run_without_the_checksums_is_not_resumed_with_them(
    layered: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mtp_export.bundle.build.write_json", _full_disk)
        assert export(layered, output).code == 6
    changed = export(layered, output, "--checksums", "all")
    assert (changed.code, "checksums" in changed.err) == (8, True)


def test_a_bundle_of_linked_shards_is_a_source_like_any_other(
    layered: Path, tmp_path: Path
) -> None:
    assert export(layered, tmp_path / "one", "--link", "hardlink").code == 0
    assert export(tmp_path / "one", tmp_path / "two", "--link", "hardlink").code == 0
    one, two = (read_json(tmp_path / name / "mtp_export.json") for name in ("one", "two"))
    for part in ("main", "mtp"):
        edit = [entry.keys() for entry in two["parts"][part]["shards"].values()]
        assert all("link" in keys for keys in edit)
    first = {
        k: v for facts in one["parts"]["mtp"]["shards"].values() for k, v in noted(facts).items()
    }
    again = {
        k: v for facts in two["parts"]["mtp"]["shards"].values() for k, v in noted(facts).items()
    }
    assert first == again
