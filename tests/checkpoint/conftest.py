"""Bundles that exports give as the disk usually is, to compare others with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cases import export, tree


@pytest.fixture(scope="session")
def exported(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """The files of the tiny checkpoint's bundle, copies all, by target."""

    @cache
    def files(target: str) -> dict[str, bytes]:
        output = tmp_path_factory.mktemp("exported") / "output"
        assert export(pristine, output, "--target", target, "--link", "copy").code == 0
        return tree(output)

    return files
