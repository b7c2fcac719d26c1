"""Jobs of shards with the codes that a calibration chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mtp_checkpoints.formats.nvfp4 import NvFp4Format
from mtp_export.bundle.run import ShardJob
from mtp_export.calibrate.linears import Linears
from mtp_export.plan import Step
from mtp_export.schemes.calibrated import Calibrated, Folded


def weights_of(job: ShardJob, linears: Linears) -> list[str]:
    """Return the weights of a job, by their released names."""
    weight_of = linears.plan.stored.weight_of
    firsts = (weight_of.get(step.inputs[0]) for step in job.shard.steps)
    return [own.weight.name for own in firsts if own is not None]


def with_codes(
    job: ShardJob,
    linears: Linears,
    files: Mapping[str, Path],
    folded: Mapping[str, Folded],
    amax: Mapping[str, float],
) -> ShardJob:
    """Return a job with the codes that files hold, by the released names of their weights; folded
    are operations on tensors that are not rounded, by those of theirs, amax largest magnitudes of
    what goes into weights that have a number for it."""
    weight_of = linears.plan.stored.weight_of

    def chosen(step: Step) -> Step:
        name = linears.name_of.get(step.inputs[0])
        if name is None:
            other = weight_of.get(step.inputs[0])
            operation = None if other is None else folded.get(other.weight.name)
            return step if operation is None else step._replace(operation=operation)
        convert = linears.convert(name)
        if name in amax and isinstance(convert.format, NvFp4Format):
            convert = replace(convert, format=convert.format.of_inputs(amax[name]))
        calibrated = Calibrated(replace(convert, joined=0), files[name], name)
        return step._replace(operation=calibrated, inputs=tuple(convert.own(step.inputs)))

    return replace(job, shard=replace(job.shard, steps=tuple(map(chosen, job.shard.steps))))
