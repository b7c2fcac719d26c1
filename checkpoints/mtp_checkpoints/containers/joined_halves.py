"""kv_b_proj of files that hold its halves apart, as those of llama.cpp and mlx-lm: the keys'
transposed, k_b [h, c, n], and the values', v_b [h, v, c]. Put together when it is read, it has the
rows of released models."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, held_shape, tensor_bytes
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources.byte_source import Place

if TYPE_CHECKING:
    import numpy as np

_FLOATS = {DType.F32: "float32", DType.F16: "float16"}


def joined(name: str, keys: TensorInfo, values: TensorInfo) -> TensorInfo:
    """Return kv_b_proj [h (n + v), c] of its halves: in their element type if they have one of two
    or four bytes, else in float32. Its bytes are computed when it is opened.

    Raises InvalidInputError for halves of unlike shapes.
    """
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        raise InvalidInputError(
            f"Tensors {keys.name} and {values.name} are not the halves of one",
            where=keys.path,
            expected="[heads, latents, n] and [heads, v, latents]",
            found=f"{list(keys.shape)} and {list(values.shape)}",
            todo="Get the file again, or another one of the same model",
        )
    heads, latents, nope = keys.shape
    shape = (heads * (nope + values.shape[1]), latents)
    is_plain = keys.dtype is values.dtype and keys.dtype in (DType.BF16, *_FLOATS)
    dtype = keys.dtype if is_plain else DType.F32
    return TensorInfo(name, dtype, shape, JoinedHalves(keys, values), 0, tensor_bytes(dtype, shape))


@dataclass(frozen=True)
class JoinedHalves:
    """A file that holds kv_b_proj alone, computed from the halves that lie in another."""

    keys: TensorInfo
    values: TensorInfo
    sha256: None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Both halves."""
        return self.keys, self.values

    @property
    def is_decoded(self) -> bool:
        """True where a half is of blocks, and the whole is of what they encode."""
        return self.keys.dtype.is_packed or self.values.dtype.is_packed

    @cached_property
    def path(self) -> Place:
        """Place of the halves, with the name that the whole would have there."""
        whole = self.keys.name.replace("k_b", "kv_b")
        place = self.keys.path
        if isinstance(place, Path):
            return place.with_name(f"{place.name}#{whole}")
        return place / whole

    def open(self, once: range | None = None) -> Computed:
        """Read the halves and put them together (IoError, InvalidInputError for damaged blocks)."""
        keys, values = _read(self.keys), _read(self.values)
        if keys.dtype != values.dtype:
            keys, values = keys.astype("float32"), values.astype("float32")
        import numpy as np

        whole = np.concatenate((keys.transpose(0, 2, 1), values), axis=1)  # [h, n + v, c]
        with closing(self.keys.file.open()) as file:
            version = file.version
        return Computed(np.ascontiguousarray(whole).reshape(-1).view("uint8").data, version)


def raw_rows(tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor (of bfloat16, their bits), or the bytes of its rows of
    blocks."""
    import numpy as np

    with closing(tensor.file.open()) as file:
        raw = file.read(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes)
    dtype = "uint8" if tensor.dtype.is_packed else _FLOATS.get(tensor.dtype, "uint16")
    return np.frombuffer(raw, dtype).reshape(held_shape(tensor.dtype, tensor.shape))


def undecoded(tensor: TensorInfo, more: int = 0) -> UnsupportedError:
    """Return the refusal of a tensor whose numbers nothing here knows, and of so many more."""
    return UnsupportedError(
        f"Tensor {tensor.name} ({more} more) is of a type that is not decoded here",
        where=tensor.path,
        found=tensor.dtype.removeprefix("GGML_"),
        todo="Take a file of the model in another type",
    )


def decoded_values(tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor in float32 (InvalidInputError for damaged blocks,
    UnsupportedError for those of a type that is not decoded)."""
    if tensor.dtype.is_opaque:
        raise undecoded(tensor)
    rows = raw_rows(tensor)
    if tensor.dtype == DType.BF16:
        return (rows.astype("uint32") << 16).view("float32")
    if not tensor.dtype.is_packed:
        return rows.astype("float32")
    from mtp_kernels.quantize.ggml_blocks import dequantize_ggml_blocks

    blocks = rows.reshape(-1, rows.shape[-1])
    try:
        weights: np.ndarray[Any, Any] = dequantize_ggml_blocks(kind_of(tensor.dtype), blocks)
    except ValueError as error:
        raise InvalidInputError(
            f"Tensor {tensor.name} is damaged",
            where=tensor.path,
            expected="blocks with finite scales",
            found=str(error),
            todo="Get the file again",
        ) from error
    return weights.reshape(tensor.shape)


def _read(tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers; of bfloat16, its bits."""
    return decoded_values(tensor) if tensor.dtype.is_packed else raw_rows(tensor)


def kind_of(dtype: DType) -> str:
    """Return the name of ggml's blocks, which the format of weights in them has too."""
    return dtype.removeprefix("GGML_").lower()


class Computed:
    """Bytes in memory as an open file."""

    def __init__(self, data: memoryview, version: int | str) -> None:
        self._data, self.version = data, version
        self.size_bytes = len(data)

    def read(self, start: int, end: int) -> bytes:
        return bytes(self._data[start:end])

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        buffer[: end - start] = self._data[start:end]
        return slice(0, end - start)

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice | None:
        return self.read_into(buffer, start, end)

    def close(self) -> None:
        self._data = memoryview(b"")
