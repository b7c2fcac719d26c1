"""Problems of many tensors of a main model, by what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.families.signs import expert_count, expert_gaps
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_export.verify.check import Problem
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.files.main_shapes import parts_of_ranks


def of_lost_experts(layout: PartLayout, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of presence, those of lost experts by layer: which are lost, of how many."""
    there = layout.checkpoint.tensors
    lost = {problem.subject for problem in problems if EXPERTS in problem.subject}
    lost &= layout.stored.tensors.keys() - there.keys()
    if not lost:
        return [*problems]
    layers = {name.partition(EXPERTS)[0] for name in lost}
    found = [name for name in there if name.partition(EXPERTS)[0] in layers]
    sentences = expert_gaps(found, expert_count(layout.stored.names))
    gaps = {one.partition(" ")[0]: one for one in sentences}
    told = []
    for problem in problems:
        layer, _, after = problem.subject.partition(EXPERTS)
        expert = f"{layer}{EXPERTS}{after.partition('.')[0]}"
        words = gaps.get(expert) or gaps.get(f"{layer}{EXPERTS.rstrip('.')}")
        told.append(replace(problem, words=words) if words and problem.subject in lost else problem)
    return told


def of_one_rank(layout: PartLayout, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of precision, as one where all are of matrices of which one rank's part is
    there."""
    known = layout.stored.weight_of
    weights = [known[one.subject] for one in problems if one.subject in known]
    names = {one.weight.name: one.tensors[0].name for one in weights}
    wanted, tensors = {one.weight.name: one.weight for one in weights}, layout.checkpoint.tensors
    if not names or len(weights) < len(problems) or not tensors.keys() >= {*names.values()}:
        return [*problems]
    parts = parts_of_ranks(names, wanted, tensors)
    if not parts:
        return [*problems]
    name, own = next(iter(names.items()))
    shapes = ([*tensors[own].shape], [*wanted[name].shape])
    words = causes.of_one_rank(len(names), parts, (name, shapes))
    return [replace(problem, words=words) for problem in problems]
