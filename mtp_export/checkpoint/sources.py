"""Source arguments of commands: a folder's path, or an address such as hf://org/name@revision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtp_export.checkpoint.byte_source import Address, ByteSource, Place
from mtp_export.checkpoint.local_folder import LocalFolder
from mtp_export.errors import InvalidInputError, UnsupportedError

_SEPARATOR = "://"


def _hub(address: Address) -> ByteSource:
    from mtp_export.checkpoint.hub import HubSource  # brings an HTTP client, which few runs need

    return HubSource.open(address)


# Byte sources by the scheme of their addresses; https is for web pages of the Hub.
SOURCES: dict[str, Callable[[Address], ByteSource]] = {"hf": _hub, "https": _hub}


def place_of(text: str) -> Place:
    """Return the place that a source argument names; nothing is looked up."""
    return Address(text) if _SEPARATOR in text else Path(text)


def byte_source(place: Place) -> ByteSource:
    """Return the files at a place (InvalidInputError for a missing folder or repository, IoError).

    Raises UnsupportedError for an address of a kind that no source reads.
    """
    if isinstance(place, Path):
        if not place.is_dir():
            raise InvalidInputError(
                "There is no checkpoint folder here", where=place, todo="Check --input-dir"
            )
        return LocalFolder(place)
    address = Address(str(place))
    scheme = address.text.partition(_SEPARATOR)[0]
    if scheme not in SOURCES:
        raise UnsupportedError(
            "Nothing here reads from such an address",
            where=address,
            expected="a folder, or hf://org/name[@revision] for a repository of the Hub",
            found=f"{scheme}{_SEPARATOR}",
            todo="Download the checkpoint first",
        )
    return SOURCES[scheme](address)
