"""Plan and run of a bundle (OUT/main, OUT/mtp and a manifest): the half that export and quantize
share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import InvalidInputError, OutputExistsError, UnsupportedError
from mtp_checkpoints.quantization.stored import StoredModel, stored_source
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.staging import remove_downloads
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.journal import Journal, journaled_files
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.links import guess_links, resolve_links
from mtp_export.bundle.options import BundleOptions, Checksums, Part
from mtp_export.bundle.own_files import check_own, clear, manifest_files
from mtp_export.bundle.preflight import check_disk, check_memory, check_output, is_finished
from mtp_export.bundle.split import main_part, mtp_part
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.bundle.work import (
    Maker,
    Work,
    check_unchanged,
    jobs_left,
    make_shards,
    write_rest,
)
from mtp_export.plan import Link, PartPlan
from mtp_export.progress import ProgressCallback


@dataclass(frozen=True)
class BundleResult:
    """A finished run. resumed_shards were finished by an earlier run; facts are those that the
    transforms returned, by tensor; shares are the runs that did the work, if it was divided."""

    plan: BundlePlan
    seconds: float
    resumed_shards: int
    facts: Mapping[str, Mapping[str, Any]]
    shares: int | None = None


def open_source(place: Place) -> tuple[Checkpoint, StoredModel]:
    """Open a checkpoint, or a bundle as one, with an MTP layer and exactly the tensors that its
    config implies.

    Raises UnsupportedError for another model or one without MTP layer, InvalidInputError for the
    first tensor that is missing, extra or of another shape or dtype.
    """
    checkpoint = open_checkpoint(place)
    stored = stored_source(checkpoint.config)
    # The MTP layer comes last, as a rule.
    if not any(stored.family.mtp_layer_of(n) is not None for n in reversed(checkpoint.tensors)):
        layers = checkpoint.config.get("num_nextn_predict_layers", "no")
        raise UnsupportedError(
            "The checkpoint has no MTP layer",
            where=place,
            expected="num_nextn_predict_layers of 1 or more in config.json, and tensors of the "
            f"layer after the last (model.layers.{checkpoint.config['num_hidden_layers']}.*)",
            found=f"{layers} num_nextn_predict_layers, and no such tensor",
            todo="Many converted copies lack the layer: start from the original release, and check "
            "with mtp-export inspect",
        )
    problems = stored.differences(checkpoint.tensors)
    if problems:
        problems[0].raise_as_error(place, len(problems) - 1)
    return checkpoint, stored


def plan_bundle(
    options: BundleOptions,
    source: tuple[Checkpoint, StoredModel],
    recipe: Recipe,
    *,
    dry_run: bool = False,
) -> BundlePlan:
    """Plan the parts that the options ask for; refuse a run that lacks disk or memory.

    Linking is tried, and undone, to know whether it works; a dry run guesses instead and touches
    nothing.
    """
    shards = [shard.path for shard in source[0].shards]
    find_links = guess_links if dry_run else resolve_links
    links = find_links(options.run.link, shards, options.output_dir)
    plan = lay_out(options, source, recipe, links)
    check_memory(options.run.max_memory_bytes, plan.memory_bytes)
    check_disk(options.output_dir, plan.disk_bytes)
    return plan


def lay_out(
    options: BundleOptions,
    source: tuple[Checkpoint, StoredModel],
    recipe: Recipe,
    links: Mapping[Place, Link],
) -> BundlePlan:
    """Plan the parts that the options ask for, whatever disk and memory there is; links are the
    ways in which source shards can come into the output."""
    checkpoint, stored = source
    split = recipe.split
    parts: list[PartPlan] = []
    if options.content.part in (Part.BOTH, Part.MAIN):
        every = options.content.checksums is Checksums.ALL
        parts.append(main_part(checkpoint, stored, split).linked_by(links, checked=every))
    if options.content.part in (Part.BOTH, Part.MTP):
        mtp = mtp_part(checkpoint, stored, options=split, links=links)
        parts.append(mtp.linked_by(links, checked=True))
    return BundlePlan(
        options=options,
        checkpoint=checkpoint,
        stored=stored,
        parts=tuple(parts),
        recorded=recipe.recorded,
        device=recipe.device,
    )


def run_bundle(
    plan: BundlePlan, progress: ProgressCallback, make: Maker = make_shards
) -> BundleResult:
    """Write the bundle that a plan describes, or finish what an earlier run began; make is what
    makes its shards, here or elsewhere.

    Raises OutputExistsError, InvalidInputError or IoError; then the output has no manifest. After
    an IoError the same command goes on where it stopped.
    """
    start = time.monotonic()
    output = plan.options.output_dir
    replaces = is_finished(output)
    if replaces:  # before a good bundle is removed for it
        with DiskQueue(plan.io_depth) as queue:
            plan.tied.compare(plan.checkpoint.tensors, plan.tied.alike, queue, lambda: None)
    with Journal(output) as journal:
        _open_journal(plan, journal)
        resumed = len(journal.finished)
        tied = TiedCopies.nothing(plan.stored) if replaces else plan.tied
        jobs = jobs_left(plan.jobs, journal.finished, progress)
        try:
            make(plan, Work(jobs, room=output, tied=tied), journal.record, progress)
            check_unchanged(plan.checkpoint)
        except InvalidInputError:
            remove_downloads(output)
            clear(output, journal.files)  # nothing made of a wrong source is worth keeping
            journal.remove()
            raise
        write_rest(plan, journal.finished)
        journal.remove()
    return BundleResult(
        plan=plan,
        seconds=time.monotonic() - start,
        resumed_shards=resumed,
        facts=facts_of(journal.finished),
    )


def facts_of(finished: Mapping[str, ShardFacts]) -> dict[str, Mapping[str, Any]]:
    """Return what the transforms returned, by tensor."""
    return {name: noted for shard in finished.values() for name, noted in shard.facts.items()}


def _open_journal(plan: BundlePlan, journal: Journal) -> None:
    """Resume an earlier run, or begin; then clear the output of what is not finished.

    The output is checked again, now that no other run can change it.
    """
    output, identity = plan.options.output_dir, plan.identity
    try:
        check_output(output, plan.options.run)
        own = plan.files | manifest_files(output) | journaled_files(output)
        check_own(output, own)
        resumes = _resume(plan, journal, identity)  # from here on the journal is written
    except OutputExistsError:
        if journal.is_empty:
            journal.remove()
        raise
    if not resumes:
        journal.begin(identity, own)
        remove_downloads(output)
    clear(output, own, kept=journal.finished.keys())


def _resume(plan: BundlePlan, journal: Journal, identity: Mapping[str, Any]) -> bool:
    """Return whether the journal goes on; raises what Journal.resume does."""
    if journal.is_empty or not plan.options.run.resume:
        return False
    try:
        journal.resume(identity)
    except OutputExistsError:
        if not plan.options.run.overwrite:
            raise
        return False
    return True
