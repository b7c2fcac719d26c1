"""Exports from object stores: the bytes of an export from a folder, whatever the network does. The
server is a local one, the client is obstore."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import (
    export,
    looks_finished,
    quantize,
    read_json,
    run_program,
    tree,
)
from mtp_checkpoints.sources import object_store, pieces, transfers
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.remote_source import READERS
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.progress import silent
from object_server import ObjectServer
from remote_bundles import (
    COPIES,
    MANIFEST,
    MTP,
    assert_equal,
    ranges,
    ranges_got,
    shrink_transfers,
)

BUCKET, FOLDER = "weights", "models/tiny"
SCHEMES = ("s3", "gs", "az")
SOURCE = f"s3://{BUCKET}/{FOLDER}"
SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many small pieces, short waits, and none of this machine's own credentials."""
    shrink_transfers(monkeypatch)
    monkeypatch.setattr(object_store, "READ_SECONDS", 0.5)
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def filled(pristine: Path) -> Iterator[ObjectServer]:
    server = ObjectServer()
    server.fill(BUCKET, FOLDER, pristine)
    with server.running():
        yield server


@pytest.fixture
def store(filled: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server without faults, as every cloud of this process."""
    filled.mend()
    for scheme in SCHEMES:
        for name, value in filled.environment(scheme).items():
            monkeypatch.setenv(name, value)
    objects = dict(filled.buckets[BUCKET])
    yield filled
    filled.mend()
    filled.buckets[BUCKET] = objects


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_kind_of_store_is_read(
    scheme: str, store: ObjectServer, output: Path, local: dict[str, bytes], pristine: Path
) -> None:
    store.page_entries = 3
    address = f"{scheme}://{BUCKET}/{FOLDER}"
    outcome = export(f"{address}/", output, *MTP)
    store.page_entries = 1000
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    assert not list(output.glob(".*"))
    source = read_json(output / MANIFEST)["source"]
    assert source["url"] == address
    objects = store.buckets[BUCKET]
    for name, shard in source["shards"].items():
        assert shard["version"] == f"{objects[f'{FOLDER}/{name}'].oid}-1"
    assert source["verified_shards"] == []
    dry = run_program("--input-dir", address, "--output-dir", "x", *MTP, "--dry-run", "--json")
    assert (
        0
        < json.loads(dry.out)["download_bytes"]
        < sum(path.stat().st_size for path in pristine.glob("*.safetensors"))
    )


def test_other_commands_read_the_same_address(
    store: ObjectServer, pristine: Path, tmp_path: Path
) -> None:
    ours, theirs = (
        json.loads(run_program("inspect", place, "--json").out) for place in (SOURCE, pristine)
    )
    assert (ours.pop("folder"), theirs.pop("folder")) == (SOURCE, str(pristine))
    assert ours == theirs
    options = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", *COPIES)
    for place, folder in ((SOURCE, "store"), (pristine, "local")):
        outcome = quantize(place, tmp_path / folder, *options)
        assert outcome.code == 0, outcome.err
    assert_equal(tmp_path / "store", tree(tmp_path / "local"))


@pytest.mark.parametrize(
    ("fault", "times"), [("cut", 5), ("stalled", 2), ("unavailable", 4), ("slow", 4)]
)
def test_a_fault_of_the_network_is_survived(
    fault: str, times: int, store: ObjectServer, output: Path, local: dict[str, bytes]
) -> None:
    store.plant(fault, times)
    outcome = export(SOURCE, output, *MTP)
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    assert not store.meets(fault), "the fault was met as often as planted"


def test_a_cut_transfer_goes_on_where_it_stopped(store: ObjectServer, tmp_path: Path) -> None:
    assert export(SOURCE, tmp_path / "whole", *MTP).code == 0
    whole = sum(request.sent_bytes for request in ranges(store))
    store.log.clear()
    store.plant("cut", 12)
    assert export(SOURCE, tmp_path / "cut", *MTP).code == 0
    assert sum(request.sent_bytes for request in ranges(store)) <= whole * 1.01


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("ignored range", 6, "must"),
        ("shifted range", 6, "must"),
        ("other size", 6, "must"),
        ("cut", 6, "does not answer"),
        ("unavailable", 6, "503"),
        ("forbidden", 3, "no access"),
    ],
)
def test_a_fault_that_stays_is_refused(
    fault: str, code: int, says: str, store: ObjectServer, output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(transfers, "RETRIES", 2)
    store.plant(fault)
    outcome = export(SOURCE, output, *MTP)
    assert outcome.code == code, outcome
    assert says in outcome.err
    assert outcome.err.count("\n") == 1
    assert not looks_finished(output)


def test_an_object_that_changes_during_the_run_is_refused(
    store: ObjectServer, source: Path, output: Path, local: dict[str, bytes]
) -> None:
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    store.fill(BUCKET, FOLDER, source)
    with pytest.raises(Exception, match="source changed") as caught:
        run_bundle(plan, silent)
    assert getattr(caught.value, "exit_code", None) == 3
    assert not looks_finished(output)
    assert not [path for path in output.rglob("*") if path.is_file()]


def test_a_run_that_goes_on_takes_only_the_same_objects(
    store: ObjectServer, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "RETRIES", 1)
        content = ContentOptions(part=Part.MTP)
        plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
        store.plant("unavailable")
        with pytest.raises(Exception, match="does not answer"):
            run_bundle(plan, silent)
    store.mend()
    shard = sorted(source.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    store.fill(BUCKET, FOLDER, source)
    outcome = export(SOURCE, output, *MTP)
    assert outcome.code == 8, outcome


@pytest.mark.parametrize(
    ("address", "code", "says"),
    [
        ("s3://nowhere/models", 3, "no such bucket"),
        (f"s3://{BUCKET}/nothing", 3, "no objects"),
        (f"s3://{BUCKET}/models", 3, "config.json"),
        ("s3://", 3, "no address"),
        ("az://weights/models?sig=az-secret", 3, "no address"),
        ("s3://key:az-secret@weights/models", 3, "no address"),
        ("abfs://weights/models", 4, "s3://"),
    ],
)
@pytest.mark.parametrize("command", ["export", "inspect"])
def test_what_cannot_be_read_is_refused_in_a_paragraph(
    command: str, address: str, code: int, says: str, store: ObjectServer, output: Path
) -> None:
    outcome = run_program("inspect", address) if command == "inspect" else export(address, output)
    assert outcome.code == code, outcome
    assert says in outcome.err
    assert "az-secret" not in outcome.err
    assert outcome.err.count("\n") == 1
    assert not output.exists()


def test_a_store_out_of_reach_is_said(
    store: ObjectServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    outcome = export(SOURCE, output, *MTP)
    assert (outcome.code, "does not answer" in outcome.err) == (6, True)
    assert not output.exists()


def test_without_obstore_the_extra_is_named(
    store: ObjectServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "obstore":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    outcome = export(SOURCE, output, *MTP)
    assert (outcome.code, "mtp-export[cloud]" in outcome.err) == (4, True)
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_secrets_are_sent_to_the_store_alone(
    scheme: str, store: ObjectServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [value for value in store.environment(scheme).values() if "secret" in value]
    assert len(secrets) == 1
    address = f"{scheme}://{BUCKET}/{FOLDER}"
    monkeypatch.setattr(transfers, "RETRIES", 1)
    store.plant("unavailable")
    outcomes = [export(address, output, *MTP, "--debug")]
    assert outcomes[0].code == 6
    store.mend()
    outcomes.append(export(address, output, *MTP, "--debug"))
    assert outcomes[1].code == 0
    signed = [bool(r.authorization) or "sig=" in r.path for r in store.log]
    assert all(signed)
    texts = [text.encode() for outcome in outcomes for text in (outcome.out, outcome.err)]
    secret = secrets[0].rpartition("=")[2].encode()
    assert not [text for text in (*texts, *tree(output).values()) if secret in text]


def test_a_killed_run_downloads_little_again(
    store: ObjectServer, output: Path, local: dict[str, bytes]
) -> None:
    """In a process of its own: obstore's threads do not survive a fork."""
    program = (
        "from mtp_checkpoints.sources import pieces; from mtp_export.cli import main;"
        f"pieces.PIECE_BYTES, pieces.JOIN_BYTES = {pieces.PIECE_BYTES}, {pieces.JOIN_BYTES}; main()"
    )
    options = ("--input-dir", SOURCE, "--output-dir", str(output), *MTP)
    assert run_program("inspect", SOURCE).code == 0
    headers = ranges_got(store)
    store.plant("slow")
    with subprocess.Popen([sys.executable, "-c", program, *options]) as process:
        while len(list(output.glob(".mtp_export.downloads/*[0-9a-f]"))) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    before = ranges_got(store)
    store.mend()
    assert export(SOURCE, output, *MTP).code == 0
    again = before & ranges_got(store) - headers
    assert len(again) <= READERS, again
    assert_equal(output, local)
