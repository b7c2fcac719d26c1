"""Graft: plan a bundle of a main model that others quantized, and that lost its MTP layer, with the
layer of the checkpoint that it was made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError, UsageError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_checkpoints.layouts import engine_of, names_that_read, target_names, target_of
from mtp_checkpoints.quantization.method import VLLM
from mtp_checkpoints.quantization.native import (
    DTYPE_KEYS,
    Config,
    quantization_of,
    with_quantization,
)
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.grafted import GraftedCheckpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.untied_head import with_head_like
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.export import open_source, plan_bundle, viewed
from mtp_export.bundle.gguf_module import refuse_gguf_main
from mtp_export.bundle.options import PlannerOptions
from mtp_export.bundle.run_folder import check_output
from mtp_export.bundle.same_model import check_same_model, with_mtp_layers
from mtp_export.bundle.split import SplitOptions
from mtp_export.paths import refuse_overlaps
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.conversion import AS_STORED
from mtp_export.schemes.grafting import Draft, GraftDescription, describe_graft
from mtp_export.schemes.scheme import BF16, GRAFTED


@dataclass(frozen=True)
class GraftOptions(PlannerOptions):
    """The main model is bundle.input_dir; mtp_source is the checkpoint with the MTP layer, and
    mtp_quant the name of the scheme that the layer is stored in. replace: it takes the place of one
    that the main model has."""

    mtp_source: Place
    mtp_quant: str = BF16
    replace: bool = False

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Checkpoints that are read."""
        return (*super().inputs, self.mtp_source)


def plan_graft(options: GraftOptions, *, dry_run: bool = False) -> BundlePlan:
    """Check both checkpoints against each other, and plan the bundle (MtpExportError)."""
    _check_places(options)
    host = open_checkpoint(options.bundle.input_dir)
    refuse_gguf_main(host.path, host.config, options.mtp_source, options.bundle.output_dir)
    opened = open_source(options.mtp_source)
    donor, donated = viewed(with_head_like(opened[0], host), opened)
    config = with_mtp_layers(host.config, donor.config)
    check_same_model(host, config, donor)
    own = _own_layers(host, config)
    if own and not options.replace:
        raise _has_layers(host, own, donated.family.mtp[0].name)
    dialect = engine_of(options.bundle.target).dialect or VLLM  # without integers they are alike
    draft = Draft(donated, SCHEMES[options.mtp_quant], dialect)
    tensors = {name: one for name, one in host.tensors.items() if name not in own}
    described = describe_graft(quantization_of(host.config), tensors, draft)
    config = with_quantization(config, described.main)
    main = stored_model(config, tensors).main
    _check_tensors(host, main, tensors)
    _check_draft_is_read(options, draft, main)
    stored = main.with_mtp_of(donated, donated.quantization)
    checkpoint = GraftedCheckpoint.of(host, donor, config, _moved(donor, donated), own)
    split = SplitOptions(
        target=target_of(options.bundle.target),
        shared_weights=options.bundle.content.shared_weights,
        max_shard_bytes=options.bundle.content.max_shard_bytes,
        main=AS_STORED,
        mtp=described.conversion,
        main_config=config,
        mtp_config=_draft_config(config, donor.config, described.mtp),
    )
    recipe = Recipe(split, _recorded(options, described, main))
    return plan_bundle(options.bundle, (checkpoint, stored), recipe, dry_run=dry_run)


def _check_places(options: GraftOptions) -> None:
    """Refuse folders and a target that no graft can be made with (UsageError, and what
    check_output raises)."""
    main, mtp = options.bundle.input_dir, options.mtp_source
    if _real(main) == _real(mtp):
        raise UsageError(
            "The main model and the checkpoint with its MTP layer are the same",
            expected="--main without an MTP layer, and --mtp with it",
            found=str(main),
            todo="mtp-export splits one checkpoint that has both: --input-dir",
        )
    target = target_of(options.bundle.target)
    others = {name for name, known in FORMATS.items() if issubclass(known, ReadOnlyFormat)}
    readers = [
        name
        for name in target_names()
        if engine_of(name).storages & others and not target_of(name).rewrites_main
    ]
    if options.bundle.target not in readers:
        raise UnsupportedError(
            f"Target {options.bundle.target} does not read models that others quantized",
            expected=f"--target {', '.join(readers[:-1])} or {readers[-1]}",
            found=target.name,
        )
    refuse_overlaps({"--main": main, "--mtp": mtp}, {"--output-dir": options.bundle.output_dir})
    check_output(options.bundle.output_dir, options.bundle.run)


def _real(place: Place) -> str:
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def _own_layers(host: Checkpoint, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the main model's own MTP tensors, each with its layer."""
    layer_of = family_of(config).mtp_layer_of
    layers = ((name, layer_of(name)) for name in host.tensors)
    return {name: layer for name, layer in layers if layer is not None}


def _has_layers(host: Checkpoint, own: Mapping[str, int], module: str) -> InvalidInputError:
    first = next(iter(own))
    return InvalidInputError(
        "The main model has an MTP layer already",
        where=host.path,
        expected=f"no tensor of {module}",
        found=f"{first} ({len(own) - 1} more)",
        todo="Serve it as it is, split it with mtp-export --input-dir, or give --replace to graft"
        " the other layer in its place",
    )


def _check_tensors(host: Checkpoint, main: StoredModel, tensors: Mapping[str, TensorInfo]) -> None:
    problems = main.differences(tensors)
    if problems:
        problems[0].raise_as_error(host.path, len(problems) - 1)


def _check_draft_is_read(options: GraftOptions, draft: Draft, main: StoredModel) -> None:
    """Refuse a quantized draft where the target's engine builds every draft unquantized beside such
    a main model, or does not read its precision (UnsupportedError)."""
    engine = engine_of(options.bundle.target)
    for storage, reason in engine.unread.items():
        if storage in draft.storages:
            raise UnsupportedError(
                f"{engine.title} does not read a draft in {storage}: {reason}",
                expected=f"--target {' or '.join(names_that_read(draft.storages))}",
                found=f"--mtp-quant {options.mtp_quant}",
            )
    unquantized_beside = engine.draft_reading.unquantized_beside if engine.draft_reading else set()
    storages = {str(weight.storage) for weight in main.weights.values()} & unquantized_beside
    if storages and draft.storages:
        raise UnsupportedError(
            f"{engine.title} builds every draft unquantized beside a main model in"
            f" {' and '.join(sorted(storages))}",
            where=options.bundle.input_dir,
            expected="--mtp-quant bf16",
            found=f"--mtp-quant {options.mtp_quant}",
        )


def _moved(donor: Checkpoint, donated: StoredModel) -> dict[str, str]:
    """Return the donor's tensors by the names that they get: those of its MTP layers, and its main
    embedding and head where the layers have no copies of their own."""
    names = donor.tensors.keys() & donated.mtp.tensors.keys()
    moved = {name: name for name in donor.tensors if name in names}
    for pair in donated.family.shared:
        if pair.mtp_name not in moved:
            moved[pair.mtp_name] = pair.main_name
    return moved


def _draft_config(
    config: Mapping[str, Any], donor: Mapping[str, Any], quantization: Config | None
) -> dict[str, Any]:
    """Return the draft's config.json: the main one, with the dtype and the quantization of the
    draft's own tensors."""
    others = {key: value for key, value in config.items() if key not in DTYPE_KEYS}
    dtypes = {key: donor[key] for key in DTYPE_KEYS if key in donor}
    return with_quantization({**others, **dtypes}, quantization)


def _recorded(
    options: GraftOptions, described: GraftDescription, main: StoredModel
) -> dict[str, Any]:
    reader = {} if described.reader is None else {"reader": described.reader}
    return {
        **options.bundle.recorded(),
        "base_quant": GRAFTED,
        "mtp_quant": options.mtp_quant,
        **reader,
        "main_quant_method": described.main["quant_method"] if described.main else "none",
        "main_storages": sorted({str(one.storage) for one in main.weights.values()}),
    }
