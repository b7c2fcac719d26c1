"""A repository of the Hugging Face Hub as a byte source, pinned to one commit.

Its files are listed once; headers and tensors are read by byte ranges, nothing else is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from huggingface_hub import parse_hf_uri
from huggingface_hub.errors import HfUriError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import HfUri

from mtp_export.checkpoint.byte_source import Address
from mtp_export.checkpoint.files import check_small_file
from mtp_export.checkpoint.hub_client import HubClient, hub_endpoint
from mtp_export.errors import InvalidInputError

READERS = 8  # transfers at once
# The first read of a file brings this much, or a thousandth of it, as most headers then need no
# second request.
_HEAD_BYTES = 128 << 10


def model_uri(address: Address) -> HfUri:
    """Return the parts of a model's address (InvalidInputError for a malformed one)."""
    try:
        uri = parse_hf_uri(address.text, endpoint=hub_endpoint())
    except HfUriError as error:
        raise _malformed(address, error.msg) from None
    if uri.type != "model":
        raise _malformed(address, f"a {uri.type}")
    return uri


@dataclass(frozen=True)
class HubSource:
    """The files of a repository at a commit, or of a folder in it.

    path is the address with the commit that its revision was when the source was opened.
    """

    client: HubClient
    path: Address
    folder: str
    files: Mapping[str, RepoFile]

    readers = READERS

    @classmethod
    def open(cls, address: Address) -> HubSource:
        """Open a repository: hf://org/name[@revision][/folder], or its web page.

        Raises InvalidInputError for a malformed address, and for a repository or revision that is
        missing or that the token gives no access to; IoError when the Hub cannot be reached.
        """
        uri = model_uri(address)
        client = HubClient(uri.id, address)
        commit = client.commit_of(uri.revision)
        root = Address(f"hf://{uri.id}@{commit}")
        client = replace(client, commit=commit, address=root)
        prefix = f"{uri.path_in_repo}/" if uri.path_in_repo else ""
        files = {
            file.path.removeprefix(prefix): file
            for file in client.tree()
            if file.path.startswith(prefix)
        }
        if not files:
            raise InvalidInputError(
                "There is no such folder in the repository"
                if prefix
                else "The repository is empty",
                where=root / uri.path_in_repo if prefix else root,
                todo="Check the address; its parts are hf://org/name@revision/folder",
            )
        path = root / uri.path_in_repo if prefix else root
        return cls(client=client, path=path, folder=uri.path_in_repo, files=files)

    @property
    def origin(self) -> Mapping[str, str]:
        """Repository and commit, and the folder if it is not the top one."""
        folder = {"folder": self.folder} if self.folder else {}
        return {"repo": self.client.repo, "commit": self.client.commit, **folder}

    def names(self, folder: str = "") -> frozenset[str]:
        prefix = f"{folder}/" if folder else ""
        below = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return frozenset(name for name in below if "/" not in name)

    def file(self, name: str) -> HubFile:
        return HubFile(self.path / name, self._listed(name), self.client)

    def read(self, name: str) -> bytes:
        file = self._listed(name)
        check_small_file(self.path / name, file.size)
        return self.client.whole(file)

    def _listed(self, name: str) -> RepoFile:
        if name in self.files:
            return self.files[name]
        raise InvalidInputError(
            "A file that every checkpoint has is missing",
            where=self.path / name,
            found=f"{len(self.files)} other files in the repository",
            todo="Name the repository, revision or folder that holds config.json and the"
            " safetensors shards",
        )


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    path: Address
    listed: RepoFile = field(compare=False)
    client: HubClient = field(compare=False)

    @property
    def size_bytes(self) -> int:
        return int(self.listed.size)

    @property
    def sha256(self) -> str | None:
        return None if self.listed.lfs is None else str(self.listed.lfs.sha256)

    @property
    def version(self) -> str:
        return self.sha256 or str(self.listed.blob_id)

    def open(self, once: range | None = None) -> OpenHubFile:
        return OpenHubFile(self)

    def fetch(
        self,
        span: range,
        sink: Callable[[bytes], None],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Give sink the bytes of a span in order (IoError)."""
        self.client.fetch(self.listed, span, sink, pause)


class OpenHubFile:
    """A file of a repository, read by requests of its own."""

    def __init__(self, file: HubFile) -> None:
        self._file, self._head = file, b""
        self.size_bytes, self.version = file.size_bytes, file.version

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        if start == 0 and not self._head:
            ahead = min(_HEAD_BYTES, self.size_bytes // 1000)
            self._head = self._fetched(0, max(end, ahead))
        known = self._head[start:end]
        return known + self._fetched(start + len(known), end)

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into a buffer; return where in it they are."""
        position = 0

        def put(chunk: bytes) -> None:
            nonlocal position
            buffer[position : position + len(chunk)] = chunk
            position += len(chunk)

        self._file.fetch(range(start, end), put)
        return slice(0, position)

    def close(self) -> None:
        """Do nothing: connections are kept by the client."""

    def _fetched(self, start: int, end: int) -> bytes:
        data = bytearray()
        self._file.fetch(range(start, end), data.extend)
        return bytes(data)


def _malformed(address: Address, found: str) -> InvalidInputError:
    return InvalidInputError(
        "This is no address of a model on the Hub",
        where=address,
        expected="hf://org/name, with @revision or @revision/folder behind it if need be",
        found=found,
        todo="Copy the name from the model's page",
    )
