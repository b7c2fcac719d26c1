"""Split of a checkpoint's tensors into main part and MTP part, with the steps that make them for a
target. Pure: reads only the headers that a Checkpoint already holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, SharedTensor, weight_name
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.mismatches import is_recomputed
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.untied_head import spare_head
from mtp_export.bundle.extra_files import extra_files
from mtp_export.bundle.gguf_parts import GgufParts
from mtp_export.bundle.options import SharedWeights
from mtp_export.plan import (
    COPY,
    Link,
    OutputShard,
    PartPlan,
    Step,
    copy_step,
    number_shards,
    pack,
)
from mtp_export.schemes.conversion import Conversion, transpose_step


@dataclass(frozen=True)
class SplitOptions:
    """Target and conversions of a split. max_shard_bytes bounds shards that are newly laid out (the
    MTP part's).

    main and mtp are the conversions of each part's linears; the configs are the parts' config.json
    before the target's changes. gguf makes GGUF files of both parts, where the target has such.
    """

    target: Target
    shared_weights: SharedWeights
    max_shard_bytes: int
    main: Conversion
    mtp: Conversion
    main_config: Mapping[str, Any]
    mtp_config: Mapping[str, Any]
    gguf: GgufParts | None = None


def main_tensors(checkpoint: Checkpoint, stored: StoredModel) -> Iterator[TensorInfo]:
    """Yield the source's tensors that no MTP layer has: those of the main part."""
    for shard in checkpoint.main_shards:
        yield from _main_of(shard, checkpoint, stored)


def _main_of(shard: ShardHeader, checkpoint: Checkpoint, stored: StoredModel) -> list[TensorInfo]:
    """Return the tensors of the main part in a shard, but for those that a graft replaces or that
    engines recompute, and for the head where they take a tied embedding in its place."""
    layer_of, spare = stored.family.mtp_layer_of, spare_head(stored.family)
    there = (tensor for tensor in shard.tensors if tensor.name in checkpoint.tensors)
    main = (tensor for tensor in there if layer_of(tensor.name) is None)
    return [one for one in main if one.name != spare and not is_recomputed(one.name)]


def main_part(
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    links: Mapping[Place, Link],
) -> PartPlan:
    """Return the plan of the main part: unchanged shards are linked, all others written anew.

    config.json keeps the number of MTP layers, which engines read there. Where both parts are one,
    the module's tensors are there too, without copies of embedding and head. Raises as mtp_part.
    """
    shards: list[OutputShard] = []
    for shard in checkpoint.main_shards:
        tensors = _main_of(shard, checkpoint, stored)
        if steps := _main_steps(checkpoint, stored, options.main, tensors):
            shards.append(_linked_if_whole(steps, shard))
    target = options.target
    config = options.main_config
    part = PartPlan(
        name="main",
        shards=number_shards(shards),
        config=target.mtp_config(config) if target.rewrites_main else dict(config),
        extra_files=extra_files(checkpoint),
    )
    if options.gguf is None:
        return part
    if not options.gguf.as_one:
        return options.gguf.part(part, checkpoint, stored.family)
    _check_module(checkpoint, stored.family, target)
    own = replace(options, shared_weights=SharedWeights.DROP)
    module = _mtp_shards(checkpoint, stored, options=own, links=links)
    of_module = chain.from_iterable(shard.steps for shard in module)
    return options.gguf.part(part, checkpoint, stored.family, of_module)


def mtp_part(
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    links: Mapping[Place, Link],
) -> PartPlan:
    """Return the plan of the MTP part under the target's names, each scale beside its weight.

    Unchanged shards are linked where that works, whatever their size; all else is packed anew.
    Raises UnsupportedError when the target cannot take what the options or the model ask for.
    """
    target, family = options.target, stored.family
    _check_module(checkpoint, family, target)
    if target.needs_shared_weights and options.shared_weights is SharedWeights.DROP:
        raise UnsupportedError(
            f"Target {target.name} loads embedding and head from the MTP folder",
            expected="--shared-weights keep",
            found="--shared-weights drop",
        )
    if target.dequantizes and not target.rewrites_main and family.facts.dtype != DType.BF16:
        raise UnsupportedError(
            f"Target {target.name} reads bf16",
            expected="a source whose unquantized tensors are BF16",
            found=f"torch_dtype {family.facts.dtype}",
        )
    shards = _mtp_shards(checkpoint, stored, options=options, links=links)
    config = target.mtp_config(options.mtp_config)
    part = PartPlan(
        name="mtp",
        shards=number_shards(shards),
        config=config,
        extra_files=extra_files(checkpoint),
    )
    if options.gguf is None:
        return part
    of_main = _of_main(checkpoint, stored, options.main if options.main.keeps_all else options.mtp)
    return options.gguf.part(part, checkpoint, family, of_main)


def _check_module(checkpoint: Checkpoint, family: ModelSpec, target: Target) -> None:
    """Refuse a model of another layout, or with more MTP layers than it has (UnsupportedError)."""
    target.check_model_type(checkpoint.config)
    if target.single_mtp_layer and len(family.mtp_layers) > 1:
        raise UnsupportedError(
            f"Target {target.name} reads one MTP layer",
            expected=f"{family.count_field} 1",
            found=len(family.mtp_layers),
            todo="Use --target hf",
        )


def _of_main(checkpoint: Checkpoint, stored: StoredModel, conversion: Conversion) -> Iterator[Step]:
    """Yield the steps of the main model's tensors that llama.cpp asks for in a module's file: the
    norm, and the tables of a module that has none of its own. Of a main model that stays as it is
    they do too."""
    family = stored.family
    yield copy_step(checkpoint.tensors[weight_name(family.norm)])
    if family.shared:
        return
    for module in dict.fromkeys((family.embedding, family.head)):
        source = checkpoint.tensors[weight_name(module)]
        table = stored.tables[source.name]
        step = conversion.step(table, source, checkpoint.tensors, name=source.name)
        assert step is not None, "the step of a weight"
        yield step


def shared_pairs(checkpoint: Checkpoint, family: ModelSpec) -> tuple[SharedTensor, ...]:
    """Return the MTP layers' own copies of embedding and head that the checkpoint holds, each with
    the main model's."""
    return tuple(pair for pair in family.shared if pair.mtp_name in checkpoint.tensors)


def _linked_if_whole(steps: tuple[Step, ...], shard: ShardHeader) -> OutputShard:
    """Return a shard of these steps; it can be linked to the source's if they repeat that one, in
    the same format."""
    whole = OutputShard(steps)
    repeated = len(steps) == len(shard.tensors) and all(map(_keeps, steps, shard.tensors))
    if repeated and shard.container == whole.container.name:
        return replace(whole, linked_from=shard)
    return whole


def _keeps(step: Step, tensor: TensorInfo) -> bool:
    """Return whether a step leaves a tensor as it is, name included."""
    return step.operation is COPY and step.inputs == (tensor.name,) == (step.outputs[0].name,)


def _main_steps(
    checkpoint: Checkpoint,
    stored: StoredModel,
    conversion: Conversion,
    tensors: Sequence[TensorInfo],
) -> tuple[Step, ...]:
    """Return the steps of main tensors; a kept scale stays where it is stored, and one that the
    step of its weight reads has none. Carried tensors are copied."""
    if conversion.keeps_all:
        return tuple(map(copy_step, tensors))
    steps = (
        copy_step(own)
        if stored.family.carries(own.name)
        else conversion.step(stored.weight_of[own.name], own, checkpoint.tensors, name=own.name)
        for own in tensors
    )
    return tuple(step for step in steps if step is not None)


def _mtp_shards(
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    links: Mapping[Place, Link],
) -> list[OutputShard]:
    """Return the shards of the MTP part: unchanged ones as they are, the rest packed.

    Unchanged shards are packed too where they cannot be linked, unless the source is a bundle.

    Embedding and head come first: comparing them takes no second read then.
    """
    family = stored.family
    shared: dict[Step, None] = {}
    if options.shared_weights is SharedWeights.KEEP:
        copies = (_shared_steps(checkpoint, stored, options, pair) for pair in family.shared)
        shared = dict.fromkeys(chain.from_iterable(copies))
    kept: list[OutputShard] = []
    packed = dict(shared)
    of_mtp = stored.mtp.weight_of
    for shard in checkpoint.mtp_shards:
        steps = [
            step
            for tensor in shard.tensors  # a donor's shards hold others too
            if (one := of_mtp.get(tensor.name)) is not None
            for step in _mtp_steps(checkpoint, stored, options=options, one=one, tensor=tensor)
        ]
        if not steps:
            continue
        candidate = _linked_if_whole(_in_stored_order(steps, shard), shard)
        stays = checkpoint.is_bundle or links[shard.path] is not Link.COPY
        if stays and candidate.linked_from is not None:
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
    checkpoint: Checkpoint,
    stored: StoredModel,
    options: SplitOptions,
    one: StoredWeight,
    tensor: TensorInfo,
) -> Iterator[Step]:
    """Yield the steps of a tensor of an MTP layer's weight and of its scale; none for a scale
    itself."""
    family, target = stored.family, options.target
    layer = one.weight.mtp_layer
    assert layer is not None, "a weight of an MTP layer"
    if tensor.name != one.tensors[0].name:
        return
    if one.weight.role in (Role.EMBEDDING, Role.HEAD):
        if options.shared_weights is SharedWeights.KEEP:
            pair = next(pair for pair in family.shared if pair.mtp_name == tensor.name)
            yield from _shared_steps(checkpoint, stored, options, pair)
        return
    for name in (tensor.name for tensor in one.tensors):
        source, own = checkpoint.tensors[name], target.mtp_name(name, layer)
        step = options.mtp.step(one, source, checkpoint.tensors, name=own)
        if step is not None:
            yield _transposed(step, source, target)


def _shared_steps(
    checkpoint: Checkpoint, stored: StoredModel, options: SplitOptions, pair: SharedTensor
) -> Iterator[Step]:
    """Yield the steps of an embedding or head: of the MTP layer's own, else of the main model's; of
    the main model's too where a head is converted and both are stored in different precisions, of
    which neither stays as it is.

    An own copy in another precision than the main model's is kept where it is unquantized, as every
    config that is written promises, or where the draft's config.json stays as it is; without one
    the copy is left out then.
    """
    family, target = stored.family, options.target
    own, main = stored.tables[pair.mtp_name], stored.tables[pair.main_name]
    alike = own.format == main.format
    layer = family.mtp_layer_of(pair.mtp_name)
    assert layer is not None
    if options.mtp.storage_of(own.weight) is not None:
        is_own = (alike or options.main.keeps_all) and pair.mtp_name in checkpoint.tensors
        one = own if is_own else main
        source, name = checkpoint.tensors[one.weight.name], target.mtp_name(pair.mtp_name, layer)
        converted = options.mtp.step(one, source, checkpoint.tensors, name=name)
        assert converted is not None, "the step of a weight"
        yield converted
        return
    promised = options.mtp.scheme is None or own.format is UNQUANTIZED
    if pair.mtp_name in checkpoint.tensors and (alike or promised):
        names = [tensor.name for tensor in own.tensors]
    elif alike or not promised:
        names = [pair.main_name]
    else:
        return
    for name, own_name in zip(names, (tensor.name for tensor in own.tensors), strict=False):
        source = checkpoint.tensors[name]
        step = copy_step(source, target.mtp_name(own_name, layer))
        if own.weight.role is Role.EMBEDDING:  # a lookup table, not a linear
            yield step
        else:
            yield _transposed(step, source, target)


def _transposed(step: Step, tensor: TensorInfo, target: Target) -> Step:
    """Return the step, or a transposition instead if the target stores matrices [in, out]."""
    if not target.transposes or len(tensor.shape) != 2:
        return step
    assert step.operation == COPY, "a converted weight is not transposed"
    return transpose_step(tensor, step.outputs[0].name)
