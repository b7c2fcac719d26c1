"""Export: plan a bundle of a checkpoint, with tensors as they are stored."""

from __future__ import annotations

from mtp_checkpoints.layouts import target_of
from mtp_export.bundle.build import open_source, plan_bundle
from mtp_export.bundle.bundle_plan import BundlePlan, Recipe
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.preflight import check_nesting, check_output
from mtp_export.bundle.split import SplitOptions
from mtp_export.schemes.conversion import AS_STORED, DEQUANTIZED


def plan_export(options: BundleOptions, *, dry_run: bool = False) -> BundlePlan:
    """Check source and output, and plan the bundle (MtpExportError)."""
    target = target_of(options.target)
    check_nesting(options.input_dir, options.output_dir)
    check_output(options.output_dir, options.run)
    source = open_source(options.input_dir)
    config = source[0].config
    split = SplitOptions(
        target=target,
        shared_weights=options.content.shared_weights,
        max_shard_bytes=options.content.max_shard_bytes,
        main=AS_STORED,
        mtp=DEQUANTIZED if target.dequantizes else AS_STORED,
        main_config=config,
        mtp_config=config,
    )
    return plan_bundle(options, source, Recipe(split, options.recorded()), dry_run=dry_run)
