"""Target layouts by name. A new layout is one file and one line here; an engine that reads a known
layout is one line in that layout's file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UsageError
from mtp_checkpoints.layouts.base import Engine, Target
from mtp_checkpoints.layouts.eagle import EAGLE
from mtp_checkpoints.layouts.hf import HF
from mtp_checkpoints.layouts.lightllm import LIGHTLLM
from mtp_checkpoints.layouts.llama_cpp import LLAMA_CPP
from mtp_checkpoints.layouts.paddlenlp import PADDLENLP
from mtp_checkpoints.layouts.xllm import XLLM
from mtp_checkpoints.suggestions import did_you_mean
from mtp_checkpoints.tensors.bundle_folder import bundle_target
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME

TARGETS: dict[str, Target] = {
    "hf": HF,
    "lightllm": LIGHTLLM,
    "xllm": XLLM,
    "paddlenlp": PADDLENLP,
    "eagle": EAGLE,
    "llama.cpp": LLAMA_CPP,
}


def likely_target(config: Mapping[str, Any], names: Set[str], main_layers: int) -> Target:
    """Return the target whose names most tensors of a draft have."""

    def known_names(target: Target) -> int:
        try:
            stored = target.stored_draft(config, main_layers, names)
        except MtpExportError:
            return 0
        return sum(name in names for name in stored.names)

    return max(TARGETS.values(), key=known_names)


def target_of_format(containers: Set[str]) -> Target | None:
    """Return the only target whose files are in a format, by its container's name; None where
    several are, or there are several formats."""
    found = [target for target in TARGETS.values() if {target.container} == containers]
    return found[0] if len(found) == 1 else None


def target_names() -> tuple[str, ...]:
    """Return every name that --target takes: layouts, and the engines that read them."""
    return tuple(engine.name for target in TARGETS.values() for engine in target.engines)


def target_of(name: str) -> Target:
    """Return the layout that a name of --target selects (UsageError for any other name)."""
    for target in TARGETS.values():
        if any(engine.name == name for engine in target.engines):
            return target
    raise UsageError(
        "Unknown target",
        expected=", ".join(target_names()),
        found=name,
        todo=did_you_mean(name, target_names()) or "Pick one of these",
    )


def target_of_bundle(bundle: Path) -> Target:
    """Return the layout of a bundle's MTP part, by its manifest (InvalidInputError where no layout
    has that name)."""
    name = bundle_target(bundle)
    if name not in TARGETS:
        raise InvalidInputError(
            "The manifest has no target that this version knows",
            where=bundle / MANIFEST_NAME,
            expected=" or ".join(TARGETS),
            found=name[:100],
            todo="Use the version of mtp-export that wrote it, or export again",
        )
    return TARGETS[name]


def engine_of(name: str) -> Engine:
    """Return the engine that a name of --target selects (UsageError for any other name)."""
    return next(engine for engine in target_of(name).engines if engine.name == name)


def names_that_read_drafts() -> tuple[str, ...]:
    """Return the names of --target whose engines' reading of a draft's precision is known."""
    return tuple(name for name in target_names() if engine_of(name).draft_reading is not None)


def names_that_read(storages: Collection[str]) -> tuple[str, ...]:
    """Return the names of --target whose engines read linears in these storages."""
    return tuple(name for name in target_names() if engine_of(name).storages.issuperset(storages))


def names_that_read_head(storage: str) -> tuple[str, ...]:
    """Return the names of --target whose engines read a head in this storage."""
    return tuple(name for name in target_names() if storage in engine_of(name).quantized_heads)


def names_that_serve() -> tuple[str, ...]:
    """Return the names of --target whose engines have a command that serves a bundle."""
    return tuple(name for name in target_names() if engine_of(name).launch is not None)


def titles_that_read(main: Set[str], mtp: Set[str]) -> tuple[str, ...]:
    """Return the titles of engines that read both parts' linears; "all" where every engine does."""
    readers = {
        engine.name: engine.title
        for target in TARGETS.values()
        for engine in target.engines
        if engine.storages >= main | mtp and target.mtp_storages >= mtp
    }
    if len(readers) == len(target_names()):
        return ("all",)
    return tuple(dict.fromkeys(title for title in readers.values() if title))
