"""Exports from object stores as others emulate them."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import export, looks_finished, quantize, read_json, run_program, tree
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.progress import silent
from remote_bundles import COPIES, MANIFEST, assert_equal, shrink_transfers
from store_emulators import BUCKET, EMULATORS, INSTALLED

pytestmark = pytest.mark.nightly
FOLDER = "models/tiny"
Put = Callable[[str, bytes], object]  # puts a file into the folder


@pytest.fixture(scope="module", params=EMULATORS)
def emulated(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The scheme of an emulator's addresses, and its endpoint."""
    scheme: str = request.param
    emulator = EMULATORS[scheme]
    if emulator.path is None:
        pytest.skip(f"{INSTALLED} has no emulator for {scheme}: make test-all installs it")
    with emulator.running() as endpoint:
        yield scheme, endpoint


@pytest.fixture
def address(emulated: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of the bucket, as this process reaches it."""
    scheme, endpoint = emulated
    prefixes = ("AWS_", "GOOGLE_", "AZURE_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)
    for name, value in EMULATORS[scheme].variables(endpoint).items():
        monkeypatch.setenv(name, value)
    shrink_transfers(monkeypatch)
    return f"{scheme}://{BUCKET}/{FOLDER}"


@pytest.fixture
def store(address: str) -> Any:
    """The folder as obstore sees it."""
    from obstore.store import from_url

    return from_url(address, client_options={"allow_http": True})


@pytest.fixture
def put(emulated: tuple[str, str], store: Any, pristine: Path) -> Put:
    """Put a file into the folder, which is filled."""
    scheme, endpoint = emulated
    upload = EMULATORS[scheme].upload

    def put(name: str, data: bytes) -> None:
        if upload is None:
            store.put(name, data)
        else:
            urllib.request.urlopen(upload(endpoint, f"{FOLDER}/{name}", data)).close()

    for path in sorted(path for path in pristine.rglob("*") if path.is_file()):
        put(path.relative_to(pristine).as_posix(), path.read_bytes())
    return put


def test_a_bucket_is_read_as_a_folder(
    address: str,
    put: Put,
    store: Any,
    output: Path,
    local: dict[str, bytes],
    pristine: Path,
    tmp_path: Path,
) -> None:
    outcome = export(address, output, *COPIES)
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    shards = read_json(output / MANIFEST)["source"]["shards"]
    for name, shard in shards.items():
        assert shard["version"] == store.head(name)["e_tag"].strip('"')
    assert run_program("inspect", address).code == 0
    options = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", *COPIES)
    for place, folder in ((address, "bucket"), (pristine, "folder")):
        outcome = quantize(place, tmp_path / folder, *options)
        assert outcome.code == 0, outcome.err
    assert_equal(tmp_path / "bucket", tree(tmp_path / "folder"))


def test_an_object_that_changes_during_the_run_is_refused(
    address: str, put: Put, store: Any, output: Path
) -> None:
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(address), output, content=content))
    assert plan.downloads is not None
    name = plan.downloads.pieces[-1].file.path.name
    data = bytes(store.get(name).bytes())
    put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InvalidInputError, match="changed while it was exported"):
        run_bundle(plan, silent)
    assert not looks_finished(output)


def test_what_is_not_there_is_said(address: str, put: Put, output: Path) -> None:
    scheme = address.partition("://")[0]
    places = {f"{scheme}://{BUCKET}/nothing/here": "no objects here"}
    if scheme != "gs":  # fake-gcs-server answers 500
        places[f"{scheme}://nothing/here"] = "no such bucket"
    for place, words in places.items():
        outcome = export(place, output, *COPIES)
        assert (outcome.code, words in outcome.err) == (3, True), outcome.err
