"""Shell commands that serve a bundle with the engines that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.bundle.build import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.storage import W4AFP8_GROUP, Storage
from mtp_export.targets import target_of
from mtp_export.targets.base import Deployment


def launch_lines(plan: BundlePlan) -> dict[str, str]:
    """Return the shell command that serves the bundle, per engine: the one that --target names, or
    all that read its layout.

    There is none without both parts, nor for an engine that takes the MTP layer from the main
    model's folder (TensorRT-LLM).
    """
    if plan.options.content.part is not Part.BOTH:
        return {}
    target, wanted = target_of(plan.options.target), plan.options.target
    native = "bf16" if plan.family.quantization is None else "a8w8_fp8"
    base = plan.recorded.get("base_quant", native)
    mtp = plan.recorded.get("mtp_quant", "bf16" if target.dequantizes else native)
    deployment = Deployment(plan.options.output_dir, base, mtp)
    return {
        engine: launch(deployment)
        for engine, launch in target.launch.items()
        if wanted in (engine, target.name) and _reads(engine, plan.recorded, base, mtp)
    }


def _reads(engine: str, recorded: Mapping[str, Any], base: str, mtp: str) -> bool:
    """Whether an engine reads the layout; int4 or int8 beside fp8 is written for one alone, and
    int4 under fp8 activations has kernels for groups of 128 alone."""
    if recorded.get("format") == "w4afp8":
        return engine == "sglang"
    in_fp8 = any(SCHEMES[scheme].int4_activations_fp8 for scheme in (base, mtp))
    if in_fp8 and recorded["group_size"] != W4AFP8_GROUP:
        return False
    storages = {*SCHEMES[base].storages.values(), *SCHEMES[mtp].storages.values()}
    integers = storages & {Storage.INT4_GROUP, Storage.INT8_CHANNEL}
    return not integers or Storage.FP8_BLOCK not in storages or engine == recorded["reader"]
