"""How one linear weight lies on disk: the forms there are, the tensors of each, and the step that
makes them from what a source stores. Formats: compressed-tensors `pack-quantized`, DeepSeek-V3
fp8 blocks, SGLang `quantization/w4afp8.py`."""

from __future__ import annotations

from enum import StrEnum

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import OutputTensor, Step, copy_step
from mtp_export.errors import UnsupportedError

BLOCK = 128
GROUP_SIZES = (32, 64, 128)  # of int4
W4AFP8_GROUP = 128
NATIVE_SCALE = "weight_scale_inv"
COMPRESSED_SCALE = "weight_scale"

DEQUANTIZE = "dequantize_fp8_block"
TRANSPOSE = "transpose"
_QUANTIZABLE = ("F8_E4M3", "BF16", "F32")
_INPUT_SCALES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class Storage(StrEnum):
    """The form of a linear weight on disk."""

    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"
    INT8_CHANNEL = "int8_channel"
    INT4_GROUP = "int4_group"
    W4AFP8 = "w4afp8"


# What a transform of schemes/transforms.py is called for each form.
QUANTIZE = {
    Storage.FP8_BLOCK: "quantize_fp8_block",
    Storage.INT8_CHANNEL: "quantize_int8_channel",
    Storage.INT4_GROUP: "quantize_int4_group",
    Storage.W4AFP8: "quantize_w4afp8",
}


def stays(weight_dtype: str, storage: Storage) -> bool:
    """Whether a weight already has this form; bf16 stands for whatever dtype the model computes
    in."""
    if weight_dtype == "F8_E4M3":
        return storage is Storage.FP8_BLOCK
    return storage is Storage.BF16


def stored_tensors(
    name: str, shape: tuple[int, ...], storage: Storage, group_size: int, scale_name: str
) -> tuple[OutputTensor, ...]:
    """The tensors of a weight `<module>.weight` [N, K] in a form; scale_name is an fp8 scale's."""
    rows, columns = shape
    module = name.removesuffix(".weight")
    if storage is Storage.BF16:
        return (OutputTensor(name, "BF16", shape),)
    if storage is Storage.FP8_BLOCK:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return (
            OutputTensor(name, "F8_E4M3", shape),
            OutputTensor(f"{module}.{scale_name}", "F32", blocks),
        )
    if storage is Storage.W4AFP8:
        parent, _, projection = module.rpartition(".")
        return (
            OutputTensor(name, "I8", (rows, columns // 2)),
            OutputTensor(f"{name}_scale_inv", "F32", (rows, columns // W4AFP8_GROUP)),
            OutputTensor(f"{parent}.{_INPUT_SCALES[projection]}.input_scale", "F32", (1,)),
        )
    is_int8 = storage is Storage.INT8_CHANNEL
    return (
        OutputTensor(f"{module}.weight_packed", "I32", (rows, columns // (4 if is_int8 else 8))),
        OutputTensor(
            f"{module}.weight_scale", "BF16", (rows, 1 if is_int8 else columns // group_size)
        ),
        OutputTensor(f"{module}.weight_shape", "I64", (2,)),
    )


def convert_step(
    weight: TensorInfo,
    scale: TensorInfo | None,
    storage: Storage,
    group_size: int,
    scale_name: str,
    name: str,
) -> Step:
    """A weight that does not have a form yet, brought into it under a (target's) name.

    Raises UnsupportedError naming the tensor when its dtype or shape does not allow the form.
    """
    _check(weight, storage, group_size)
    outputs = stored_tensors(name, weight.shape, storage, group_size, scale_name)
    inputs = (weight.name,) if scale is None else (weight.name, scale.name)
    operation = DEQUANTIZE if storage is Storage.BF16 else QUANTIZE[storage]
    return Step(operation, inputs, outputs)


def transpose_step(tensor: TensorInfo, name: str) -> Step:
    """A matrix [n, k] as [k, n], its elements unchanged."""
    n, k = tensor.shape
    return Step(TRANSPOSE, (tensor.name,), (OutputTensor(name, tensor.dtype, (k, n)),))


def keep_step(tensor: TensorInfo, name: str) -> Step:
    """A tensor's bytes unchanged, under a name."""
    return copy_step(OutputTensor(tensor.name, tensor.dtype, tensor.shape), name)


def _check(weight: TensorInfo, storage: Storage, group_size: int) -> None:
    if weight.dtype not in _QUANTIZABLE:
        raise UnsupportedError(
            f"Tensor {weight.name} cannot become {storage}",
            where=weight.path,
            expected=f"dtype {' or '.join(_QUANTIZABLE)}",
            found=weight.dtype,
            todo="Start from the original release",
        )
    divisors = {
        Storage.INT8_CHANNEL: (4, "the codes of a word"),
        Storage.INT4_GROUP: (group_size, "the group size"),
        Storage.W4AFP8: (W4AFP8_GROUP, "the group size"),
    }
    divisor, what = divisors.get(storage, (1, ""))
    if weight.shape[1] % divisor:
        raise UnsupportedError(
            f"Tensor {weight.name} cannot become {storage}",
            where=weight.path,
            expected=f"K divisible by {divisor}, {what}",
            found=f"[N, K] = {list(weight.shape)}",
            todo="Nothing was written. Choose another --group-size or scheme",
        )
