"""Graft: plan a bundle of a main model that others quantized, and that lost its MTP layer, with the
layer of the checkpoint that it was made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.formats import FORMATS, GGUF, has_groups
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_checkpoints.layouts import engine_of, names_that_read, target_names, target_of
from mtp_checkpoints.layouts.base import unquantized_drafts
from mtp_checkpoints.quantization.method import VLLM
from mtp_checkpoints.quantization.methods import undecoded_of
from mtp_checkpoints.quantization.native import (
    DTYPE_KEYS,
    Config,
    is_gguf,
    method_of,
    quantization_of,
    with_quantization,
)
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.quantization.undecoded import UNDECODED, Undecoded
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.grafted import GraftedCheckpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.draft_apart import DraftApart, is_draft
from mtp_export.bundle.export import checked_source, plan_bundle
from mtp_export.bundle.gguf_graft import (
    files_of_main,
    grafted_parts,
    with_single_experts,
)
from mtp_export.bundle.graft_sources import GraftSources
from mtp_export.bundle.options import PlannerOptions
from mtp_export.bundle.run_folder import check_output
from mtp_export.bundle.same_model import check_same_tokenizer
from mtp_export.bundle.split import SplitOptions
from mtp_export.bundle.undecoded_graft import undecoded_main
from mtp_export.paths import refuse_overlaps
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.conversion import AS_STORED
from mtp_export.schemes.grafting import (
    Draft,
    GraftDescription,
    describe_beside_undecoded,
    describe_graft,
)
from mtp_export.schemes.scheme import BF16, GRAFTED
from mtp_export.schemes.table import GGUF_MTP


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
    in_gguf = is_gguf(quantization_of(host.config))
    _check_target(options, in_gguf=in_gguf)
    donor = open_checkpoint(options.mtp_source)
    if is_draft(donor):
        return _plan_beside(options, host, DraftApart.of(donor), dry_run=dry_run)
    opened = checked_source(donor)
    sources = GraftSources.of(host, opened, replace=options.replace)
    grafted = _in_gguf(options, sources) if in_gguf else _in_safetensors(options, sources)
    recipe = Recipe(grafted.split, _recorded(options, grafted))
    source = grafted.checkpoint, grafted.stored
    return plan_bundle(options.bundle, source, recipe, dry_run=dry_run)


def _plan_beside(
    options: GraftOptions, host: Checkpoint, draft: DraftApart, *, dry_run: bool
) -> BundlePlan:
    """Return the plan of a bundle of a main model, which stays as it is, and its draft."""
    main = stored_model(host.config, host.tensors)
    if problems := main.differences(host.tensors):
        problems[0].raise_as_error(host.path, len(problems) - 1)
    draft.check_target(main.family)
    check_same_tokenizer(host, draft.checkpoint)
    scheme, beside = SCHEMES[options.mtp_quant], draft.beside
    dialect = engine_of(options.bundle.target).dialect or VLLM
    described = Draft(draft.stored, scheme, dialect)
    _check_draft_is_read(options, described, main)
    own = described.conversion(in_groups=has_groups(described.storages) and not dialect.native_fp8)
    names = {name: name for name in beside.tensors}
    grafted = _Grafted(
        checkpoint=GraftedCheckpoint.of(host, beside, host.config, names),
        stored=main,
        split=SplitOptions(
            target=target_of(options.bundle.target),
            shared_weights=options.bundle.content.shared_weights,
            max_shard_bytes=options.bundle.content.max_shard_bytes,
            main=AS_STORED,
            mtp=AS_STORED,
            main_config=host.config,
            mtp_config=host.config,
        ),
        method=str((quantization_of(host.config) or {}).get("quant_method", "none")),
        storages=_storages(main),
    )
    part = draft.part(grafted.split, own, dialect)
    recipe = Recipe(grafted.split, _recorded(options, grafted), draft=part)
    return plan_bundle(options.bundle, (grafted.checkpoint, main), recipe, dry_run=dry_run)


@dataclass(frozen=True)
class _Grafted:
    """Both checkpoints as one, its split, and what the manifest records of the main model: its
    quant_method and its storages, and the reader that the draft is described for alone."""

    checkpoint: Checkpoint
    stored: StoredModel
    split: SplitOptions
    method: str
    storages: frozenset[str]
    reader: str | None = None


def _in_safetensors(options: GraftOptions, sources: GraftSources) -> _Grafted:
    """Return the graft onto a main model whose config describes the draft, or leaves it out."""
    host, donated = sources.host, sources.donated
    dialect = engine_of(options.bundle.target).dialect or VLLM  # without integers they are alike
    draft = Draft(donated, SCHEMES[options.mtp_quant], dialect)
    _check_method_is_read(options.bundle.target, host.config)
    if (known := undecoded_of(host.config)) is not None:
        return _beside_undecoded(options, sources, draft=draft, known=known)
    tensors = sources.main_tensors
    described = describe_graft(quantization_of(host.config), tensors, draft)
    config = with_quantization(sources.config, described.main)
    main = stored_model(config, tensors).main
    sources.check_main(main)
    _check_draft_is_read(options, draft, main)
    method = method_of(described.main) or "none"
    return _joined(options, replace(sources, config=config), described, main=main, method=method)


def _beside_undecoded(
    options: GraftOptions, sources: GraftSources, *, draft: Draft, known: Undecoded
) -> _Grafted:
    """Return the graft onto a main model whose numbers are not decoded, by whose own list its
    engines leave the draft out."""
    described = describe_beside_undecoded(known, quantization_of(sources.config), draft)
    main = undecoded_main(sources, known)
    _check_draft_is_read(options, draft, main)
    config = with_quantization(sources.config, described.main)
    with_config = replace(sources, config=config)
    grafted = _joined(options, with_config, described, main=main, method=known.name)
    return replace(grafted, storages=frozenset())


def _joined(
    options: GraftOptions,
    sources: GraftSources,
    described: GraftDescription,
    *,
    main: StoredModel,
    method: str,
) -> _Grafted:
    """Return the graft of sources whose config is that of the main folder."""
    config, donated = sources.config, sources.donated
    split = SplitOptions(
        target=target_of(options.bundle.target),
        shared_weights=options.bundle.content.shared_weights,
        max_shard_bytes=options.bundle.content.max_shard_bytes,
        main=AS_STORED,
        mtp=described.conversion,
        main_config=config,
        mtp_config=_draft_config(config, sources.donor.config, described.mtp),
    )
    return _Grafted(
        checkpoint=sources.joined(),
        stored=main.with_mtp_of(donated, donated.quantization),
        split=split,
        method=method,
        storages=_storages(main),
        reader=described.reader,
    )


def _in_gguf(options: GraftOptions, sources: GraftSources) -> _Grafted:
    """Return the graft onto a main model in GGUF files: they stay as they are, and the module gets
    a file of its own, with their vocabulary."""
    target = target_of(options.bundle.target)
    sources = with_single_experts(sources)
    main = stored_model(sources.config, sources.main_tensors).main
    sources.check_main(main)
    draft = Draft(sources.donated, SCHEMES[options.mtp_quant], VLLM)
    host = files_of_main(sources)
    config = with_quantization(sources.donor.config, None)
    split = SplitOptions(
        target=target,
        shared_weights=options.bundle.content.shared_weights,
        max_shard_bytes=options.bundle.content.max_shard_bytes,
        main=AS_STORED,
        mtp=draft.conversion(in_groups=False),
        main_config=config,
        mtp_config=config,
        gguf=grafted_parts(host, options.bundle.content),
    )
    # Of the keys alone no tokenizer and no config.json could be made.
    joined = replace(sources, host=host, config=config, own={}).joined()
    return _Grafted(
        checkpoint=replace(joined, files=sources.donor.files),
        stored=main.with_mtp_of(sources.donated, sources.donated.quantization),
        split=split,
        method=GGUF,
        storages=_storages(main),
    )


def _check_places(options: GraftOptions) -> None:
    """Refuse folders that no graft can be made with (UsageError, and what check_output raises)."""
    main, mtp = options.bundle.input_dir, options.mtp_source
    if _real(main) == _real(mtp):
        raise UsageError(
            "The main model and the checkpoint with its MTP layer are the same",
            expected="--main without an MTP layer, and --mtp with it",
            found=str(main),
            todo="mtp-export splits one checkpoint that has both: --input-dir",
        )
    refuse_overlaps({"--main": main, "--mtp": mtp}, {"--output-dir": options.bundle.output_dir})
    check_output(options.bundle.output_dir, options.bundle.run)


def _check_target(options: GraftOptions, *, in_gguf: bool) -> None:
    """Refuse a target that does not read such main models, or a module beside them in a precision
    that files of another format hold (UnsupportedError)."""
    target = options.bundle.target
    foreign = {name for name, known in FORMATS.items() if issubclass(known, ReadOnlyFormat)}
    readers = [
        name
        for name in target_names()
        if engine_of(name).storages & foreign and target_of(name).rewrites_main is in_gguf
    ]
    if target not in readers:
        kind = "main models in GGUF files" if in_gguf else "models that others quantized"
        *others, last = readers
        raise UnsupportedError(
            f"Target {target} does not read {kind}",
            expected=f"--target {', '.join(others)} or {last}" if others else f"--target {last}",
            found=target,
        )
    if not target_of(target).mtp_storages.issuperset(SCHEMES[options.mtp_quant].storages.values()):
        raise UnsupportedError(
            f"Target {target} does not take the MTP module in {options.mtp_quant}",
            expected=f"--mtp-quant {BF16}" + (f" or {GGUF_MTP}" if in_gguf else ""),
            found=f"--mtp-quant {options.mtp_quant}",
        )
    if in_gguf and options.bundle.content.pre_tokenizer is not None:
        raise UsageError(
            "A module beside GGUF files has their pre-tokenizer",
            expected="no --pre-tokenizer",
            found=f"--pre-tokenizer {options.bundle.content.pre_tokenizer[:50]}",
        )


def _check_method_is_read(target: str, config: Mapping[str, Any]) -> None:
    """Refuse a target whose engine does not read main models of a method that not all do
    (UnsupportedError)."""
    known = UNDECODED.get(method_of(quantization_of(config)))
    if known is not None and known.name not in engine_of(target).methods:
        readers = [name for name in target_names() if known.name in engine_of(name).methods]
        raise UnsupportedError(
            f"Target {target} does not read main models of {known.title}",
            expected=f"--target {' or '.join(readers)}",
            found=target,
        )


def _real(place: Place) -> str:
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def _storages(main: StoredModel) -> frozenset[str]:
    return frozenset(str(weight.storage) for weight in main.weights.values())


def _check_draft_is_read(options: GraftOptions, draft: Draft, main: StoredModel) -> None:
    """Refuse a quantized draft where the target's engine builds every draft unquantized, and either
    in a precision that it does not read (UnsupportedError)."""
    engine = engine_of(options.bundle.target)
    both = draft.storages | _storages(main)
    for storage, reason in engine.unread.items():
        if storage in both:
            of_draft = storage in draft.storages
            raise UnsupportedError(
                f"{engine.title} does not read a {'draft' if of_draft else 'main model'} in"
                f" {storage}: {reason}",
                expected=f"--target {' or '.join(names_that_read(both))}",
                found=f"--mtp-quant {options.mtp_quant}" if of_draft else options.bundle.target,
            )
    reading = engine.draft_reading
    plain = reading and unquantized_drafts(reading.draft(main.family), _storages(main))
    if plain and draft.storages:
        raise UnsupportedError(
            f"{engine.title} builds {plain}",
            where=options.bundle.input_dir,
            expected="--mtp-quant bf16",
            found=f"--mtp-quant {options.mtp_quant}",
        )


def _draft_config(
    config: Mapping[str, Any], donor: Mapping[str, Any], quantization: Config | None
) -> dict[str, Any]:
    """Return the draft's config.json: the main one, with the dtype and the quantization of the
    draft's own tensors."""
    others = {key: value for key, value in config.items() if key not in DTYPE_KEYS}
    dtypes = {key: donor[key] for key in DTYPE_KEYS if key in donor}
    return with_quantization({**others, **dtypes}, quantization)


def _recorded(options: GraftOptions, grafted: _Grafted) -> dict[str, Any]:
    reader = {} if grafted.reader is None else {"reader": grafted.reader}
    return {
        **options.bundle.recorded(),
        "base_quant": GRAFTED,
        "mtp_quant": options.mtp_quant,
        **reader,
        "main_quant_method": grafted.method,
        "main_storages": sorted(grafted.storages),
    }
