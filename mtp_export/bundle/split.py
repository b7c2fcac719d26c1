"""Which tensors of a checkpoint make the main part and which the MTP part, and how they get there
for a target. Pure: reads nothing but the headers a Checkpoint already holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_export.bundle.extra_files import extra_files
from mtp_export.checkpoint.header import ShardHeader, TensorInfo
from mtp_export.checkpoint.plan import COPY, Link, OutputShard, PartPlan, Step, number_shards, pack
from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.errors import UnsupportedError
from mtp_export.families.base import ModelFamily, Role, SharedTensor
from mtp_export.schemes.conversion import Conversion, keep_step, transpose_step
from mtp_export.schemes.stored import StoredModel
from mtp_export.targets.base import Target


class Part(StrEnum):
    """Which parts of the bundle to write."""

    BOTH = "both"
    MAIN = "main"
    MTP = "mtp"


class SharedWeights(StrEnum):
    """Whether embedding and head go into the MTP folder."""

    KEEP = "keep"
    DROP = "drop"


class Checksums(StrEnum):
    """What is checksummed beside the MTP part: what is written, or the main part's linked shards
    too, which have to be read for it."""

    WRITTEN = "written"
    ALL = "all"


@dataclass(frozen=True)
class SplitOptions:
    """How to split. max_shard_bytes bounds the shards that are newly laid out (the MTP part's).

    main and mtp say what becomes of each part's linears; configs are the parts' config.json before
    the target's changes.
    """

    target: Target
    shared_weights: SharedWeights
    max_shard_bytes: int
    main: Conversion
    mtp: Conversion
    main_config: Mapping[str, Any]
    mtp_config: Mapping[str, Any]


def main_part(checkpoint: Checkpoint, stored: StoredModel, options: SplitOptions) -> PartPlan:
    """The main model: untouched shards linked, shards that lose or change a tensor written anew.

    config.json keeps num_nextn_predict_layers, since engines read it there.
    """
    shards: list[OutputShard] = []
    for shard in checkpoint.shards:
        tensors = [t for t in shard.tensors if stored.family.mtp_layer_of(t.name) is None]
        steps = [step for t in tensors for step in _main_steps(checkpoint, stored, options.main, t)]
        if steps:
            shards.append(_linked_if_whole(tuple(steps), shard))
    config = dict(options.main_config)
    return PartPlan("main", number_shards(shards), config, extra_files(checkpoint))


def mtp_part(
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    links: Mapping[Path, Link],
) -> PartPlan:
    """The MTP layers under the target's names, each scale beside its weight.

    Whole shards in which nothing changes stay what they are where they can be linked, whatever
    their size; all else is packed anew. Raises UnsupportedError when the target cannot take what
    the options or the model ask for.
    """
    target, family = options.target, stored.family
    target.check_model_type(checkpoint.config)
    if target.single_mtp_layer and len(family.mtp_layers) > 1:
        raise UnsupportedError(
            f"Target {target.name} reads one MTP layer",
            expected="num_nextn_predict_layers 1",
            found=len(family.mtp_layers),
            todo="Use --target hf",
        )
    if target.needs_shared_weights and options.shared_weights is SharedWeights.DROP:
        raise UnsupportedError(
            f"Target {target.name} loads embedding and head from the MTP folder",
            expected="--shared-weights keep",
            found="--shared-weights drop",
        )
    if target.dequantizes and family.dtype != "BF16":
        raise UnsupportedError(
            f"Target {target.name} reads bf16",
            expected="a source whose unquantized tensors are BF16",
            found=f"torch_dtype {family.dtype}",
        )
    shards = _mtp_shards(checkpoint, stored, options, links)
    config = target.mtp_config(options.mtp_config)
    return PartPlan("mtp", number_shards(shards), config, extra_files(checkpoint))


def shared_pairs(checkpoint: Checkpoint, family: ModelFamily) -> tuple[SharedTensor, ...]:
    """The MTP copies of embedding and head that the checkpoint really has, with their originals."""
    return tuple(pair for pair in family.shared if pair.mtp_name in checkpoint.tensors)


def _linked_if_whole(steps: tuple[Step, ...], shard: ShardHeader) -> OutputShard:
    """A shard of these steps; the source's own file where they repeat it."""
    repeated = tuple(keep_step(tensor, tensor.name) for tensor in shard.tensors)
    return OutputShard(steps, shard if steps == repeated else None)


def _main_steps(
    checkpoint: Checkpoint, stored: StoredModel, conversion: Conversion, tensor: TensorInfo
) -> Iterator[Step]:
    """A tensor of the main model; a scale that stays does so where it is stored."""
    one = stored.weight_of[tensor.name]
    step = conversion.step(one, tensor, checkpoint.tensors, name=tensor.name)
    if step is not None:
        yield step


def _mtp_shards(
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    links: Mapping[Path, Link],
) -> list[OutputShard]:
    """Whole shards stay where they can be linked, and in a bundle always; the rest is packed.

    Embedding and head come first: they are being compared then, and need no second read.
    """
    family = stored.family
    shared: dict[Step, None] = {}
    if options.shared_weights is SharedWeights.KEEP:
        pairs = family.shared
        shared = dict.fromkeys(_shared_step(checkpoint, family, options.target, p) for p in pairs)
    kept: list[OutputShard] = []
    packed = dict(shared)
    for shard in checkpoint.shards:
        steps = [
            step
            for tensor in shard.tensors
            for step in _mtp_steps(checkpoint, stored, options, tensor)
        ]
        candidate = _linked_if_whole(_in_stored_order(steps, shard), shard)
        stays = checkpoint.is_bundle or links[shard.path] is not Link.COPY
        if stays and steps and candidate.linked_from is not None:
            kept.append(candidate)
            for step in candidate.steps:
                packed.pop(step, None)
        else:
            packed |= dict.fromkeys(steps)
    kept.sort(key=lambda shard: shared.keys().isdisjoint(shard.steps))
    return [*(OutputShard(group) for group in pack(packed, options.max_shard_bytes)), *kept]


def _in_stored_order(steps: Sequence[Step], shard: ShardHeader) -> tuple[Step, ...]:
    place = {tensor.name: number for number, tensor in enumerate(shard.tensors)}
    return tuple(sorted(steps, key=lambda step: place.get(step.inputs[0], len(place))))


def _mtp_steps(
    checkpoint: Checkpoint, stored: StoredModel, options: SplitOptions, tensor: TensorInfo
) -> Iterator[Step]:
    """A tensor of an MTP layer with its scale; nothing for scales and for the main model's."""
    family, target = stored.family, options.target
    layer, one = family.mtp_layer_of(tensor.name), stored.weight_of[tensor.name]
    if layer is None or tensor.name != one.tensors[0].name:
        return
    if one.weight.role in (Role.EMBEDDING, Role.HEAD):
        if options.shared_weights is SharedWeights.KEEP:
            pair = next(pair for pair in family.shared if pair.mtp_name == tensor.name)
            yield _shared_step(checkpoint, family, target, pair)
        return
    for name in (tensor.name for tensor in one.tensors):
        source, own = checkpoint.tensors[name], target.mtp_name(name, layer)
        step = options.mtp.step(one, source, checkpoint.tensors, name=own)
        if step is not None:
            yield _transposed(step, source, target)


def _shared_step(
    checkpoint: Checkpoint, family: ModelFamily, target: Target, pair: SharedTensor
) -> Step:
    """From the MTP layer's own copy, or the main model's when it has none."""
    layer = family.mtp_layer_of(pair.mtp_name)
    assert layer is not None
    source = checkpoint.tensors.get(pair.mtp_name) or checkpoint.tensors[pair.main_name]
    step = keep_step(source, target.mtp_name(pair.mtp_name, layer))
    if family.tensors[pair.mtp_name].role is Role.EMBEDDING:  # a lookup table, not a linear
        return step
    return _transposed(step, source, target)


def _transposed(step: Step, tensor: TensorInfo, target: Target) -> Step:
    """The step, or a transposition instead where the target stores matrices [in, out]."""
    if not target.transposes or len(tensor.shape) != 2:
        return step
    assert step.operation == COPY, "a converted weight is not transposed"
    return transpose_step(tensor, step.outputs[0].name)
