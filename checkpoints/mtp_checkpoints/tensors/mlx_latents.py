"""kv_b_proj of mlx-lm's models, which hold its halves apart: embed_q [h, c, n], the keys'
transposed, and unembed_out [h, v, c], the values', each plain or in affine groups. Put together
when it is read, it has the rows of released models.

Source: `sanitize` of mlx-lm's deepseek_v3.py, deepseek_v32.py and glm4_moe_lite.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.containers.joined_halves import Computed, joined
from mtp_checkpoints.dtypes import DType, tensor_bytes
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.tensor_reader import read_rows

_MODELS = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"})
_HALF = re.compile(
    r"(.+\.self_attn)\.((?:embed_q|unembed_out)\.(?:weight|scales|biases))", re.ASCII
)
_WORD_BITS, _BITS = 32, (2, 3, 4, 5, 6, 8)


def with_joined_latents(
    shards: tuple[ShardHeader, ...], config: Mapping[str, Any]
) -> tuple[ShardHeader, ...]:
    """Return the shards of a checkpoint as if they held kv_b_proj where they hold both its halves;
    plans have them as they are."""
    halves: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    if str(config.get("model_type")) in _MODELS:
        for tensor in (tensor for shard in shards for tensor in shard.tensors):
            if (found := _HALF.fullmatch(tensor.name)) is not None:
                halves[found[1]][found[2]] = tensor
    whole: dict[str, list[TensorInfo]] = {}
    for module, own in halves.items():
        keys = _half(own, "embed_q", config.get("qk_nope_head_dim"))
        values = _half(own, "unembed_out", config.get("kv_lora_rank"))
        if keys and values and keys.shape[:2] == values.shape[::2]:
            whole |= {tensor.name: [] for tensor in own.values()}
            whole[own["embed_q.weight"].name] = [joined(f"{module}.kv_b_proj.weight", keys, values)]
    if not whole:
        return shards
    return tuple(
        replace(
            shard,
            tensors=tuple(one for t in shard.tensors for one in whole.get(t.name, [t])),
            apart=shard.written,
        )
        for shard in shards
    )


def _half(own: Mapping[str, TensorInfo], name: str, columns: object) -> TensorInfo | None:
    """Return a half [h, rows, columns] of tensors by their last names; None for none."""
    weight = own.get(f"{name}.weight")
    if weight is None or len(weight.shape) != 3 or type(columns) is not int or columns <= 0:
        return None
    if weight.dtype in FLOATS:
        return weight if weight.shape[2] == columns else None
    numbers = [own.get(f"{name}.{last}") for last in ("scales", "biases")]
    bits, rest = divmod(weight.shape[2] * _WORD_BITS, columns)
    if weight.dtype is not DType.U32 or rest or bits not in _BITS:
        return None
    scales, biases = numbers
    if scales is None or biases is None or scales.shape != biases.shape:
        return None
    groups = scales.shape[-1] if len(scales.shape) == 3 else 0
    if scales.shape[:2] != weight.shape[:2] or not groups or columns % groups:
        return None
    shape = (*weight.shape[:2], columns)
    file = _Affine((weight, scales, biases), bits)
    return TensorInfo(weight.name, DType.F32, shape, file, 0, tensor_bytes(DType.F32, shape))


@dataclass(frozen=True)
class _Affine:
    """A file that holds the numbers of one tensor in affine groups alone, in float32."""

    tensors: tuple[TensorInfo, TensorInfo, TensorInfo]
    bits: int
    sha256: None = None

    @cached_property
    def path(self) -> Place:
        """Place of the codes, with their name."""
        codes = self.tensors[0]
        if isinstance(codes.path, Path):
            return codes.path.with_name(f"{codes.path.name}#{codes.name}")
        return codes.path / codes.name

    def open(self, once: range | None = None) -> Computed:
        """Read the groups and decode them (IoError, InvalidInputError for damaged scales)."""
        import torch

        from mtp_kernels.quantize.affine import dequantized_affine

        words, *numbers = (read_rows(one, 0, one.shape[0]).flatten(0, 1) for one in self.tensors)
        for stored, number in zip(self.tensors[1:], numbers, strict=True):
            if not number.isfinite().all():
                raise InvalidInputError(
                    f"Tensor {stored.name} is damaged",
                    where=stored.path,
                    expected="finite numbers",
                    found="NaN or infinity",
                    todo="Get the file again",
                )
        codes = words.contiguous().view(torch.int32)
        values = dequantized_affine(codes, self.bits, *numbers).contiguous()
        with closing(self.tensors[0].file.open()) as file:
            version = file.version
        return Computed(values.reshape(-1).numpy().view("uint8").data, version)
