"""Facts of a checkpoint from its headers alone: seconds on 163 shards, no weight is read."""

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
from mtp_export.families.base import Role
from mtp_export.schemes.discrepancies import Discrepancy, compare
from mtp_export.schemes.native import describe
from mtp_export.schemes.stored import StoredModel, stored_model


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
    """Facts of a checkpoint; parts are those of main and mtp that the folder holds."""

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
    unindexed_files: tuple[str, ...]
    problems: tuple[Discrepancy, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the same facts for machines, sizes in bytes."""
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
            "unindexed_files": list(self.unindexed_files),
            "problems": [vars(problem) for problem in self.problems],
        }


def inspect(folder: Path) -> Inspection:
    """Inspect a checkpoint, or one part of a bundle in the released layout, in any precision.

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
    stored = stored_model(checkpoint.config)
    family = stored.family
    in_mtp = {name: family.mtp_layer_of(name) is not None for name in checkpoint.tensors}
    present = tuple(
        part for part, flag in (("main", False), ("mtp", True)) if flag in in_mtp.values()
    )
    expected = [
        tensor
        for one in stored.weights.values()
        if ("main" if one.weight.mtp_layer is None else "mtp") in present
        for tensor in one.tensors
    ]
    files = {path.name for path in folder.iterdir()}
    return Inspection(
        folder=folder,
        model_type=checkpoint.config["model_type"],
        quantization=describe(checkpoint.config),
        num_hidden_layers=checkpoint.config["num_hidden_layers"],
        mtp_layers=tuple(family.mtp_layers),
        parts=present,
        shards=len(checkpoint.shards),
        amounts=_amounts(checkpoint, stored),
        shared_tensors=_shared_tensors(checkpoint, stored),
        missing_files=tuple(
            name for name in ("generation_config.json", "tokenizer.json") if name not in files
        ),
        unindexed_files=checkpoint.unindexed,
        problems=tuple(compare(checkpoint.tensors, expected)),
    )


def _amounts(checkpoint: Checkpoint, stored: StoredModel) -> tuple[Amount, ...]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in checkpoint.tensors.items():
        one = stored.weight_of.get(name)
        role = "unexpected" if one is None else str(one.weight.role)
        part = "main" if stored.family.mtp_layer_of(name) is None else "mtp"
        is_scale = one is not None and one.tensors[0].name != name
        beside = " shape" if tensor.dtype == "I64" else " scale"
        total = sums[part, role, tensor.dtype + (beside if is_scale else "")]
        total[0] += 1
        if not is_scale:
            total[1] += prod(tensor.shape if one is None else one.weight.shape)
        total[2] += tensor.size_bytes
    order = [str(role) for role in Role]
    return tuple(
        Amount(*key, *values)
        for key, values in sorted(
            sums.items(), key=lambda item: (item[0][0], (order + ["unexpected"]).index(item[0][1]))
        )
    )


def _shared_tensors(checkpoint: Checkpoint, stored: StoredModel) -> dict[str, str]:
    """Return, per MTP copy of embedding and head, a sentence on where it is stored."""
    result: dict[str, str] = {}
    family = stored.family
    if not any(family.mtp_layer_of(name) is not None for name in checkpoint.tensors):
        return result
    for pair in family.shared:
        own, main = (checkpoint.tensors.get(name) for name in (pair.mtp_name, pair.main_name))
        forms = [stored.weights[name].storage for name in (pair.mtp_name, pair.main_name)]
        if own is None:
            result[pair.mtp_name] = f"not stored: tied to {pair.main_name}"
        elif main is None:
            result[pair.mtp_name] = f"own copy; {pair.main_name} is not in this folder"
        elif forms[0] is not forms[1]:
            result[pair.mtp_name] = (
                f"own copy in {forms[0]}, {pair.main_name} in {forms[1]}: both are dequantized to"
                " be compared"
            )
        elif (own.dtype, own.shape) == (main.dtype, main.shape):
            result[pair.mtp_name] = f"own copy, same dtype and shape as {pair.main_name}"
        else:
            result[pair.mtp_name] = f"own copy, unlike {pair.main_name}"
    return result
