"""Write the bundle that quantize makes of a checkpoint, without its weights: they are holes in
sparse files, so that hundreds of gigabytes fit anywhere, or what is given in their place.

Names, shapes, dtypes, configs and constants come from quantize's own plan. There is no manifest,
which would promise weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.make_checkpoint import write_sparse
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.build import write_beside
from mtp_export.bundle.export import lay_out
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.precision import Format, HeadQuant, Int4Scope, Int8Scope
from mtp_export.bundle.quantize import QuantizeOptions, quantize_recipe
from mtp_export.bundle.tuning import Tuning
from mtp_export.plan import Link, OutputShard
from mtp_export.schemes.transforms import Convert

_INT4: dict[str, Any] = {"base_quant": "weight_only_int4", "mtp_quant": "weight_only_int8"}
_HEAD: dict[str, Any] = {"head_quant": HeadQuant.WEIGHT_ONLY_INT8}
_WINT4: dict[str, Any] = {"base_quant": "a8w8_fp8_wint4", "mtp_quant": "a8w8_fp8"}
# Options of quantize by what the main model's experts become.
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"base_quant": "weight_only_int8", "mtp_quant": "weight_only_int8"},
    "int8-head": {"base_quant": "weight_only_int8", "mtp_quant": "weight_only_int8"} | _HEAD,
    "int8-linears": {
        "base_quant": "weight_only_int8",
        "mtp_quant": "weight_only_int8",
        "int8_scope": Int8Scope.LINEARS,
        **_HEAD,
    },
    "int4": _INT4,
    "int4-all": _INT4 | {"int4_scope": Int4Scope.ALL},
    "int4-linears": _INT4 | {"int4_scope": Int4Scope.LINEARS} | _HEAD,
    "int4-linears-64": _INT4 | {"int4_scope": Int4Scope.LINEARS, "group_size": 64} | _HEAD,
    "wint4": _WINT4,
    "w4afp8": _WINT4 | {"format": Format.W4AFP8},
}


Content = Callable[[OutputTensor], Iterable[memoryview]]


def _hole(tensor: OutputTensor) -> Iterable[memoryview]:
    return ()


def make_bundle(source: Path, folder: Path, scheme: str, content: Content = _hole) -> Path:
    """Write the bundle of a checkpoint in one of SCHEMES, of tensors with some content."""
    options = QuantizeOptions(BundleOptions(source, folder), **SCHEMES[scheme])
    opened, recipe = quantize_recipe(options)
    copied = {shard.path: Link.COPY for shard in opened[0].shards}
    plan = lay_out(options.bundle, opened, recipe, links=copied, tuning=Tuning())
    for job in plan.jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        _write_shard(job.folder / job.shard.file_name, job.shard, plan.checkpoint, content)
    write_beside(plan)
    return folder


def _write_shard(path: Path, shard: OutputShard, source: Checkpoint, content: Content) -> None:
    constants = dict(_constants(shard, source))

    def either(tensor: OutputTensor) -> Iterable[memoryview]:
        return (constants[tensor.name],) if tensor.name in constants else content(tensor)

    write_sparse(path, shard.tensors, either)


def _constants(shard: OutputShard, source: Checkpoint) -> Iterator[tuple[str, memoryview]]:
    """Yield the tensors that a shard has whatever the weights are, by name."""
    for step in shard.steps:
        if isinstance(step.operation, Convert):
            shape = source.tensors[step.inputs[0]].shape
            for number, data in step.operation.constants(shape, len(step.outputs)):
                yield step.outputs[number].name, data
