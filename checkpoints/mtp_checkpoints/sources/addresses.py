"""Source arguments of commands: a folder's path, or an address such as hf://org/name@revision."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources.byte_source import Address, ByteSource, Place
from mtp_checkpoints.sources.gguf_model import GGUF_SUFFIX, OneGgufModel
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.suggestions import nearest

_SEPARATOR = "://"
HUB = f"hf{_SEPARATOR}"


def _hub(address: Address) -> ByteSource:
    from mtp_checkpoints.sources.hub import open_repository  # brings an HTTP client, which few need

    return open_repository(address)


def _objects(address: Address) -> ByteSource:
    from mtp_checkpoints.sources.object_store import open_object_store

    return open_object_store(address)


# Byte sources by the scheme of their addresses; https is for web pages of the Hub.
SOURCES: dict[str, Callable[[Address], ByteSource]] = {
    "hf": _hub,
    "https": _hub,
    "s3": _objects,
    "gs": _objects,
    "az": _objects,
}


def place_of(text: str) -> Place:
    """Return the place that a source argument names; nothing is looked up."""
    return Address(text) if _SEPARATOR in text else Path(text)


def download_command(address: Address) -> str:
    """Return the command that copies a remote checkpoint into a folder, in words where it is no
    repository of the Hub."""
    scheme, _, rest = address.text.partition(_SEPARATOR)
    if scheme != "hf":
        return f"copy {address} to DIR"
    name, _, revision = "/".join(rest.split("/")[:2]).partition("@")
    pinned = f" --revision {revision}" if revision else ""
    return f"hf download {name}{pinned} --local-dir DIR"


def byte_source(place: Place) -> ByteSource:
    """Return the files at a place (InvalidInputError for a missing folder or repository, IoError).

    Raises UnsupportedError for an address of a kind that no source reads.
    """
    if isinstance(place, Path):
        if place.suffix == GGUF_SUFFIX and place.is_file():
            return OneGgufModel(place.parent, place.name)
        if not place.is_dir():
            raise InvalidInputError(
                "There is no checkpoint folder here", where=place, todo=_meant(place)
            )
        return LocalFolder(place)
    address = Address(str(place))
    scheme = address.text.partition(_SEPARATOR)[0]
    if scheme not in SOURCES:
        raise UnsupportedError(
            "Nothing here reads from such an address",
            where=address,
            expected="a folder or a GGUF file, hf://org/name[@revision] for a repository of the"
            " Hub, or a bucket's s3://, gs:// or az:// address",
            found=f"{scheme}{_SEPARATOR}",
            todo=_meant_scheme(address, scheme) or "Download the checkpoint first",
        )
    return SOURCES[scheme](address)


def _meant(path: Path) -> str:
    """Return what to do about a folder that is not there: its text may be a repository's name, or
    an address that lacks a slash."""
    scheme, colon, rest = str(path).partition(":")
    if colon and scheme in SOURCES:
        return f"Did you mean {scheme}{_SEPARATOR}{rest.lstrip('/')}?"
    looks_like_a_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path))
    is_below_nothing = looks_like_a_name and not path.parent.exists()
    return f"Did you mean {HUB}{path}?" if is_below_nothing else "Check the path"


def _meant_scheme(address: Address, scheme: str) -> str | None:
    found = nearest(scheme, SOURCES)
    rest = address.text.partition(_SEPARATOR)[2]
    return None if found is None else f"Did you mean {found}{_SEPARATOR}{rest}?"
