"""Exports from moto's server, an Amazon S3 that is not ours; `make test-all` installs it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import export, looks_finished, quantize, read_json, run_program, tree
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.checkpoint.byte_source import Address
from mtp_export.errors import InvalidInputError
from mtp_export.progress import silent
from remote_bundles import COPIES, MANIFEST, assert_equal, shrink_transfers

pytestmark = pytest.mark.nightly
SERVER = Path(__file__).resolve().parents[2] / ".venv-moto/bin/moto_server"
BUCKET, FOLDER = "weights", "models/tiny"
SOURCE = f"s3://{BUCKET}/{FOLDER}"
START_SECONDS = 60


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    if not SERVER.exists():
        pytest.skip(f"{SERVER} is not there: make test-all installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.PIPE)
    try:
        yield answering(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.communicate()


def answering(endpoint: str) -> str:
    """Wait for a server, and make the bucket."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return endpoint
        except OSError:
            assert time.monotonic() < deadline, "moto's server does not start"
            time.sleep(0.2)


@pytest.fixture
def store(endpoint: str, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bucket as obstore sees it, filled."""
    from obstore.store import from_url

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIALOCAL",
        "AWS_SECRET_ACCESS_KEY": "s3-secret",
    }.items():
        monkeypatch.setenv(name, value)
    shrink_transfers(monkeypatch)
    store = from_url(SOURCE, client_options={"allow_http": True})
    for path in sorted(path for path in pristine.rglob("*") if path.is_file()):
        store.put(path.relative_to(pristine).as_posix(), path)
    return store


def test_a_bucket_is_read_as_a_folder(
    store: Any, output: Path, local: dict[str, bytes], pristine: Path, tmp_path: Path
) -> None:
    outcome = export(SOURCE, output, *COPIES)
    assert outcome.code == 0, outcome.err
    assert_equal(output, local)
    shards = read_json(output / MANIFEST)["source"]["shards"]
    for name, shard in shards.items():
        assert shard["version"] == store.head(name)["e_tag"].strip('"')
    assert run_program("inspect", SOURCE).code == 0
    options = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", *COPIES)
    for place, folder in ((SOURCE, "bucket"), (pristine, "folder")):
        outcome = quantize(place, tmp_path / folder, *options)
        assert outcome.code == 0, outcome.err
    assert_equal(tmp_path / "bucket", tree(tmp_path / "folder"))


def test_an_object_that_changes_during_the_run_is_refused(store: Any, output: Path) -> None:
    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(SOURCE), output, content=content))
    assert plan.downloads is not None
    name = plan.downloads.pieces[-1].file.path.name
    data = bytes(store.get(name).bytes())
    store.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InvalidInputError, match="changed while it was exported"):
        run_bundle(plan, silent)
    assert not looks_finished(output)


def test_what_is_not_there_is_said(store: Any, output: Path) -> None:
    for address, words in (
        ("s3://nothing/here", "no such bucket"),
        (f"s3://{BUCKET}/nothing/here", "no objects here"),
    ):
        outcome = export(address, output, *COPIES)
        assert (outcome.code, words in outcome.err) == (3, True), outcome.err
