"""Bugs of converters into GGUF and MLX, which hold kv_b_proj in two halves, of keys and of values:
each in the other's place, or keys that were not transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.joined_halves import JoinedHalves
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import weights as causes

if TYPE_CHECKING:
    import torch


def undone_halves(
    weight: WeightOnDisk, found: torch.Tensor
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield causes with the first heads of a weight [h (n + v), c] as it would be without them;
    none for one that no file holds in halves."""
    file = weight.tensors[0].file
    if not isinstance(file, JoinedHalves):
        return
    nope, value = file.keys.shape[2], file.values.shape[1]
    heads = len(found) // (nope + value)
    by_head = found[: heads * (nope + value)].view(heads, nope + value, -1)
    keys, values = (
        half.name.removesuffix(".weight").rpartition(".")[2] for half in (file.keys, file.values)
    )
    yield causes.latent_halves_exchanged(keys, values), partial(_exchanged, by_head, nope)
    yield causes.latent_keys_not_transposed(keys), partial(_transposed, by_head, nope)


def _exchanged(by_head: torch.Tensor, nope: int) -> torch.Tensor:
    import torch

    return torch.cat((by_head[:, nope:], by_head[:, :nope]), dim=1).flatten(0, 1)


def _transposed(by_head: torch.Tensor, nope: int) -> torch.Tensor:
    """Take the keys' numbers in the order of the file for those of [h, n, c]."""
    import torch

    keys, values = by_head[:, :nope], by_head[:, nope:]
    in_file = keys.transpose(1, 2).contiguous()
    return torch.cat((in_file.view(keys.shape), values), dim=1).flatten(0, 1)
