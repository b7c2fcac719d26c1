"""Stored weights of several experts, as one weight with a leading dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mtp_kernels.stored_linear.weights import StoredWeight, shape_of


def stack(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Return experts' weights [N, K], all in one format, as one [E, N, K]."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([weight for weight in weights if isinstance(weight, torch.Tensor)])
    columns = zip(*(vars(weight).values() for weight in weights), strict=True)
    return type(first)(*(torch.stack(column) for column in columns))


def expert(weight: StoredWeight, number: int) -> StoredWeight:
    """Return the weight [N, K] of one expert; its memory is shared."""
    if isinstance(weight, torch.Tensor):
        return weight[number]
    return type(weight)(*(tensor[number] for tensor in vars(weight).values()))


def one_by_one(
    linear: Callable[[torch.Tensor, StoredWeight], torch.Tensor],
    x: torch.Tensor,
    rows: torch.Tensor | None,
    ends: torch.Tensor,
    weight: StoredWeight,
) -> torch.Tensor:
    """Return x[rows[p]] @ weight[e].T for every pair p, an expert at a time; reads `ends` back."""
    pairs = x if rows is None else x[rows]
    parts, start = list[torch.Tensor](), 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(linear(pairs[start:end], expert(weight, number)))
        start = end
    return torch.cat(parts) if parts else x.new_empty(0, shape_of(expert(weight, 0))[0])
