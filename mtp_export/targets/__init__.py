"""Target layouts by name. A new engine is one file and one line here."""

from __future__ import annotations

from mtp_export.errors import UsageError
from mtp_export.targets.base import Target
from mtp_export.targets.hf import HF
from mtp_export.targets.lightllm import LIGHTLLM
from mtp_export.targets.paddlenlp import PADDLENLP
from mtp_export.targets.xllm import XLLM

TARGETS: dict[str, Target] = {
    "hf": HF,
    "lightllm": LIGHTLLM,
    "xllm": XLLM,
    "paddlenlp": PADDLENLP,
}


def target_names() -> tuple[str, ...]:
    """Every name --target takes: layouts, and the engines that read them."""
    return tuple(name for target in TARGETS.values() for name in (target.name, *target.engines))


def integer_options() -> tuple[str, ...]:
    """The names of --target whose engines read bundles with int4 or int8."""
    return tuple(name for target in TARGETS.values() for name in target.integer_options)


def target_of(name: str) -> Target:
    """The layout for a target name or an engine that reads it (UsageError for any other)."""
    for target in TARGETS.values():
        if name == target.name or name in target.engines:
            return target
    raise UsageError(
        "Unknown target", expected=", ".join(target_names()), found=name, todo="Pick one of these"
    )
