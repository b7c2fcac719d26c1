"""Files that come along beside weights and config, by their names."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtp_checkpoints.errors import InvalidInputError, IoError
from mtp_checkpoints.sources.files import MAX_NAME_BYTES, write_bytes
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.extra_files import extra_files

COMES = (
    *("LICENSE", "LICENSE-MODEL", "added_tokens.json", "chat_template.jinja", "code.py"),
    *("chat_template.json", "generation_config.json", "merges.txt", "other.jinja"),
    *("preprocessor_config.json", "processor_config.json", "qwen.tiktoken"),
    *("special_tokens_map.json", "spiece.model", "tekken.json", "tokenizer.json"),
    *("tokenizer_config.json", "vocab.json", "vocab.txt"),
)
STAYS = (
    *(
        "config.json",
        "README.md",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch.bin",
    ),
    *("tokenizer.safetensors", "merges.txt.bak", "notes.txt", "vocabulary", "my_tokenizer.json"),
    *("MY_LICENSE", "code.pyc", "generation_config.json.old", "a.jinja2"),
)


def found_in(folder: Path) -> tuple[str, ...]:
    checkpoint: Any = SimpleNamespace(files=LocalFolder(folder))
    return extra_files(cast(Checkpoint, checkpoint))


def test_what_comes_along(tmp_path: Path) -> None:
    for name in (*STAYS, *COMES):
        (tmp_path / name).touch()
    assert found_in(tmp_path) == tuple(sorted(COMES))


def test_templates_of_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for name in ("b.jinja", "a.jinja", "notes.txt"):
        (folder / name).touch()
    (tmp_path / "z.jinja").touch()
    assert found_in(tmp_path) == (
        "z.jinja",
        "additional_chat_templates/a.jinja",
        "additional_chat_templates/b.jinja",
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/a.jinja"])
def test_a_file_that_is_too_large(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for size in (48_000_000, 48_000_001):
        with path.open("wb") as file:  # without blocks on disk
            file.truncate(size)
        if size == 48_000_000:
            assert found_in(tmp_path) == (name,)
    with pytest.raises(InvalidInputError, match="too large") as refusal:
        found_in(tmp_path)
    assert refusal.value.where == path
    assert refusal.value.found == "48000001 bytes"


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"tokenizer\xff.json")
    path.touch()
    with pytest.raises(InvalidInputError) as refusal:
        found_in(tmp_path)
    error = refusal.value
    assert error.what == "The name of a file that comes along is not UTF-8"
    assert error.where == path
    assert error.todo == "Rename the file, or remove it from the checkpoint"
    path.rename(tmp_path / os.fsdecode(b"notes\xff"))
    assert found_in(tmp_path) == ()


def test_no_file_stays_open(tmp_path: Path) -> None:
    for name in COMES:
        (tmp_path / name).touch()
    before = len(os.listdir("/proc/self/fd"))
    found_in(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_is_too_long_to_be_written(tmp_path: Path) -> None:
    """Its temporary name is longer: it is refused before anything is written."""
    longest = tmp_path / "tokenizer".ljust(MAX_NAME_BYTES, "x")
    write_bytes(longest, b"")
    assert found_in(tmp_path) == (longest.name,)
    longest.with_name(longest.name + "x").touch()
    with pytest.raises(InvalidInputError, match="is too long") as refusal:
        found_in(tmp_path)
    assert refusal.value.found == "238 bytes"
    with pytest.raises(IoError, match="Choose a shorter path"):
        write_bytes(longest.with_name(longest.name + "x"), b"")
