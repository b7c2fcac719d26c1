"""Options of a bundle: their defaults, and what of them the manifest records."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

from mtp_export.bundle.options import (
    DEFAULT_WORKERS,
    BundleOptions,
    Checksums,
    ContentOptions,
    Part,
    RunOptions,
    SharedWeights,
)
from mtp_export.bundle.precision import (
    Device,
    Format,
    HeadQuant,
    Int4Scope,
    Int8Scope,
    Precision,
    ScaleRule,
)
from mtp_export.bundle.quantize import QuantizeOptions
from mtp_export.options import METADATA
from mtp_export.plan import Link

PLAIN = BundleOptions(Path("in"), Path("out"))


def test_defaults() -> None:
    assert BundleOptions(Path("in"), Path("out"), target="hf") == PLAIN
    assert PLAIN.content == ContentOptions(
        part=Part.BOTH,
        shared_weights=SharedWeights.KEEP,
        max_shard_bytes=5_000_000_000,
        allow_untied=False,
        checksums=Checksums.WRITTEN,
    )
    assert PLAIN.run == RunOptions(
        link=Link.AUTO,
        workers=DEFAULT_WORKERS,
        max_memory_bytes=4 * 2**30,
        io_depth=None,
        overwrite=False,
        resume=True,
    )
    assert min(64, len(os.sched_getaffinity(0))) == DEFAULT_WORKERS
    assert QuantizeOptions(PLAIN) == QuantizeOptions(
        PLAIN,
        base_quant="keep",
        mtp_quant="keep",
        format=Format.COMPRESSED_TENSORS,
        group_size=128,
        int4_scope=Int4Scope.EXPERTS,
        int8_scope=Int8Scope.MLPS,
        head_quant=HeadQuant.KEEP,
        scale=ScaleRule.MINMAX,
        device=Device.CPU,
        allow_untested_pair=False,
    )


def test_what_decides_the_contents_is_recorded() -> None:
    assert PLAIN.recorded() == {
        "part": "both",
        "target": "hf",
        "shared_weights": "keep",
        "max_shard_bytes": 5_000_000_000,
        "allow_untied": False,
        "checksums": "written",
    }
    content = ContentOptions(Part.MTP, SharedWeights.DROP, True, 7, Checksums.ALL)
    other = BundleOptions(Path("in"), Path("out"), "vllm", content, RunOptions(workers=9))
    assert other.recorded() == {
        "part": "mtp",
        "target": "hf",  # the layout that vllm reads
        "engine": "vllm",
        "shared_weights": "drop",
        "max_shard_bytes": 7,
        "allow_untied": True,
        "checksums": "all",
    }


def test_choices_are_written_as_the_command_takes_them() -> None:
    kinds = (
        Part,
        SharedWeights,
        Checksums,
        Link,
        Format,
        Int4Scope,
        Int8Scope,
        HeadQuant,
        ScaleRule,
        Device,
    )
    assert [[str(choice) for choice in kind] for kind in kinds] == [
        ["both", "main", "mtp", "one"],
        ["keep", "drop"],
        ["written", "all"],
        ["auto", "reflink", "hardlink", "copy"],
        ["compressed-tensors", "w4afp8", "modelopt"],
        ["experts", "all", "linears"],
        ["mlps", "linears"],
        ["keep", "weight_only_int8"],
        ["minmax", "mse"],
        ["cpu", "cuda", "npu", "auto"],
    ]


def test_helps_are_sentences() -> None:
    """They begin with a capital letter and end with a full stop."""
    kinds = (ContentOptions, RunOptions, Precision)
    options = [
        field.metadata[METADATA] for kind in kinds for field in fields(kind) if field.metadata
    ]
    helps = [option.help for option in options]
    assert helps and all(re.fullmatch(r"[A-Z][a-z]*\b.*\.", text) for text in helps), helps
