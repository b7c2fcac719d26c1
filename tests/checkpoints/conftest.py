"""Bundles that exports give as the disk usually is, to compare others with; waits that do not
last."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cases import export, tree
from mtp_checkpoints.sources import transfers


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


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between the attempts of a request, which are drawn between half and all of what is due:
    here always all, and over at once."""

    def uniform(least: float, most: float) -> float:
        assert (least, most) == (0.5, 1.0)
        return most

    found: list[float] = []
    monkeypatch.setattr(transfers.time, "sleep", found.append)
    monkeypatch.setattr(transfers.random, "uniform", uniform)
    return found
