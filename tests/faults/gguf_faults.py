"""Faults of GGUF bundles' heads, which are all that llama.cpp knows of a model."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

from cases import edit_json
from faults.fault import Fault
from faults.planting import MANIFEST
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.sources.local_folder import LocalFolder

_U32, _F32 = struct.pack("<I", 4), struct.pack("<I", 6)  # types of values


def in_head(part: str, pattern: bytes, new: bytes) -> Callable[[Path], None]:
    """Planting of other bytes, as many, behind a key of a part's file."""

    def plant(bundle: Path) -> None:
        (path,) = (bundle / part).glob("*.gguf")
        data, count = re.subn(
            b"(" + pattern + b").{%d}" % len(new),
            lambda found: found[1] + new,
            path.read_bytes(),
            flags=re.S,
        )
        assert count == 1
        path.write_bytes(data)
        header = read_header(LocalFolder(path.parent).file(path.name))
        signed = {"header_sha256": header.shard.header_sha256}
        edit_json(bundle / MANIFEST, lambda m: m["parts"][part]["shards"][path.name].update(signed))

    return plant


GGUF_FAULTS: tuple[Fault, ...] = (
    Fault("GGUF module of another main model",
          in_head("mtp", rb"mtp_export\.main_identity.{12}", b"0123456789abcdef" * 4), "files",
          "the draft was made with the main model 0123456789abcdef", needs="GGUF"),
    Fault("GGUF module with another scale of experts",
          in_head("mtp", rb"deepseek2\.expert_weights_scale" + _F32, struct.pack("<f", 1.0)),
          "files", "routed_scaling_factor is 1.0, and config.json has", needs="GGUF"),
    Fault("GGUF module in one file, not counted",
          in_head("main", rb"deepseek2\.nextn_predict_layers" + _U32, bytes(4)), "files",
          "num_hidden_layers is 9, and config.json has 8", needs="GGUF in one"),
)  # fmt: skip
