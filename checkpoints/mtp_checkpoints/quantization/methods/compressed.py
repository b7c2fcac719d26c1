"""compressed-tensors: modules are left out by `ignore`, and others get a group of their own.

Sources: vLLM and SGLang `quantization/compressed_tensors`. They look at `ignore` before groups, at
names before classes, and take the first name that matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtp_checkpoints.quantization.native import Config

_IGNORE = "ignore"
REGEX = "re:"


def left_out_of_compressed(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them."""
    return ignoring(quantization, map(below, modules))


def ignoring(quantization: Config, patterns: Iterable[str]) -> Config:
    own = quantization.get(_IGNORE) or []
    return {**quantization, _IGNORE: list(dict.fromkeys([*own, *patterns]))}


def below(module: str) -> str:
    """Return a pattern for a module and all below it.

    It stays unescaped: SGLang replaces a literal layer in it.
    """
    return rf"{REGEX}{module}(\..*)?$"
