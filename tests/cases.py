"""Shared helpers: small checkpoints, ways to damage them, and the program run in-process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.make_checkpoint import TINY_CONFIG, make_checkpoint
from disk import watch_disk
from mtp_checkpoints.formats import FORMATS, GGUF
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_checkpoints.layouts import TARGETS
from mtp_export.cli import main

# Names of the weight formats that are written into safetensors files.
WRITTEN = tuple(
    name
    for name, known in FORMATS.items()
    if not issubclass(known, ReadOnlyFormat) and GGUF not in known.methods
)
# Options that exports of these checkpoints need for a layout, beside --target.
TARGET_OPTIONS = {"llama.cpp": ("--pre-tokenizer", "none")}
# Names of the layouts whose folders are safetensors files.
SAFETENSORS_TARGETS = tuple(name for name, one in TARGETS.items() if not one.rewrites_main)
MTP_LAYER = TINY_CONFIG["num_hidden_layers"]
# Dimensions whose 128x128 tiles are whole, as transformers' fp8 loader needs them.
WHOLE_TILES: dict[str, Any] = TINY_CONFIG | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
UNQUANTIZED: dict[str, Any] = {
    key: value for key, value in TINY_CONFIG.items() if key != "quantization_config"
}


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a run of the program."""

    code: int
    out: str
    err: str


def run_program(*arguments: object) -> Outcome:
    """mtp-export with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def export(source: Path, output: Path, *options: object) -> Outcome:
    """An export with these options."""
    return run_program("--input-dir", source, "--output-dir", output, *options)


def quantize(source: Path, output: Path, *options: object) -> Outcome:
    """A quantization with these options."""
    return run_program("quantize", "--input-dir", source, "--output-dir", output, *options)


def die_at(call_number: int) -> None:
    """End this process at the n-th call from now that touches a disk, as kill -9 would."""
    calls = iter(range(1, 1 << 30))

    def die(call: str, arguments: tuple[object, ...]) -> None:
        if next(calls) == call_number:
            os._exit(9)

    watch_disk(die)


def nightly_but(every_push: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters: the values, of which all but some run nightly only."""
    kept, wanted = list(values), list(every_push)
    assert all(value in kept for value in wanted)
    return [value if value in wanted else _nightly(value) for value in kept]


def _nightly(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.nightly)


def run_in_a_fork(action: Callable[[], Outcome], call_number: int) -> int:
    """Exit code of a run in a child process that dies at a disk call (9), or gets through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_at(call_number)
            code = action().code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def looks_finished(output: Path) -> bool:
    """Return True for a bundle that its own manifest calls complete."""
    manifest, journal = output / "mtp_export.json", output / ".mtp_export.journal"
    return manifest.exists() and not journal.exists()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def unread_model(folder: Path) -> Path:
    """A folder that looks like a checkpoint, of which nothing can be read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").touch()
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply a change to a JSON file in place."""
    value = read_json(path)
    change(value)
    path.write_text(json.dumps(value))


def read_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder by name, read by safetensors' own reader."""
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                assert name not in tensors
                tensors[name] = shard.get_tensor(name)
    return tensors


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def shard_of(folder: Path, tensor: str) -> Path:
    """The shard that the index names for a tensor."""
    return folder / read_json(folder / "model.safetensors.index.json")["weight_map"][tensor]


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """A shard's header as JSON, and its data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path: Path, header: dict[str, Any] | str, data: bytes) -> None:
    """A shard from a header, valid or not, and data."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def hub_cache(source: Path, cache: Path, *, shared: bool = False) -> Path:
    """Move a checkpoint into a cache as huggingface_hub lays it out; return the snapshot's folder.

    shared: the repository's blobs are links too, into those that all repositories share.
    """
    repository = cache / "models--org--name"
    snapshot, blobs = repository / "snapshots/0123abcd", repository / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        blob, link = blobs / f"sha{number}", snapshot / path.relative_to(source)
        target = cache / "blobs/ab" / f"xet{number}" if shared else blob
        for folder in (target.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        if shared:
            blob.symlink_to(os.path.relpath(target, blob.parent))
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def drop_tensor(folder: Path, name: str, *, from_index: bool = True) -> None:
    """Remove a tensor from its shard, and from the index if asked."""
    path = shard_of(folder, name)
    header, data = read_shard(path)
    start, end = header.pop(name)["data_offsets"]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    write_shard(path, header, data[:start] + data[end:])
    if from_index:
        edit_json(folder / "model.safetensors.index.json", lambda i: i["weight_map"].pop(name))


def add_tensor(folder: Path, like: str, name: str, *, to_index: bool = True) -> None:
    """Append a copy of a tensor under another name to the same shard."""
    path = shard_of(folder, like)
    header, data = read_shard(path)
    start, end = header[like]["data_offsets"]
    header[name] = {**header[like], "data_offsets": [len(data), len(data) + end - start]}
    write_shard(path, header, data + data[start:end])
    if to_index:
        edit_json(
            folder / "model.safetensors.index.json",
            lambda index: index["weight_map"].update({name: path.name}),
        )


__all__ = [
    "MTP_LAYER",
    "SAFETENSORS_TARGETS",
    "TARGET_OPTIONS",
    "TINY_CONFIG",
    "UNQUANTIZED",
    "WHOLE_TILES",
    "Outcome",
    "add_tensor",
    "drop_tensor",
    "edit_json",
    "export",
    "hub_cache",
    "looks_finished",
    "make_checkpoint",
    "nightly_but",
    "quantize",
    "read_json",
    "read_shard",
    "read_tensors",
    "run_in_a_fork",
    "run_program",
    "shard_of",
    "tree",
    "write_shard",
]
