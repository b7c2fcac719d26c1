"""Defects that were found once, each as the smallest damage that shows it; campaigns run them all.

A new one is one line: a name that says the defect, and a Known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import torch

from cases import edit_json, read_shard, write_shard
from fuzz.mutators.shard import read_shard as read_shard_bytes
from fuzz.mutators.shard import write_shard as write_shard_bytes
from fuzz.mutators.special_files import SECRET

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Known:
    """Damage to a subject's input, the command that reads it, and the exit that it must have."""

    command: str
    subject: str
    damage: Damage
    exit: int


def field(file: str, name: str, value: Any) -> Damage:
    """Return the damage that sets a field of a JSON file."""
    return lambda folder: edit_json(folder / file, lambda content: content.update({name: value}))


def content(file: str, raw: bytes) -> Damage:
    """Return the damage that replaces a file's content."""
    return lambda folder: (folder / file).write_bytes(raw)


def link(file: str, target: Path) -> Damage:
    """Return the damage that replaces a file by a link."""

    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return damage


def hole(file: str, size_bytes: int) -> Damage:
    """Return the damage that makes a file large, with no bytes on the disk."""
    return lambda folder: os.truncate(folder / file, size_bytes)


def pipe(file: str) -> Damage:
    """Return the damage that replaces a file by a named pipe, which nobody writes to."""

    def damage(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return the damage that changes the header of the only shard."""

    def damage(folder: Path) -> None:
        entries, data = read_shard(folder / "source/model.safetensors")
        change(entries)
        write_shard(folder / "source/model.safetensors", entries, data)

    return damage


def lost(other: Damage) -> Damage:
    """Return damage to a checkpoint that announces more MTP modules than it has."""

    def damage(folder: Path) -> None:
        field(_CONFIG, "num_nextn_predict_layers", 3)(folder)
        other(folder)

    return damage


def text_of_header(change: Callable[[bytes], bytes]) -> Damage:
    """Return the damage that changes the text of the only shard's header."""

    def damage(folder: Path) -> None:
        path = folder / "source/model.safetensors"
        text, data = read_shard_bytes(path)
        write_shard_bytes(path, change(text), data)

    return damage


def shape(sizes: list[int]) -> Damage:
    """Return the damage that gives a tensor a shape."""
    return header(lambda entries: entries["lm_head.weight"].update(shape=sizes))


def each_checksum(value: Any) -> Damage:
    """Return the damage that replaces the manifest's entries of tensors."""

    def change(manifest: dict[str, Any]) -> None:
        for shard in manifest["parts"]["mtp"]["shards"].values():
            shard["tensors"] = dict.fromkeys(shard["tensors"], value)

    return lambda folder: edit_json(folder / "bundle/mtp_export.json", change)


def journal(change: Callable[[bytes], bytes]) -> Damage:
    """Return the damage that changes the first shard's line of a journal."""

    def damage(folder: Path) -> None:
        path = folder / "bundle/.mtp_export.journal"
        run, shard, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join((run, change(shard), *rest)))

    return damage


def asked(name: str, value: Any) -> Damage:
    """Return the damage that changes an option in the request of a bundle's shares."""

    def change(request: dict[str, Any]) -> None:
        options = request["options"]
        (options if name in options else options["content"])[name] = value

    return lambda folder: edit_json(folder / "bundle/.mtp_export.shares/request.json", change)


def gguf_bytes(at: int, raw: bytes) -> Damage:
    """Return the damage that puts bytes at a place of the only GGUF file."""

    def damage(folder: Path) -> None:
        (path,) = (folder / "source").glob("*.gguf")
        data = bytearray(path.read_bytes())
        data[at : at + len(raw)] = raw
        path.write_bytes(data)

    return damage


def rows(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return the damage that changes the rows on which a training is measured."""

    def damage(folder: Path) -> None:
        (path,) = folder.glob("work/rows-*/held-out/*.pt")
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


_CONFIG, _TOKENIZER = "source/config.json", "source/tokenizer.json"
_DEEP = b"[" * 100_000
_BLANK = b"\n" * 300_000
_EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"
_LONG_NUMBER = _EXPERT.replace("1", "1" * 5000)

CASES: dict[str, Known] = {
    "a GGUF file counts 2^64 - 1 tensors": Known("gguf", "gguf", gguf_bytes(8, b"\xff" * 8), 3),
    "a GGUF file's first key is longer than the file": Known(
        "gguf", "gguf", gguf_bytes(24, (1 << 62).to_bytes(8, "little")), 3
    ),
    "a GGUF file is of the other byte order": Known("gguf", "gguf", gguf_bytes(4, b"\0\0\0\3"), 3),
    "architectures of another model beside GGUF files": Known(
        "graft", "gguf main", field(_CONFIG, "architectures", ["Other"]), 3
    ),
    "rope_theta is an object": Known("export", "fp8", field(_CONFIG, "rope_theta", {}), 3),
    "a beta is the least float": Known(
        "verify foreign",
        "bf16",
        field(
            _CONFIG,
            "rope_scaling",
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_slow": 5e-324,
            },
        ),
        0,
    ),
    "a quantization's method is a list": Known(
        "dry run", "fp8", field(_CONFIG, "quantization_config", {"quant_method": ["fp8"]}), 4
    ),
    "rms_norm_eps is text": Known("export", "fp8", field(_CONFIG, "rms_norm_eps", "x"), 3),
    "one and a half experts": Known("export", "fp8", field(_CONFIG, "num_experts_per_tok", 1.5), 3),
    "a config field is NaN": Known("export", "bf16", field(_CONFIG, "rope_theta", nan), 3),
    "a million experts": Known("inspect", "bf16", field(_CONFIG, "n_routed_experts", 10**6), 3),
    "a shape of huge sizes": Known("inspect", "bf16", shape([2**62] * 250), 3),
    "a shape of a million ones": Known("inspect", "bf16", shape([1] * 10**6), 3),
    "metadata is no UTF-8": Known(
        "export", "bf16", header(lambda entries: entries.update(__metadata__={"a": "\ud800"})), 3
    ),
    "an offset of minus zero": Known(
        "inspect", "bf16", text_of_header(lambda text: text.replace(b"[0,", b"[-0,", 1)), 3
    ),
    "a long name": Known(
        "inspect", "bf16", header(lambda entries: entries.update({"a" * 100_000: None})), 3
    ),
    "a link to a secret": Known("export", "fp8", link("source/LICENSE", SECRET), 3),
    "a link to a device": Known("export", "fp8", link(_TOKENIZER, Path("/dev/zero")), 3),
    "a named pipe": Known("export", "fp8", pipe(_TOKENIZER), 3),
    "a card of blank lines": Known(
        "verify foreign", "bf16", lost(content("source/README.md", b"base_model:" + _BLANK)), 7
    ),
    "a card of 3 GB": Known(
        "verify foreign", "foreign awq", lost(hole("source/README.md", 3_000_000_000)), 7
    ),
    "a model_type is a list": Known(
        "verify foreign", "bf16", lost(field(_CONFIG, "model_type", ["deepseek_v3"])), 7
    ),
    "a model_type is an object": Known(
        "verify foreign", "foreign fp8", field(_CONFIG, "model_type", {"a": 1}), 0
    ),
    "a draft of 2**62 experts": Known(
        "verify foreign", "bf16", field(_CONFIG, "n_routed_experts", 2**62), 7
    ),
    "an expert's number has 5000 digits": Known(
        "verify foreign",
        "bf16",
        header(lambda entries: entries.update({_LONG_NUMBER: entries.pop(_EXPERT)})),
        7,
    ),
    "prompts are no UTF-8": Known("generate", "prompts", content("prompts.jsonl", b"\xff\xfe"), 3),
    "prompts are deep": Known("generate", "prompts", content("prompts.jsonl", _DEEP), 3),
    "a tokenizer of nothing": Known("generate", "prompts", field(_TOKENIZER, "model", None), 3),
    "an added token without an id": Known(
        "verify files",
        "bundle",
        field("bundle/main/tokenizer.json", "added_tokens", [{"id": {}, "content": []}]),
        7,
    ),
    "a small file of 3 GB": Known(
        "verify files", "bundle", hole("bundle/main/generation_config.json", 3_000_000_000), 7
    ),
    "a tensor without a checksum": Known("verify files", "bundle", each_checksum({}), 7),
    "a tensor's entry is a number": Known("verify files", "bundle", each_checksum(5), 7),
    "a journal of 3 GB": Known(
        "resume", "unfinished", hole("bundle/.mtp_export.journal", 3_000_000_000), 8
    ),
    "a journal line is deep": Known("resume", "unfinished", journal(lambda _: _DEEP + b"\n"), 8),
    "a size in a request is text": Known("finish", "shares", asked("max_shard_bytes", "8000"), 3),
    "a size in a request is a float": Known("finish", "shares", asked("max_shard_bytes", 8e3), 3),
    "a null byte in a request's path": Known("finish", "shares", asked("input_dir", "a\0"), 3),
    "another token in a row": Known(
        "tune", "tuning", rows(lambda state: state["tokens"].fill_(10**6)), 3
    ),
    "another checksum in a journal": Known(
        "resume",
        "unfinished",
        journal(lambda line: re.sub(rb'("xxh3_128":\{".*?":")..', rb"\g<1>00", line)),
        8,
    ),
}
