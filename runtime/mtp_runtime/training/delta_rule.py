"""Gated delta rule over whole texts, under autograd, in chunks within which all tokens are computed
at once.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3.3. Dimension letters: b
batch, h head, s and t token of a text and of a chunk c, k key, v value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class DeltaInputs(NamedTuple):
    """Queries and keys [b, h, s, k], values [b, h, s, v], log decays and strengths of the writes
    [b, h, s], in fp32."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    write: Tensor


def delta_rule(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what every token reads [b, h, s, v], and the state [b, h, k, v] after the last one.

    A token decays the state, replaces by its value a part of what the state holds for its key, and
    reads the result with its query. One without decay and write leaves the state as it is.
    """
    length = inputs.query.shape[2]
    chunk = min(CHUNK, length)
    query, key, value, decay, write = (_chunked(each, length, chunk) for each in inputs)
    since = decay.cumsum(-1)  # log decay from the chunk's start to a token
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    reads = (query @ key.transpose(-1, -2)) * between
    overlap = (key @ key.transpose(-1, -2)) * between * write[..., None]
    # A write is corrected by the chunk's earlier ones: a triangular system, whose diagonal is 1.
    wanted = torch.cat([value, key * since.exp()[..., None]], dim=-1) * write[..., None]
    solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    query = query * since.exp()[..., None]
    key = key * (since[..., -1:] - since).exp()[..., None]
    whole = since[..., -1].exp()[..., None, None]
    outputs = []
    for index in range(query.shape[2]):
        written = new[:, :, index] - old[:, :, index] @ state
        outputs.append(query[:, :, index] @ state + reads[:, :, index] @ written)
        state = state * whole[:, :, index] + key[:, :, index].transpose(-1, -2) @ written
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length], state


def _chunked(x: Tensor, length: int, chunk: int) -> Tensor:
    """Return x [b, h, s, ...] as [b, h, c, t, ...], with zeros at the end."""
    padding = [0, 0] * (x.ndim - 3) + [0, -length % chunk]
    return F.pad(x, padding).reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
