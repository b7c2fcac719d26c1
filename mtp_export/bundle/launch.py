"""Shell commands that serve a bundle with the engines that read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.base import GRAFTED, KEEP
from mtp_export.schemes.storage import W4AFP8_GROUP, Storage, mixes_integers_with_fp8
from mtp_export.targets import target_of
from mtp_export.targets.base import Deployment, Engine


def launch_lines(plan: BundlePlan) -> dict[str, str]:
    """Return the shell command that serves the bundle, per engine: the one that --target names, or
    all that read its layout.

    There is none without both parts, nor for an engine that takes the MTP layer from the main
    model's folder (TensorRT-LLM).
    """
    if plan.options.content.part is not Part.BOTH:
        return {}
    folder, native = plan.options.output_dir, plan.stored.scheme or KEEP
    return serving_lines(plan.recorded, wanted=plan.options.target, native=native, folder=folder)


def serving_lines(
    recorded: Mapping[str, Any], *, wanted: str, native: str, folder: Path
) -> dict[str, str]:
    """Return the shell command that serves a bundle in a folder, per engine that a name of --target
    stands for.

    recorded are the options as the manifest keeps them, native is the scheme of the source.
    """
    target = target_of(wanted)
    base = recorded.get("base_quant", native)
    mtp = recorded.get("mtp_quant", "bf16" if target.dequantizes else native)
    converted = [SCHEMES[scheme] for scheme in (base, mtp) if scheme in SCHEMES]
    # Of a main model that others quantized nothing is known: what holds for both is said.
    alike = base != GRAFTED and all(one.stores_experts_alike(recorded) for one in converted)
    deployment = Deployment(folder, base, mtp, experts_alike=alike)
    return {
        engine.name: engine.launch(deployment)
        for engine in target.engines
        if engine.launch is not None
        and wanted in (engine.name, target.name)
        and (base == KEEP or _reads(engine, recorded, base, mtp))
    }


def _reads(engine: Engine, recorded: Mapping[str, Any], base: str, mtp: str) -> bool:
    """Return True if an engine reads the layout.

    int4 or int8 beside fp8 is written in one dialect, and int4 under fp8 activations has kernels
    for groups of 128 only.
    """
    if base == GRAFTED:
        main = {Storage(name) for name in recorded["main_storages"]}
        reader, dialect = recorded.get("reader"), engine.dialect
        described = reader is None or (dialect is not None and dialect.name == reader)
        return described and engine.storages >= main | SCHEMES[mtp].recorded_storages(recorded)
    storages = SCHEMES[base].recorded_storages(recorded) | SCHEMES[mtp].recorded_storages(recorded)
    if not storages <= engine.storages:
        return False
    if Storage.W4AFP8 in storages:
        return True
    in_fp8 = any(SCHEMES[scheme].int4_activations_fp8 for scheme in (base, mtp))
    if in_fp8 and recorded["group_size"] != W4AFP8_GROUP:
        return False
    if not mixes_integers_with_fp8(storages):
        return True
    return engine.dialect is not None and engine.dialect.name == recorded["reader"]
