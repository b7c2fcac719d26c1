"""Orders that converters put rows, columns and elements in, undone on one value of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtp_export.verify.diagnosis.causes import balance as causes


def reorderings(
    found: torch.Tensor, wanted: torch.Tensor, axis: str
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield what is wrong with an order, values [n] without that, and whether it is the best of n.
    wanted [n]: values that they should go with, by which the places that they were moved by are
    found. axis: rows, columns or elements, in words."""
    size = len(found)
    yield causes.REVERSED.format(axis), found.flip(0), False
    if size % 2 == 0:
        yield causes.INTERLEAVED.format(axis), found.view(-1, 2).t().flatten(), False
        yield causes.APART.format(axis), found.view(2, -1).t().flatten(), False
    ours, theirs = (torch.fft.rfft(one - one.mean()) for one in (found, wanted))
    by = int(torch.fft.irfft(ours * theirs.conj(), n=size).argmax())
    if 2 * by == size:
        yield causes.HALVES.format(axis), found.roll(-by), False
    elif by:
        yield causes.moved(axis, min(by, by - size, key=abs)), found.roll(-by), True
