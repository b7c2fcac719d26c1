"""Qwen's models as mlx-lm keeps them, under their released names and in their released forms: the
language model's names begin otherwise, kernels of convolutions have their axes exchanged, and norms
hold 1 + w.

Source: `sanitize` of mlx-lm's qwen3_5.py and qwen3_next.py, where the form of the kernels tells
whether one was added to the norms. It leaves out MTP tensors, which others put back: mlx-vlm's
splitter adds one to their norms but where their file says that it is in MLX's format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.containers.gguf_forms import OFFSET_NORM
from mtp_checkpoints.containers.restored import Restored, held, restored
from mtp_checkpoints.dtypes import DType

_MODELS = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})
_LANGUAGE_MODEL = "language_model."
_VISION = "vision_tower."  # of mlx-vlm, which carries what it holds in forms of its own
_KERNEL = ".conv1d.weight"
_MTP_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_SUMMED = (DType.BF16, DType.F16, DType.F32)
_OFFSET_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight"),
    *(".q_norm.weight", ".k_norm.weight"),
)


def with_released_forms(
    shards: tuple[ShardHeader, ...], config: Mapping[str, Any]
) -> tuple[ShardHeader, ...]:
    """Return the shards of a checkpoint as if they held what was released; plans have them as they
    are."""
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    if str(config.get("model_type")) not in _MODELS or not any(map(_is_exchanged, tensors)):
        return shards
    inner = "model.language_model." if "text_config" in config else "model."
    return tuple(
        replace(shard, tensors=tuple(_released(shard, inner)), apart=shard.written)
        for shard in shards
    )


def _is_exchanged(tensor: TensorInfo) -> bool:
    """Return whether a tensor is the kernel of a convolution [channels, width, 1]."""
    is_kernel = tensor.name.endswith(_KERNEL) and len(tensor.shape) == 3
    return is_kernel and tensor.shape[2] == 1 < tensor.shape[1]


def _released(shard: ShardHeader, inner: str) -> Iterator[TensorInfo]:
    of_module = _MTP_NORMS if shard.says_format == "mlx" else ()
    for tensor in shard.tensors:
        name = tensor.name
        if name.startswith(f"{_LANGUAGE_MODEL}model."):
            name = inner + name.removeprefix(f"{_LANGUAGE_MODEL}model.")
        elif name.startswith(_VISION):
            name = "model.visual." + name.removeprefix(_VISION)
        else:
            name = name.removeprefix(_LANGUAGE_MODEL)
        offset = of_module if name.startswith("mtp.") else _OFFSET_NORMS
        if _is_exchanged(tensor):
            channels, width, one = tensor.shape  # its bytes are the same
            yield tensor._replace(name=name, shape=(channels, one, width))
        elif tensor.dtype in _SUMMED and len(tensor.shape) == 1 and name.endswith(offset):
            yield restored(name, [tensor], OFFSET_NORM)
        else:
            yield tensor._replace(name=name)


def mlx_file(tensor: TensorInfo) -> str:
    """Return the name of the file by whose metadata a norm of a module was taken for one of MLX's;
    "" for any other tensor."""
    file = tensor.file
    is_taken = isinstance(file, Restored) and file.form is OFFSET_NORM
    return held(tensor)[0].path.name if is_taken and tensor.name.startswith("mtp.") else ""
