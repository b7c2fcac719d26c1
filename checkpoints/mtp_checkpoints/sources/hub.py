"""A repository of the Hugging Face Hub as a byte source, pinned to one commit.

Its files are listed once; headers and tensors are read by byte ranges, nothing else is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from huggingface_hub import parse_hf_uri
from huggingface_hub.errors import HfUriError
from huggingface_hub.utils import HfUri

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub_client import HubClient, RepositoryFile, hub_endpoint
from mtp_checkpoints.sources.remote_source import OpenRemoteFile, RemoteSource
from mtp_checkpoints.sources.transfers import Pause, Sink


def model_uri(address: Address) -> HfUri:
    """Return the parts of a model's address (InvalidInputError for a malformed one)."""
    try:
        uri = parse_hf_uri(address.text, endpoint=hub_endpoint())
    except HfUriError as error:
        raise _malformed(address, error.msg.rstrip(" .")) from None
    if uri.type != "model":
        raise _malformed(address, f"a {uri.type}")
    return uri


def open_repository(address: Address) -> RemoteSource:
    """Open a repository: hf://org/name[@revision][/folder], or its web page.

    The source's path has the commit that the revision is now. Raises InvalidInputError for a
    malformed address, and for a repository or revision that is missing or that the token gives no
    access to; IoError when the Hub cannot be reached.
    """
    uri = model_uri(address)
    folder = uri.path_in_repo
    client = HubClient(uri.id, address)
    commit = client.commit_of(uri.revision)
    root = Address(f"hf://{uri.id}@{commit}")
    client = replace(client, commit=commit, address=root)
    path, prefix = (root / folder, f"{folder}/") if folder else (root, "")
    files = {
        file.path.removeprefix(prefix): HubFile(root / file.path, file, client)
        for file in client.tree()
        if file.path.startswith(prefix)
    }
    if not files:
        raise InvalidInputError(
            "There is no such folder in the repository" if folder else "The repository is empty",
            where=path,
            expected="a folder with config.json and safetensors shards",
            found="no file",
            todo="Check the address; its parts are hf://org/name@revision/folder",
        )
    origin = {"repo": uri.id, "commit": commit} | ({"folder": folder} if folder else {})
    return RemoteSource(path, origin, files)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    path: Address
    listed: RepositoryFile = field(compare=False)
    client: HubClient = field(compare=False)

    @property
    def size_bytes(self) -> int:
        return self.listed.size

    @property
    def sha256(self) -> str | None:
        return self.listed.sha256

    @property
    def version(self) -> str:
        return self.sha256 or self.listed.blob_id

    def open(self, once: range | None = None) -> OpenRemoteFile:
        return OpenRemoteFile(self)

    def fetch(self, span: range, sink: Sink, pause: Pause) -> None:
        """Give sink the bytes of a span in order (IoError)."""
        self.client.fetch(self.listed, span, sink=sink, pause=pause)

    def whole(self) -> bytes:
        """Return the whole file, with its checksum compared (IoError)."""
        return self.client.whole(self.listed)


def _malformed(address: Address, found: str) -> InvalidInputError:
    return InvalidInputError(
        "This is no address of a model on the Hub",
        where=address,
        expected="hf://org/name, with @revision or @revision/folder behind it if need be",
        found=found,
        todo="Copy the name from the model's page",
    )
