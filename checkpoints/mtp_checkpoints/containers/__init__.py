"""Containers of checkpoints: literal instances, found by what files a source has."""

from __future__ import annotations

from mtp_checkpoints.containers.base import CONFIG_NAME, Container
from mtp_checkpoints.containers.gguf import Gguf
from mtp_checkpoints.containers.safetensors import INDEX_NAME, Safetensors, shards_alone
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import ByteSource

SAFETENSORS, GGUF = Safetensors(), Gguf()
CONTAINERS: dict[str, Container] = {one.name: one for one in (SAFETENSORS, GGUF)}


def container_of(source: ByteSource) -> Container:
    """Return the container of a source's files.

    Raises InvalidInputError for a source without weights, or whose config is missing too; IoError.
    """
    container = _container_of(source)
    if container is not None:
        return container
    source.read(CONFIG_NAME)
    if (found := shards_alone(source.names())) is not None:
        raise InvalidInputError(
            "The folder has shards and no index",
            where=source.path,
            expected=INDEX_NAME,
            found=found,
            todo="Download what is missing from where the folder is from",
        )
    raise InvalidInputError(
        "The folder has neither an index nor a file of weights",
        where=source.path,
        expected=", or ".join(container.title for container in CONTAINERS.values()),
        found=f"{len(source.names())} other files",
        todo=f"Point at a checkpoint in a format of {', '.join(CONTAINERS)}",
    )


def is_checkpoint(source: ByteSource) -> bool:
    """Return whether a source's files look like a checkpoint: a config, or weights."""
    return CONFIG_NAME in source.names() or _container_of(source) is not None


def _container_of(source: ByteSource) -> Container | None:
    return next((container for container in CONTAINERS.values() if container.probe(source)), None)
