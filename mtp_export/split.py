"""Which tensors of a checkpoint make the main part and which the MTP part, and how they get there
for a target. Pure: reads nothing but the headers a Checkpoint already holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch

from mtp_export.checkpoint.header import ShardHeader, TensorInfo
from mtp_export.checkpoint.plan import OutputTensor, PartPlan, Step, copy_step, name_shards, pack
from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.errors import UnsupportedError
from mtp_export.families.base import ModelFamily, Role, SharedTensor
from mtp_export.schemes.transforms import dequantize_step, transpose_step
from mtp_export.targets.base import Target

# Files that make a folder complete beside weights and config; engines read them as they are.
_EXTRA_FILES = (
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
    "configuration_*.py",
    "modeling_*.py",
)


class Part(StrEnum):
    """Which parts of the bundle to write."""

    BOTH = "both"
    MAIN = "main"
    MTP = "mtp"


class SharedWeights(StrEnum):
    """Whether embedding and head go into the MTP folder."""

    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True)
class SplitOptions:
    """How to split. max_shard_bytes bounds the shards that are newly laid out (the MTP part's)."""

    target: Target
    shared_weights: SharedWeights
    max_shard_bytes: int
    link_whole_shards: bool


def extra_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the source's tokenizer, generation and code files, in order."""
    names = sorted(path.name for path in checkpoint.folder.iterdir() if path.is_file())
    return tuple(name for name in names if any(fnmatch(name, p) for p in _EXTRA_FILES))


def main_part(checkpoint: Checkpoint, family: ModelFamily, options: SplitOptions) -> PartPlan:
    """The main model: untouched shards linked, shards that lose a tensor written anew.

    config.json stays as it is; num_nextn_predict_layers with it, since engines read it there.
    """
    contents: list[tuple[tuple[Step, ...], ShardHeader | None]] = []
    for shard in checkpoint.shards:
        staying = [t for t in shard.tensors if family.mtp_layer_of(t.name) is None]
        if not staying:
            continue
        whole = len(staying) == len(shard.tensors) and options.link_whole_shards
        steps = tuple(copy_step(_as_output(tensor)) for tensor in staying)
        contents.append((steps, shard if whole else None))
    return PartPlan("main", name_shards(contents), checkpoint.config, extra_files(checkpoint))


def mtp_part(checkpoint: Checkpoint, family: ModelFamily, options: SplitOptions) -> PartPlan:
    """The MTP layers under the target's names, each scale beside its weight.

    Raises UnsupportedError when the target cannot take what the options or the model ask for.
    """
    target = options.target
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
    steps = _mtp_steps(checkpoint, family, options)
    contents = [(group, None) for group in pack(steps, options.max_shard_bytes)]
    config = target.mtp_config(checkpoint.config)
    return PartPlan("mtp", name_shards(contents), config, extra_files(checkpoint))


def shared_pairs(checkpoint: Checkpoint, family: ModelFamily) -> tuple[SharedTensor, ...]:
    """The MTP copies of embedding and head that the checkpoint really has, with their originals."""
    return tuple(pair for pair in family.shared if pair.mtp_name in checkpoint.tensors)


def _as_output(tensor: TensorInfo) -> OutputTensor:
    return OutputTensor(tensor.name, tensor.dtype, tensor.shape)


def _mtp_steps(
    checkpoint: Checkpoint, family: ModelFamily, options: SplitOptions
) -> Iterator[Step]:
    """Embedding and head first: they are being compared then, and need no second read."""
    shared = {pair.mtp_name for pair in family.shared}
    if options.shared_weights is SharedWeights.KEEP:
        for pair in family.shared:
            yield _shared_step(checkpoint, family, options.target, pair)
    for shard in checkpoint.shards:
        for tensor in shard.tensors:
            if family.mtp_layer_of(tensor.name) is None or tensor.name in shared:
                continue
            if family.expected[tensor.name].scale_of is None:
                yield from _weight_steps(checkpoint, family, options.target, tensor)


def _weight_steps(
    checkpoint: Checkpoint, family: ModelFamily, target: Target, tensor: TensorInfo
) -> Iterator[Step]:
    layer = family.mtp_layer_of(tensor.name)
    assert layer is not None
    name = target.mtp_name(tensor.name, layer)
    scale = checkpoint.tensors.get(f"{tensor.name}_scale_inv")
    if scale is not None and target.dequantizes:
        yield dequantize_step(tensor, scale, name)
        return
    yield _keep_or_transpose(tensor, target, name)
    if scale is not None:
        yield _keep_or_transpose(scale, target, target.mtp_name(scale.name, layer))


def _shared_step(
    checkpoint: Checkpoint, family: ModelFamily, target: Target, pair: SharedTensor
) -> Step:
    """From the MTP layer's own copy, or the main model's when it has none."""
    layer = family.mtp_layer_of(pair.mtp_name)
    assert layer is not None
    source = checkpoint.tensors.get(pair.mtp_name) or checkpoint.tensors[pair.main_name]
    name = target.mtp_name(pair.mtp_name, layer)
    if family.expected[pair.mtp_name].role is Role.EMBEDDING:  # a lookup table, not a linear
        return copy_step(_as_output(source), name)
    return _keep_or_transpose(source, target, name)


def _keep_or_transpose(tensor: TensorInfo, target: Target, name: str) -> Step:
    if target.transposes and len(tensor.shape) == 2:
        return transpose_step(tensor, name)
    return copy_step(_as_output(tensor), name)
