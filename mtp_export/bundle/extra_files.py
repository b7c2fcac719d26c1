"""Files copied as they are beside weights and config, so that engines find a folder complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path

from mtp_export.checkpoint.byte_source import ByteSource
from mtp_export.checkpoint.reader import CONFIG_NAME, Checkpoint
from mtp_export.errors import InvalidInputError

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
_TEMPLATE_FOLDER = "additional_chat_templates"  # holds <name>.jinja beside chat_template.jinja


def extra_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the source's tokenizer, generation and code files, as sorted paths below its own.

    Raises IoError for one that cannot be read, InvalidInputError for a chat template that lies
    elsewhere.
    """
    files = checkpoint.files
    extra = [n for n in sorted(files.names()) if any(fnmatch(n, p) for p in _PATTERNS)]
    extra = [name for name in extra if not name.endswith(".safetensors")]
    extra += _chat_templates(files)
    for name in extra:
        with closing(files.file(name).open()):
            pass  # it can be read
    return tuple(extra)


def _chat_templates(files: ByteSource) -> list[str]:
    """Return the templates that Hugging Face keeps in a folder of their own."""
    names = sorted(n for n in files.names(_TEMPLATE_FOLDER) if n.endswith(".jinja"))
    if isinstance(files.path, Path):
        _check_inside(files.path, [files.path / _TEMPLATE_FOLDER / name for name in names])
    return [f"{_TEMPLATE_FOLDER}/{name}" for name in names]


def _check_inside(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse a template that is a link to somewhere else (InvalidInputError)."""
    # A download cache links every file of a checkpoint to one folder, where config.json is too.
    homes = {Path(os.path.realpath(folder)), Path(os.path.realpath(folder / CONFIG_NAME)).parent}
    for path in paths:
        real = Path(os.path.realpath(path))
        if homes.isdisjoint(real.parents):
            raise InvalidInputError(
                "A chat template leads out of the checkpoint",
                where=path,
                expected="a file in the folder",
                found=f"a link to {real}",
                todo="Do not trust this checkpoint; put the template itself there, or remove it",
            )
