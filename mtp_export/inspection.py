"""What a checkpoint holds, from its headers alone: seconds on 163 shards, no weight is read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtp_export.checkpoint.bundle_folder import MAIN, MTP
from mtp_export.checkpoint.manifest import MANIFEST_NAME
from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.errors import UsageError
from mtp_export.families.base import Discrepancy, ModelFamily, Role, compare
from mtp_export.schemes.stored import Stored, model_family, stored_model


@dataclass(frozen=True)
class Amount:
    """Parameters and bytes of the tensors with one role and dtype, in one part."""

    part: str
    role: str
    dtype: str
    tensors: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The facts of a checkpoint; parts lists those of main and mtp that the folder holds."""

    folder: Path
    model_type: str
    quantization: str
    num_hidden_layers: int
    mtp_layers: tuple[int, ...]
    parts: tuple[str, ...]
    shards: int
    amounts: tuple[Amount, ...]
    shared_tensors: dict[str, str]
    missing_files: tuple[str, ...]
    problems: tuple[Discrepancy, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines: the same facts, sizes in bytes."""
        return {
            "folder": str(self.folder),
            "model_type": self.model_type,
            "quantization": self.quantization,
            "num_hidden_layers": self.num_hidden_layers,
            "mtp_layers": list(self.mtp_layers),
            "parts": list(self.parts),
            "shards": self.shards,
            "tensors": sum(amount.tensors for amount in self.amounts),
            "parameters": sum(amount.parameters for amount in self.amounts),
            "size_bytes": sum(amount.size_bytes for amount in self.amounts),
            "amounts": [vars(amount) for amount in self.amounts],
            "shared_tensors": self.shared_tensors,
            "missing_files": list(self.missing_files),
            "problems": [vars(problem) for problem in self.problems],
        }


def inspect(folder: Path) -> Inspection:
    """Look at a checkpoint, or at one part of a bundle in the released layout, in any precision.

    Raises UsageError for a whole bundle, InvalidInputError for files that contradict each other,
    UnsupportedError for another model type. Tensors that differ from what config.json promises are
    listed as problems.
    """
    if (folder / MANIFEST_NAME).is_file():
        raise UsageError(
            "This folder is a bundle; inspect looks at one checkpoint",
            where=folder,
            todo=f"Point at {folder / MAIN} or at {folder / MTP}",
        )
    checkpoint = Checkpoint.open(folder)
    family, stored = model_family(checkpoint.config), stored_model(checkpoint.config)
    in_mtp = {name: family.mtp_layer_of(name) is not None for name in checkpoint.tensors}
    present = tuple(
        part for part, flag in (("main", False), ("mtp", True)) if flag in in_mtp.values()
    )
    expected = [
        spec
        for spec in stored.tensors.values()
        if ("main" if spec.mtp_layer is None else "mtp") in present
    ]
    files = {path.name for path in folder.iterdir()}
    quantization = checkpoint.config.get("quantization_config") or {}
    return Inspection(
        folder=folder,
        model_type=checkpoint.config["model_type"],
        quantization=_quantization(quantization),
        num_hidden_layers=checkpoint.config["num_hidden_layers"],
        mtp_layers=tuple(family.mtp_layers),
        parts=present,
        shards=len(checkpoint.shards),
        amounts=_amounts(checkpoint, family, stored),
        shared_tensors=_shared_tensors(checkpoint, family),
        missing_files=tuple(
            name for name in ("generation_config.json", "tokenizer.json") if name not in files
        ),
        problems=tuple(compare(checkpoint.tensors, expected)),
    )


def _quantization(config: dict[str, Any]) -> str:
    if not config:
        return "none"
    block = "×".join(map(str, config.get("weight_block_size") or ()))
    parts = (config.get("quant_method"), config.get("fmt"), block, config.get("scale_fmt"))
    return " ".join(str(part) for part in parts if part)


def _amounts(checkpoint: Checkpoint, family: ModelFamily, stored: Stored) -> tuple[Amount, ...]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in checkpoint.tensors.items():
        spec = stored.tensors.get(name)
        role = "unexpected" if spec is None else str(spec.role)
        part = "main" if family.mtp_layer_of(name) is None else "mtp"
        is_scale = spec is not None and spec.scale_of is not None
        beside = " shape" if tensor.dtype == "I64" else " scale"
        total = sums[part, role, tensor.dtype + (beside if is_scale else "")]
        total[0] += 1
        if not is_scale:
            total[1] += prod(tensor.shape if spec is None else stored.weight_of[name].weight.shape)
        total[2] += tensor.size_bytes
    order = [str(role) for role in Role]
    return tuple(
        Amount(*key, *values)
        for key, values in sorted(
            sums.items(), key=lambda item: (item[0][0], (order + ["unexpected"]).index(item[0][1]))
        )
    )


def _shared_tensors(checkpoint: Checkpoint, family: ModelFamily) -> dict[str, str]:
    """Per MTP copy of embedding and head: whether the layer has its own, as far as headers tell."""
    result: dict[str, str] = {}
    if not any(family.mtp_layer_of(name) is not None for name in checkpoint.tensors):
        return result
    for pair in family.shared:
        own, main = (checkpoint.tensors.get(name) for name in (pair.mtp_name, pair.main_name))
        if own is None:
            result[pair.mtp_name] = f"not stored: tied to {pair.main_name}"
        elif main is None:
            result[pair.mtp_name] = f"own copy; {pair.main_name} is not in this folder"
        elif (own.dtype, own.shape) == (main.dtype, main.shape):
            result[pair.mtp_name] = f"own copy, same dtype and shape as {pair.main_name}"
        else:
            result[pair.mtp_name] = f"own copy, unlike {pair.main_name}"
    return result
