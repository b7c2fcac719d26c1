"""Plan of a bundle of one checkpoint, with tensors as they are stored; quantize and graft plan
theirs by the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.signs import count_field
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.formats.nvfp4 import NvFp4Format
from mtp_checkpoints.layouts import engine_of, target_of
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.absent import with_plain_projections_listed
from mtp_checkpoints.quantization.stored import StoredModel, stored_source
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.folded_scales import refuse_folded
from mtp_export.bundle.gguf_parts import gguf_parts
from mtp_export.bundle.links import guess_links, resolve_links
from mtp_export.bundle.options import BundleOptions, Checksums, Part
from mtp_export.bundle.preflight import check_disk, check_memory
from mtp_export.bundle.run_folder import check_output
from mtp_export.bundle.split import SplitOptions, main_part, main_tensors, mtp_part
from mtp_export.bundle.tuning import Tuning
from mtp_export.paths import refuse_overlaps
from mtp_export.plan import Link, PartPlan
from mtp_export.schemes.conversion import AS_STORED, DEQUANTIZED
from mtp_runtime.drafters import draft_folders

Opened = tuple[Checkpoint, StoredModel]  # a source


def plan_export(options: BundleOptions, *, dry_run: bool = False) -> BundlePlan:
    """Check source and output, and plan the bundle (MtpExportError)."""
    target = target_of(options.target)
    refuse_overlaps({"--input-dir": options.input_dir}, {"--output-dir": options.output_dir})
    check_output(options.output_dir, options.run)
    source = checkpoint, stored = open_source(options.input_dir)
    if target.rewrites_main:  # its files have the experts of each projection
        source = checkpoint, stored = viewed(experts_apart(checkpoint, stored.family), source)
    config = checkpoint.config
    split = SplitOptions(
        target=target,
        shared_weights=options.content.shared_weights,
        max_shard_bytes=options.content.max_shard_bytes,
        main=DEQUANTIZED if target.rewrites_main else AS_STORED,
        mtp=DEQUANTIZED if target.dequantizes else AS_STORED,
        main_config=config,
        mtp_config=config,
        gguf=gguf_parts(target, checkpoint, stored, options.content),
    )
    return plan_bundle(options, source, Recipe(split, options.recorded()), dry_run=dry_run)


def viewed(checkpoint: Checkpoint, source: Opened) -> Opened:
    """Return a view of a source's checkpoint, with what it holds; the source for its own."""
    if checkpoint is source[0]:
        return source
    return checkpoint, stored_source(checkpoint.config, checkpoint.tensors)


def open_source(place: Place, *, carried_to: Target | None = None) -> Opened:
    """Open a checkpoint, or a bundle as one, with an MTP layer and exactly the tensors that its
    config implies, which comes to list unquantized projections; carried_to: the target for which
    the run may carry codes into another layout.

    Raises UnsupportedError for another model or one without MTP layer, InvalidInputError for the
    first tensor that is missing, extra or of another shape or dtype.
    """
    return checked_source(open_checkpoint(place), carried_to=carried_to)


def checked_source(checkpoint: Checkpoint, *, carried_to: Target | None = None) -> Opened:
    """Return an opened checkpoint with what it holds. Raises as open_source."""
    place = checkpoint.path
    stored = stored_source(checkpoint.config, checkpoint.tensors)
    for one in dict.fromkeys(kind.format for kind in stored.kinds):
        is_nvfp4 = isinstance(one, NvFp4Format)
        if not (is_nvfp4 or one.held_by) or _is_carried(one, carried_to):
            continue
        own = f"--target llama.cpp, whose blocks {' or '.join(sorted(one.held_by))} hold its codes"
        raise UnsupportedError(
            f"A checkpoint in {one.storage} is carried into another layout, and not converted",
            where=place,
            expected="unquantized weights, or fp8",
            found=f"{stored.unkept} linears",
            todo=f"Use mtp-export quantize {'--base-quant weight_only_nvfp4' if is_nvfp4 else own},"
            " or start from the original checkpoint",
        )
    # The MTP layer comes last, as a rule.
    in_layers = map(stored.family.mtp_layer_of, reversed(checkpoint.tensors))
    if all(layer is None for layer in in_layers) and not _has_draft(checkpoint, stored.family):
        raise _without_mtp(checkpoint, stored.family)
    config = with_plain_projections_listed(checkpoint.config, checkpoint.tensors)
    if config != checkpoint.config:
        checkpoint = replace(checkpoint, config=config)
        stored = stored_source(config, checkpoint.tensors)
    problems = stored.differences(checkpoint.tensors)
    if problems:
        problems[0].raise_as_error(place, len(problems) - 1)
    return checkpoint, stored


def _has_draft(checkpoint: Checkpoint, family: ModelSpec) -> bool:
    """Return whether a checkpoint is that of a bundle which holds its draft as well."""
    bundle = checkpoint.main_bundle
    return bundle is not None and family.draft_method in draft_folders(bundle)


def _is_carried(one: WeightFormat, target: Target | None) -> bool:
    if target is None:
        return False
    return bool(one.held_by) if target.rewrites_main else isinstance(one, NvFp4Format)


def _without_mtp(checkpoint: Checkpoint, family: ModelSpec) -> UnsupportedError:
    """Return the error of a checkpoint that has no tensor of an MTP layer."""
    if family.drafts_apart:
        return UnsupportedError(
            "There is no MTP layer here to export",
            where=checkpoint.path,
            expected="a model with MTP layers",
            found=family.drafts_apart,
            todo="mtp-export graft --main TARGET --mtp DRAFT makes a bundle of both, which"
            " mtp-export quantize takes as its input; mtp-export generate takes the draft's folder"
            f" as --draft-model, with --speculate-method {family.draft_method}",
        )
    field, count = family.count_field, len(family.mtp) if count_field(checkpoint.config) else "no"
    layers = family.layers[-1].prefix.rpartition(".")[0]
    where = f"the layer after the last ({layers}.{len(family.layers)}.*)"
    if family.mtp_prefix:
        where = f"the MTP module ({family.mtp_prefix}.*)"
    return UnsupportedError(
        "The checkpoint has no MTP layer",
        where=checkpoint.path,
        expected=f"{field} of 1 or more in config.json, and tensors of {where}",
        found=f"{count} {field}, and no such tensor",
        todo="Many converted copies lack the layer: start from the original release, and check "
        "with mtp-export inspect",
    )


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
    _check_engine(options, source[1].family)
    refuse_folded(source[0], options.content.part)
    tuning = Tuning.of(source[0].mtp_bundle, options.content.part)
    if recipe.draft is not None and options.content.part is Part.BOTH:
        tuning = replace(tuning, converted={recipe.draft.name: recipe.draft})
    shards = [shard.path for shard in (*source[0].shards, *tuning.shards)]
    find_links = guess_links if dry_run else resolve_links
    links = find_links(options.run.link, shards, options.output_dir)
    plan = lay_out(options, source, recipe, links=links, tuning=tuning)
    check_memory(options.run.max_memory_bytes, plan.memory_bytes)
    check_disk(options.output_dir, plan.disk_bytes)
    return plan


def _check_engine(options: BundleOptions, family: ModelSpec) -> None:
    """Refuse to make a draft for an engine that has no class for it (UnsupportedError)."""
    engine, released = engine_of(options.target), target_of(options.target).model_types is None
    reads = engine.title if family.drafts_apart else engine.draft_reading
    if not released or not reads or engine.name in family.engines:
        return
    if options.content.part is not Part.MAIN:
        raise UnsupportedError(
            f"{engine.title} is not known to load the MTP layers of this model",
            expected=f"--target {' or '.join(['hf', *family.engines])}",
            found=f"--target {options.target}",
            todo="--target hf keeps the released layout; --part main leaves the MTP layers out",
        )


def lay_out(
    options: BundleOptions,
    source: tuple[Checkpoint, StoredModel],
    recipe: Recipe,
    links: Mapping[Place, Link],
    tuning: Tuning,
) -> BundlePlan:
    """Plan the parts that the options ask for, whatever disk and memory there is; links are the
    ways in which shards of source and tuning can come into the output."""
    checkpoint, stored = source
    split = recipe.split
    if stored.family.drafts_apart:
        split.target.check_model_type(checkpoint.config)
    parts: list[PartPlan] = []
    if options.content.part is not Part.MTP:
        every = options.content.checksums is Checksums.ALL
        main = main_part(checkpoint, stored, split, links)
        parts.append(main.linked_by(links, checked=every))
    if options.content.part in (Part.BOTH, Part.MTP) and stored.mtp.specs:
        mtp = mtp_part(checkpoint, stored, options=split, links=links)
        parts.append(mtp.linked_by(links, checked=True))
    parts += [part.linked_by(links, checked=True) for part in tuning.parts]
    alone = options.content.part is Part.MTP and split.main.keeps_all
    return BundlePlan(
        options=options,
        checkpoint=tuning.beside(checkpoint),
        stored=stored,
        parts=tuple(parts),
        recorded={**recipe.recorded, **tuning.recorded()},
        device=recipe.device,
        left_out=tuning.left_out,
        main_tensors=tuple(main_tensors(checkpoint, stored)) if alone else (),
    )
