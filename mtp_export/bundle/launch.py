"""Shell commands that serve a bundle with the engines that read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError, UsageError
from mtp_checkpoints.formats import W4AFp8, mixes_groups_with_fp8
from mtp_checkpoints.formats.w4afp8 import W4AFP8_GROUP
from mtp_checkpoints.layouts import target_of, target_of_bundle
from mtp_checkpoints.layouts.base import Deployment, Engine, Launch, Placement
from mtp_checkpoints.quantization.stored import stored_source
from mtp_checkpoints.quantization.undecoded import UNDECODED
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, open_parts
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.schemes import SCHEMES, recorded_head
from mtp_export.schemes.scheme import BF16, GRAFTED, KEEP
from mtp_runtime.drafters import draft_folders


def launch_lines(plan: BundlePlan) -> dict[str, str]:
    """Return the shell command that serves the bundle, per engine: the one that --target names, or
    all that read its layout.

    There is none without both parts, in two folders or as one, nor for an engine that takes the MTP
    layer from the main model's folder (TensorRT-LLM).
    """
    if plan.options.content.part not in (Part.BOTH, Part.ONE):
        return {}
    bundle = Served(
        folder=plan.options.output_dir,
        # What was converted or grafted has its schemes recorded, and may be of two quantizations.
        native=KEEP if "base_quant" in plan.recorded else plan.stored.scheme or KEEP,
        files={part.name: part.shards[0].file_name for part in plan.parts if part.shards},
    )
    return serving_lines(plan.recorded, wanted=plan.options.target, bundle=bundle)


@dataclass(frozen=True)
class Served:
    """A bundle in a folder, the scheme of its source, and the first file of weights of each part,
    by its name."""

    folder: Path
    native: str
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_manifest(cls, folder: Path, native: str, parts: Mapping[str, Any]) -> Served:
        """Return a bundle with the parts that its manifest lists."""
        shards = {name: entry.get("shards", {}) for name, entry in parts.items()}
        return cls(folder, native, {name: min(own) for name, own in shards.items() if own})


def serving_lines(recorded: Mapping[str, Any], *, wanted: str, bundle: Served) -> dict[str, str]:
    """Return the shell command that serves a bundle, per engine that a name of --target stands for.

    recorded are the options as the manifest keeps them. There is none for files of one part, where
    an engine is given the files of both.
    """
    needed = {MAIN} if recorded.get("part") == Part.ONE else {MAIN, MTP}
    if target_of(wanted).rewrites_main and not bundle.files.keys() >= needed:
        return {}
    deployment, engines = _deployed(recorded, wanted=wanted, bundle=bundle)
    return {engine.name: engine.launch(deployment) for engine in engines if engine.launch}


def _deployed(
    recorded: Mapping[str, Any], *, wanted: str, bundle: Served
) -> tuple[Deployment, list[Engine]]:
    """Return a bundle as it is deployed, and the engines that serve it."""
    target = target_of(wanted)
    base = recorded.get("base_quant", BF16 if target.rewrites_main else bundle.native)
    mtp = recorded.get("mtp_quant", BF16 if target.dequantizes else bundle.native)
    converted = [SCHEMES[scheme] for scheme in (base, mtp) if scheme in SCHEMES]
    apart = [name for name in bundle.files if name != MAIN] if MTP not in bundle.files else []
    # Of a main model that others quantized nothing is known: what holds for both is said.
    alike = base != GRAFTED and all(one.stores_experts_alike(recorded) for one in converted)
    deployment = Deployment(
        *(bundle.folder, base, mtp),
        experts_alike=alike,
        draft=apart[0] if apart else MTP,
        files=bundle.files,
    )
    engines = [
        engine
        for engine in target.engines
        if engine.launch is not None
        and wanted in (engine.name, target.name)
        and (base == KEEP or _reads(engine, recorded, base, mtp))
    ]
    return deployment, engines


def native_scheme(config: Mapping[str, Any]) -> str:
    """Return the scheme of what was not converted, as far as the config tells it."""
    try:
        return stored_source(config).scheme or KEEP
    except MtpExportError:  # a draft's config in a layout of its own
        return KEEP


def node_lines(
    bundle: Path, engine_name: str, placement: Placement | None, draft_tokens: int = 1
) -> Iterator[str]:
    """Yield the shell command of each machine that serves a finished bundle with an engine, with so
    many drafts per step.

    Raises UnsupportedError for an engine that does not read it, InvalidInputError for a bundle
    without one of its parts, UsageError for devices that the machines cannot share evenly.
    """
    if placement is not None and placement.tp % placement.nodes:
        raise UsageError(
            "The machines cannot have the same number of devices",
            expected=f"--tp as a multiple of {placement.nodes} (--nodes)",
            found=placement.tp,
        )
    deployment, engine = _chosen(bundle, engine_name)
    assert engine.launch is not None, "engines of a deployment have one"
    own = replace(deployment, draft_tokens=draft_tokens)
    yield from _each_node(engine.launch, own, placement)


def draft_lines(
    bundle: Path, engine_name: str, placement: Placement | None, draft_tokens: int = 1
) -> dict[str, list[str] | None]:
    """Return the shell commands of all machines for each extra draft of a finished bundle, by the
    draft's folder; None for one that the engine does not run. Raises as node_lines."""
    deployment, engine = _chosen(bundle, engine_name)
    lines: dict[str, list[str] | None] = {}
    for method, folder in draft_folders(bundle).items():
        if method == deployment.draft:  # node_lines has it
            continue
        found = method, read_json_object(folder / CONFIG_NAME).get("model_type")
        launches = (d.launch for d in engine.extra_drafts if (d.method, d.model_type) == found)
        launch = next(launches, None)
        own = replace(deployment, draft=method, draft_tokens=draft_tokens)
        lines[method] = None if launch is None else [*_each_node(launch, own, placement)]
    return lines


def _each_node(
    launch: Launch, deployment: Deployment, placement: Placement | None
) -> Iterator[str]:
    """Yield the shell command of each machine."""
    for node in range(1 if placement is None else placement.nodes):
        own = None if placement is None else replace(placement, node=node)
        yield launch(replace(deployment, placement=own))


def probe_of(bundle: Path, engine_name: str) -> str:
    """Return the shell command that succeeds where an engine is installed. Raises as node_lines."""
    return _chosen(bundle, engine_name)[1].probe


def engines_of(bundle: Path) -> list[str]:
    """Return the names of the engines that serve a finished bundle. Raises as node_lines."""
    return [engine.name for engine in _served(bundle)[1]]


def _served(bundle: Path) -> tuple[Deployment, list[Engine]]:
    """Return a finished bundle as it is deployed, and the engines that serve it."""
    manifest = read_manifest(bundle)
    recorded = manifest["options"]
    _check_schemes(bundle, recorded)
    has_draft = open_parts(bundle).mtp is not None or draft_folders(bundle)
    if not has_draft and recorded.get("part") != Part.ONE:
        raise InvalidInputError(
            "An engine needs both parts of a bundle",
            where=bundle,
            expected="main and mtp",
            todo="Export the checkpoint with --part both",
        )
    target = target_of_bundle(bundle)
    native = native_scheme(read_json_object(bundle / MAIN / CONFIG_NAME))
    served = Served.of_manifest(bundle, native, manifest["parts"])
    return _deployed(recorded, wanted=target.name, bundle=served)


def _chosen(bundle: Path, engine_name: str) -> tuple[Deployment, Engine]:
    """Return a finished bundle as it is deployed with an engine."""
    deployment, engines = _served(bundle)
    for engine in engines:
        if engine.name == engine_name:
            return deployment, engine
    raise UnsupportedError(
        f"{engine_name} does not serve this bundle",
        where=bundle,
        expected=" or ".join(engine.name for engine in engines) or "no engine that is known",
        todo=f"Export it again with --target {engine_name}",
    )


def _check_schemes(bundle: Path, recorded: Mapping[str, Any]) -> None:
    """Refuse a manifest with a precision that no scheme has, or of one part alone
    (InvalidInputError)."""
    known = {"base_quant": (*SCHEMES, GRAFTED), "mtp_quant": tuple(SCHEMES)}
    if recorded.keys().isdisjoint(known):  # an export, which converts nothing
        return
    for option, names in known.items():
        if recorded.get(option) not in names:
            raise InvalidInputError(
                f"The manifest has no {option} that this version knows",
                where=bundle / MANIFEST_NAME,
                expected=" or ".join(names),
                found=str(recorded.get(option))[:100],
                todo="Use the version of mtp-export that wrote it, or export again",
            )


def _reads(engine: Engine, recorded: Mapping[str, Any], base: str, mtp: str) -> bool:
    """Return True if an engine reads the layout.

    int4 or int8 beside fp8 is written in one dialect, and int4 under fp8 activations has kernels
    for groups of 128 only.
    """
    if base == GRAFTED:
        main = set(recorded.get("main_storages", ()))
        reader, dialect = recorded.get("reader"), engine.dialect
        described = reader is None or (dialect is not None and dialect.name == reader)
        known = UNDECODED.get(str(recorded.get("main_quant_method")))
        if known is not None and known.name not in engine.methods:
            return False
        return described and engine.storages >= main | SCHEMES[mtp].recorded_storages(recorded)
    heads = {head} if (head := recorded_head(recorded)) else set()
    storages = SCHEMES[base].recorded_storages(recorded) | SCHEMES[mtp].recorded_storages(recorded)
    if not (heads <= engine.quantized_heads and storages <= engine.storages):
        return False
    storages |= heads
    if W4AFp8.storage in storages:
        return True
    in_fp8 = any(SCHEMES[scheme].int4_activations_fp8 for scheme in (base, mtp))
    if in_fp8 and recorded.get("group_size") != W4AFP8_GROUP:
        return False
    if not mixes_groups_with_fp8(storages):
        return True
    return engine.dialect is not None and engine.dialect.name == recorded.get("reader")
