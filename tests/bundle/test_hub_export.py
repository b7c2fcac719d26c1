"""Exports from the Hub: the bytes of an export from a folder, whatever the network does, and few
others downloaded. The server is a local one, the client is huggingface_hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from cases import (
    MTP_LAYER,
    export,
    looks_finished,
    nightly_but,
    quantize,
    read_json,
    read_shard,
    run_in_a_fork,
    run_program,
    tree,
)
from hub_server import HubServer, Request
from mtp_checkpoints.sources import transfers
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.remote_source import READERS
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.model_identity import model_identity
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.bundle.preflight import needed_disk_bytes
from mtp_export.progress import silent
from remote_bundles import (
    COPIES,
    MANIFEST,
    MTP,
    assert_equal,
    ranges,
    ranges_got,
    shrink_transfers,
)

NAME = "acme/tiny"
SOURCE = f"hf://{NAME}"


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces, short waits, and no token of this machine's own."""
    shrink_transfers(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def served(pristine: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.serve(NAME, pristine)
    with server.running():
        yield server


@pytest.fixture
def hub(served: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server without faults, as the Hub of this process."""
    served.mend()
    monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
    yield served
    served.mend()


def of_identity(hub: HubServer) -> list[Request]:
    """The requests for the bytes that the main model is known again by; forget all others."""
    tensors = open_checkpoint(Address(SOURCE)).tensors
    hub.log.clear()
    layer = f"model.layers.{MTP_LAYER}."
    model_identity(one for name, one in tensors.items() if not name.startswith(layer))
    requests = ranges(hub)
    hub.log.clear()
    return requests


def wanted_bytes(folder: Path, *, tied: bool) -> tuple[int, int]:
    """Bytes of the headers, and of the tensors of the MTP part (and those it is compared with)."""
    headers = tensors = 0
    for path in folder.glob("*.safetensors"):
        header, data = read_shard(path)
        headers += path.stat().st_size - len(data)
        for name, entry in header.items():
            if name.startswith(f"model.layers.{MTP_LAYER}.") or (
                tied and name in ("model.embed_tokens.weight", "lm_head.weight")
            ):
                tensors += entry["data_offsets"][1] - entry["data_offsets"][0]
    return headers, tensors


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_is_wanted_is_downloaded(
    tied: bool, hub: HubServer, pristine: Path, output: Path, local: dict[str, bytes]
) -> None:
    option = () if tied else ("--allow-untied",)
    sampled = sum(request.sent_bytes for request in of_identity(hub))
    assert export(SOURCE, output, *MTP, *option).code == 0
    headers, tensors = wanted_bytes(pristine, tied=tied)
    wanted = tensors + sampled
    received = sum(request.sent_bytes for request in ranges(hub))
    # Shards that the part takes whole are downloaded with their headers, to be verified.
    assert wanted < received <= (wanted + 2 * headers) * 1.03
    assert not list(output.glob(".*"))
    if tied:
        assert_equal(output, local)
    dry = run_program("--input-dir", SOURCE, "--output-dir", "x", *MTP, *option, "--dry-run",
                      "--json")  # fmt: skip
    assert dry.code == 0, dry.err
    assert tensors <= json.loads(dry.out)["download_bytes"] <= received


def test_the_manifest_names_repository_commit_and_what_was_verified(
    hub: HubServer, output: Path, pristine: Path
) -> None:
    assert export(f"{SOURCE}@main", output, "--quiet").code == 0
    source = read_json(output / MANIFEST)["source"]
    commit = hub.repositories[NAME].revisions["main"]
    assert (source["repo"], source["commit"]) == (NAME, commit)
    files = hub.repositories[NAME].commits[commit]
    assert {name: shard["sha256"] for name, shard in source["shards"].items()} == {
        name: file.sha256 for name, file in files.items() if name.endswith(".safetensors")
    }
    # The boundary shard feeds both parts: neither reads it whole.
    assert 0 < len(source["verified_shards"]) == len(source["shards"]) - 1
    assert not [p for p in read_json(output / MANIFEST)["parts"].values() if "link" in str(p)]


def test_other_commands_read_the_same_address(
    hub: HubServer, pristine: Path, tmp_path: Path
) -> None:
    ours, theirs = (
        json.loads(run_program("inspect", place, "--json").out) for place in (SOURCE, pristine)
    )
    assert ours.pop("folder").startswith(f"{SOURCE}@")
    assert theirs.pop("folder") == str(pristine)
    assert ours == theirs
    options = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", *COPIES)
    for place, folder in ((SOURCE, "hub"), (pristine, "local")):
        outcome = quantize(place, tmp_path / folder, *options)
        assert outcome.code == 0, outcome.err
    assert_equal(tmp_path / "hub", tree(tmp_path / "local"))
    outcome = run_program("quantize", "--input-dir", SOURCE)
    assert (outcome.code, "--output-dir" in outcome.err) == (2, True)


def test_a_repository_in_a_xet_storage_is_read_through_its_bridge(
    hub: HubServer, output: Path, local: dict[str, bytes]
) -> None:
    """Ranges of signed links, without a token of that storage."""
    hub.repositories["acme/xet"] = replace(hub.repositories[NAME], is_xet=True)
    outcome = export("hf://acme/xet", output, *MTP)
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    assert ranges(hub) and not [request for request in hub.log if "xet-" in request.path]


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *(("cut", 5), ("stalled", 2), ("slow", 6), ("forbidden", 3), ("unavailable", 3)),
        ("too many requests", 4),
    ],
)
def test_a_fault_of_the_network_is_survived(
    fault: str, times: int, hub: HubServer, output: Path, local: dict[str, bytes]
) -> None:
    hub.plant(fault, times)
    outcome = export(SOURCE, output, *MTP)
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    assert not hub.meets(fault), "the fault was met as often as planted"


def test_a_cut_transfer_goes_on_where_it_stopped(
    hub: HubServer, output: Path, pristine: Path
) -> None:
    headers, tensors = wanted_bytes(pristine, tied=True)
    sampled = sum(request.sent_bytes for request in of_identity(hub))
    hub.plant("cut", 12)
    assert export(SOURCE, output, *MTP).code == 0
    received = sum(request.sent_bytes for request in ranges(hub))
    assert received <= (tensors + sampled + 2 * headers) * 1.03


def test_links_that_expire_during_a_run_are_signed_anew(
    hub: HubServer, output: Path, local: dict[str, bytes]
) -> None:
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    hub.generation += 1
    run_bundle(plan, silent)
    assert_equal(output, local)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("ignored range", "not send the bytes"),
        ("shifted range", "not send the bytes"),
        ("encoded", "not send the bytes"),
        ("other size", "size"),
        ("other checksum", "checksum"),
        ("other commit", "commit"),
        ("malformed tree", "list of files"),
        ("cut", "broke off"),
        ("forbidden", "403"),
        ("unavailable", "503"),
        ("too many requests", "429"),
    ],
)
def test_a_fault_that_stays_is_refused(
    fault: str, says: str, hub: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "RETRIES", 2)
    hub.plant(fault)
    outcome = export(SOURCE, output, *MTP)
    assert outcome.code == 6, outcome
    assert says in outcome.err
    assert_whole_paragraph(outcome.err)
    assert not looks_finished(output)


def test_wrong_bytes_of_a_whole_shard_are_noticed(
    hub: HubServer, output: Path, local: dict[str, bytes]
) -> None:
    """Same lengths, another content: the checksum of the repository tells."""
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    hub.plant("wrong bytes")
    with pytest.raises(Exception, match="checksum") as caught:
        run_bundle(plan, silent)
    assert getattr(caught.value, "exit_code", None) == 6
    assert not looks_finished(output)
    hub.mend()
    assert export(SOURCE, output, *MTP).code == 0
    assert_equal(output, local)


def assert_whole_paragraph(message: str) -> None:
    """Compare a message with the form of all: what (where), expected, found, and what to do."""
    form = r"mtp-export: error: \S.* \(.+\)\. Expected .+\. Found .+\. \S.+\.\n"
    assert re.fullmatch(form, message), message


def gated(hub: HubServer) -> str:
    hub.repositories["acme/gated"] = replace(hub.repositories[NAME], gated=True)
    return "hf://acme/gated"


def changed(change: Callable[[Path], object], hub: HubServer, folder: Path) -> str:
    hub.serve("acme/changed", folder)
    change(folder)
    hub.serve("acme/changed", folder)
    return "hf://acme/changed"


def no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def lost_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[3].unlink()


@pytest.mark.parametrize(
    ("address", "code", "says"),
    [
        ("hf://acme/none", 3, "no such repository, or it is private"),
        (f"{SOURCE}@nowhere", 3, "no such revision"),
        (f"{SOURCE}/elsewhere", 3, "no such folder"),
        ("hf://gpt2", 3, "no address of a model"),
        ("hf://", 3, "no address of a model"),
        ("hf://datasets/acme/tiny", 3, "no address of a model"),
        ("https://example.org/acme/tiny", 3, "no address of a model"),
        ("ftp://host/model", 4, "hf://org/name"),
        (gated, 3, "gated"),
        (no_weights, 3, "neither an index"),
        (lost_shard, 3, "not in the folder"),
    ],
)
@pytest.mark.parametrize("command", ["export", "inspect"])
def test_what_cannot_be_read_is_refused_in_a_paragraph(
    command: str, address: Any, code: int, says: str, hub: HubServer, source: Path, output: Path
) -> None:
    if address is gated:
        address = gated(hub)
    elif callable(address):
        address = changed(address, hub, source)
    outcome = run_program("inspect", address) if command == "inspect" else export(address, output)
    assert outcome.code == code, outcome
    assert says in outcome.err and ". ." not in outcome.err
    assert_whole_paragraph(outcome.err)
    assert not output.exists()


def test_a_hub_out_of_reach_or_forbidden_is_said(
    hub: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        outcome = export(SOURCE, output, *MTP)
        assert (outcome.code, "HF_HUB_OFFLINE" in outcome.err) == (6, True)
        assert_whole_paragraph(outcome.err)
    monkeypatch.setattr(transfers, "RETRIES", 1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    outcome = export(SOURCE, output, *MTP)
    assert (outcome.code, "cannot be reached" in outcome.err) == (6, True)
    assert_whole_paragraph(outcome.err)
    assert not output.exists()


def test_a_token_goes_to_the_hub_alone(
    hub: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.repositories["acme/private"] = replace(hub.repositories[NAME], private=True)
    hub.plant("cut", 3)
    outcome = export("hf://acme/private", output, "--part", "mtp", "--debug")
    assert outcome.code == 0, outcome.err
    for request in hub.log:
        expected = None if "/storage/" in request.path else f"Bearer {hub.token}"
        assert request.authorization == expected, request.path
    everything = [outcome.out.encode(), outcome.err.encode(), *tree(output).values()]
    assert not [text for text in everything if hub.token.encode() in text]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    outcome = export("hf://acme/private", output, "--overwrite", "--debug")
    assert outcome.code == 3
    assert "Traceback" in outcome.err
    assert "hf_wrong" not in outcome.err


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("start", nightly_but([20], (20, 33, 46)))
def test_a_killed_run_downloads_little_again(
    start: int, hub: HubServer, tmp_path: Path, local: dict[str, bytes]
) -> None:
    run = partial(export, SOURCE)
    small = {(request.path, request.byte_range) for request in of_identity(hub)}
    assert run_program("inspect", SOURCE).code == 0
    headers = ranges_got(hub) | small
    assert run(tmp_path / "whole", *MTP).code == 0
    whole = tree(tmp_path / "whole")
    resumed = 0
    for call_number in range(start, 2000, 60):
        output = tmp_path / f"died-at-{call_number}"
        hub.log.clear()
        code = run_in_a_fork(partial(run, output, *MTP), call_number)
        if code == 0 or looks_finished(output):  # it ended, or only cleared up
            assert tree(output) == whole, call_number
            break
        before = ranges_got(hub)
        assert run(output, *MTP).code == 0
        again = before & ranges_got(hub) - headers
        assert len(again) <= READERS, (call_number, again)
        assert tree(output) == whole, call_number
        resumed += 1
    assert resumed > 2
    assert_equal(output, local)


def unfinished(hub: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an output whose downloads a failing Hub interrupted."""
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    real, calls = os.replace, [0]

    def fail(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > 12:
            raise OSError(5, "Input/output error")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(Exception, match="cannot be written"):
            run_bundle(plan, silent)


def test_downloads_that_were_damaged_meanwhile_are_not_taken(
    hub: HubServer, output: Path, local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(hub, output, monkeypatch)
    kept = [path for path in output.glob(".*/*") if not path.name.endswith(".partial")]
    assert len(kept) > 3
    for number, path in enumerate(kept):
        if number % 3 == 0:
            os.truncate(path, path.stat().st_size - 1)
        elif number % 3 == 1:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    hub.log.clear()
    assert export(SOURCE, output, *MTP).code == 0
    assert_equal(output, local)


def test_a_branch_that_moves_changes_nothing_under_way(
    hub: HubServer, source: Path, output: Path, local: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    repository = hub.repositories[NAME]
    old = repository.revisions["main"]
    unfinished(hub, output, monkeypatch)
    config = source / "config.json"
    config.write_text(f"{config.read_text()} ")
    hub.serve(NAME, source)
    try:
        refused = export(SOURCE, output, *MTP)
        assert refused.code == 8
        assert old in refused.err
        assert export(f"{SOURCE}@{old}", output, *MTP).code == 0
    finally:
        repository.revisions["main"] = old
    assert_equal(output, local)


def test_a_push_during_the_run_changes_nothing(
    hub: HubServer, source: Path, output: Path, local: dict[str, bytes]
) -> None:
    """Other weights of the same sizes and names: the commit is that of the plan, also of links that
    are signed anew."""
    repository = hub.repositories[NAME]
    old = repository.revisions["main"]
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    new = hub.serve(NAME, source)
    hub.generation += 1
    try:
        run_bundle(plan, silent)
    finally:
        repository.revisions["main"] = old
    assert read_json(output / MANIFEST)["source"]["commit"] == old != new
    assert_equal(output, local)


def test_both_parts_are_downloaded_after_the_disk_was_asked(
    hub: HubServer, pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, as a dry run says; nothing where there is too little room."""
    shards = sum(path.stat().st_size for path in pristine.glob("*.safetensors"))
    dry = run_program("--input-dir", SOURCE, "--output-dir", output, "--dry-run", "--json")
    planned = json.loads(dry.out)["download_bytes"]
    assert 0.9 * shards < planned <= shards
    with monkeypatch.context() as patch:
        written = plan_export(BundleOptions(Address(SOURCE), output)).written_bytes
        free = SimpleNamespace(free=needed_disk_bytes(written))  # none for downloads that wait
        patch.setattr(shutil, "disk_usage", lambda path: free)
        hub.log.clear()
        outcome = export(SOURCE, output, "--quiet")
        assert (outcome.code, "disk" in outcome.err) == (5, True), outcome.err
        assert not output.exists()
        assert sum(request.sent_bytes for request in ranges(hub)) < shards / 10
    hub.log.clear()
    assert export(SOURCE, output, "--quiet").code == 0
    assert planned <= sum(request.sent_bytes for request in ranges(hub)) <= 1.1 * shards


def test_a_listing_of_several_pages_is_read_whole(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "page_entries", 3)
    assert run_program("inspect", SOURCE).code == 0


def test_links_to_remote_shards_are_refused_by_name(hub: HubServer, output: Path) -> None:
    outcome = export(SOURCE, output, "--link", "hardlink")
    assert (outcome.code, SOURCE in outcome.err) == (4, True)


def test_a_folder_of_a_repository_is_a_source(
    hub: HubServer, pristine: Path, tmp_path: Path
) -> None:
    shutil.copytree(pristine, tmp_path / "repository" / "deep")
    hub.serve("acme/folders", tmp_path / "repository")
    assert run_program("inspect", "hf://acme/folders/deep").code == 0
    assert run_program("inspect", "hf://acme/folders").code == 3


def test_a_download_cache_is_a_source(
    hub: HubServer, tmp_path: Path, output: Path, local: dict[str, bytes]
) -> None:
    """The folder that huggingface_hub itself makes of what this server sends."""
    snapshot = Path(
        snapshot_download(NAME, cache_dir=tmp_path / "cache", endpoint=hub.endpoint, token=False)
    )
    assert export(snapshot, output, *COPIES).code == 0
    assert tree(output) == local
    repository = snapshot.parents[1]
    for outcome in (export(repository, tmp_path / "x"), run_program("inspect", repository)):
        assert outcome.code == 3
        assert str(snapshot) in outcome.err


def test_shares_download_what_each_needs(
    hub: HubServer, pristine: Path, output: Path, tmp_path: Path
) -> None:
    options = (*COPIES, "--max-shard-size", "60kB")
    assert export(pristine, tmp_path / "local", *options).code == 0
    for share in ("1/3", "2/3", "3/3"):
        outcome = export(SOURCE, output, *options, "--share", share)
        assert outcome.code == 0, outcome.err
    assert run_program("finish", output, "--quiet").code == 0
    assert_equal(output, tree(tmp_path / "local"))
