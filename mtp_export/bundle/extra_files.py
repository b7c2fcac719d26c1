"""Files copied as they are beside weights and config, so that engines find a folder complete."""

from __future__ import annotations

from contextlib import closing
from fnmatch import fnmatch
from pathlib import PurePath

from mtp_checkpoints.containers import CONTAINERS
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.files import MAX_NAME_BYTES, check_small_file
from mtp_checkpoints.tensors.reader import Checkpoint

_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "LICENSE*",
    "*processor_config.json",
    "tekken.json",
    "*.jinja",
    "*.py",
)
_WEIGHTS = tuple(PurePath(kind.shard_name(1, 1)).suffix for kind in CONTAINERS.values())
_TEMPLATE_FOLDER = "additional_chat_templates"  # holds <name>.jinja beside chat_template.jinja


def extra_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the source's tokenizer, generation and code files, as sorted paths below its own.

    Code is copied for engines that ask for it, and never run here. Raises InvalidInputError for a
    file that is too large, leads out of the checkpoint or has a name that is no text, IoError for
    one that cannot be read.
    """
    source = checkpoint.files
    names = [name for name in sorted(source.names()) if _comes_along(name)]
    templates = sorted(name for name in source.names(_TEMPLATE_FOLDER) if fnmatch(name, "*.jinja"))
    names += [f"{_TEMPLATE_FOLDER}/{name}" for name in templates]
    for name in names:
        _check_name(source.path / name)
        with closing(source.file(name).open()) as file:
            check_small_file(source.path / name, file.size_bytes)
    return tuple(names)


def _comes_along(name: str) -> bool:
    return not name.endswith(_WEIGHTS) and any(fnmatch(name, pattern) for pattern in _PATTERNS)


def _check_name(path: Place) -> None:
    """Refuse a file whose name the manifest, which is UTF-8, cannot hold, or under whose temporary
    name no file could be written (InvalidInputError)."""
    try:
        size_bytes = len(path.name.encode())
    except UnicodeEncodeError:
        raise InvalidInputError(
            "The name of a file that comes along is not UTF-8",
            where=path,
            todo="Rename the file, or remove it from the checkpoint",
        ) from None
    if size_bytes > MAX_NAME_BYTES:
        raise InvalidInputError(
            "The name of a file that comes along is too long",
            where=path,
            expected=f"at most {MAX_NAME_BYTES} bytes",
            found=f"{size_bytes} bytes",
            todo="Rename the file, or remove it from the checkpoint",
        )
