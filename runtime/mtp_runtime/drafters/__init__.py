"""Drafters by method name, as PaddleNLP names those that it has. A new one is one file and one line
here. Reading this registry needs no torch: a drafter's file is imported when one is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.drafters.base import DrafterType


def _of(module: str, name: str) -> Callable[..., Any]:
    """Return a function or class of a drafter's file, which is imported at the first call."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f"{__name__}.{module}"), name)(*arguments, **options)

    return call


DRAFTERS: dict[str, DrafterType] = {
    NO_DRAFTS: DrafterType(_of("none", "NoDrafter"), prefix_cache=True, draws=False),
    "mtp": DrafterType(_of("mtp", "MtpDrafter"), needs_mtp=True, prefix_cache=True),
    # Of a DeepSeek model EAGLE's draft is the MTP module under other names.
    "eagle": DrafterType(_of("mtp", "MtpDrafter"), needs_mtp=True, prefix_cache=True),
    "eagle3": DrafterType(
        _of("eagle3", "Eagle3Drafter"),
        read=_of("eagle3", "read_eagle3"),
        toy=_of("eagle3", "toy"),
        prefix_cache=True,
    ),
    "assistant": DrafterType(
        _of("assistant", "AssistantDrafter"),
        read=_of("assistant", "read_assistant"),
        toy=_of("assistant", "toy"),
        prefix_cache=True,
    ),
    "parallel_heads": DrafterType(
        _of("parallel_heads", "ParallelHeadsDrafter"),
        read=_of("parallel_heads", "read_parallel_heads"),
        toy=_of("parallel_heads", "toy"),
        prefix_cache=True,
    ),
    "inference_with_reference": DrafterType(
        _of("ngram", "NgramDrafter"), prefix_cache=True, draws=False
    ),
    "draft_model": DrafterType(_of("draft_model", "ModelDrafter"), needs_draft_model=True),
}


def listed(names: Iterable[str], last: str = "or") -> str:
    """Return names for people: a, b or c."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


def extra_drafts() -> tuple[str, ...]:
    """Methods whose drafts may lie in a bundle, in folders of their names beside its parts."""
    return tuple(method for method, kind in DRAFTERS.items() if kind.read is not None)


def draft_folders(bundle: Path) -> dict[str, Path]:
    """Return the folders of a bundle's extra drafts, by method."""
    folders = {method: bundle / method for method in extra_drafts()}
    return {method: folder for method, folder in folders.items() if folder.is_dir()}
