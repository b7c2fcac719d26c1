"""The model on the Hub that a bundle was made from: named by the card, and a source of shards that
need no upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub import model_uri
from mtp_checkpoints.sources.hub_client import HubClient, RepositoryFile

_LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class BaseModel:
    """A model at a commit.

    files are those that the Hub can copy to another repository, by SHA-256; license is what its
    card says of it.
    """

    name: str
    commit: str
    files: Mapping[str, RepositoryFile] = field(default_factory=dict)
    license: Mapping[str, Any] = field(default_factory=dict)


def base_model(named: Address | None, manifest: Mapping[str, Any]) -> BaseModel | None:
    """Return the model that --base-model names, else the one that the manifest says was read.

    Raises InvalidInputError for a named one that cannot be read, IoError.
    """
    if named is not None:
        uri = model_uri(named)
        return _read(uri.id, uri.revision, named)
    source = manifest["source"]
    name, commit = source.get("repo"), source.get("commit")
    if not (isinstance(name, str) and isinstance(commit, str)):
        return None
    address = Address(f"hf://{name}@{commit}")
    uri = model_uri(address)  # a manifest may hold anything
    try:
        return _read(uri.id, uri.revision, address)
    except InvalidInputError:  # gone, or closed to this token: it is named all the same
        return BaseModel(uri.id, uri.revision or "")


def _read(name: str, revision: str | None, address: Address) -> BaseModel:
    client = HubClient(name, address)
    info = client.info(revision)
    commit = info.get("sha") or ""
    files = replace(client, commit=commit).tree() if commit else []
    # The Hub copies between repositories what Xet stores.
    copied = {file.sha256: file for file in files if file.sha256 and file.xet_hash}
    return BaseModel(name, commit, files=copied, license=_license(info))


def _license(info: Mapping[str, Any]) -> dict[str, Any]:
    card = info.get("cardData")
    found = {key: card.get(key) for key in _LICENSE_KEYS} if isinstance(card, dict) else {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
