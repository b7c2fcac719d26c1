"""Columns of a weight of groups that belong into others than those that they lie in: as GPTQ's
desc_act groups them, where no g_idx says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def own_groups(
    codes: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor | None:
    """Return the group [K] whose scales bring each column of codes [N, K] nearest to wanted [N, K];
    None unless every group of scales [N, G] gets as many columns as it had, some from others.

    Scales that moved as they are, each with all of its columns, are no such groups.
    """

    columns, groups = codes.shape[1], scale.shape[1]
    if len(scale) != len(codes) or groups == 1:
        return None
    size = columns // groups
    error = codes.square().t() @ scale.square() - 2 * (codes * wanted).t() @ scale  # [K, G]
    nearest = error.argmin(1)
    if bool((nearest.bincount(minlength=groups) != size).any()):
        return None
    together = nearest.view(groups, size)
    return None if bool((together == together[:, :1]).all()) else nearest
