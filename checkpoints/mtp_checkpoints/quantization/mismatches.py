"""Differences between the tensors that a config.json promises and those that are stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mtp_checkpoints.dtypes import ANY_LENGTH, DType
from mtp_checkpoints.errors import InvalidInputError

_SCALE_SUFFIX = "_scale_inv"
_FREQUENCIES = "rotary_emb.inv_freq"
_CACHE_SCALE = re.compile(
    r"\.(?:self_attn|attention|mixer)\.(?:[kv]_proj\.|qkv_proj\.)?[kv]_scale$"
)


class HasLayout(Protocol):
    """A stored tensor, as far as comparing needs it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class StoredTensor(NamedTuple):
    """One tensor that must be on disk, by the name it has there.

    dtypes are element types, any of which is accepted. scale_of names the tensor with the
    codes that a scale (or another constant of the format) belongs to. optional tensors may be
    absent, a scale with its codes alone.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[DType, ...]
    scale_of: str | None = None
    optional: bool = False

    def fits(self, tensor: HasLayout) -> bool:
        """Return whether a stored tensor has the layout; a size of ANY_LENGTH is any."""
        if len(tensor.shape) != len(self.shape) or tensor.dtype not in self.dtypes:
            return False
        sizes = zip(tensor.shape, self.shape, strict=True)
        return all(promised in (own, ANY_LENGTH) for own, promised in sizes)


@dataclass(frozen=True)
class Mismatch:
    """One difference between a stored tensor and the promised one."""

    tensor: str
    problem: str
    expected: str
    found: str

    def raise_as_error(self, where: object, more: int) -> None:
        """Raise it as InvalidInputError; `more` counts the others like it."""
        tail = f" ({more} more like this)" if more else ""
        raise InvalidInputError(
            f"Tensor {self.tensor}: {self.problem}{tail}",
            where=where,
            expected=self.expected,
            found=self.found,
            todo="Nothing was written. Get the checkpoint again, or correct config.json",
        )


def is_recomputed(name: str) -> bool:
    """Return True for rotary frequencies, which older libraries saved: engines skip them, and take
    those that config.json makes.

    Sources: vLLM's `AutoWeightsLoader` and `deepseek_mtp.py`, SGLang's `load_weights`.
    """
    return name.endswith(_FREQUENCIES)


def is_cache_scale(name: str) -> bool:
    """Return True for a scale of the keys or values that an engine caches, which tools store beside
    the projections that make them: no weight's, and no engine fails on one.

    Source: vLLM's and SGLang's `maybe_remap_kv_scale_name`.
    """
    return _CACHE_SCALE.search(name) is not None


def compare(stored: Mapping[str, HasLayout], promised: Iterable[StoredTensor]) -> list[Mismatch]:
    """Return every difference between stored tensors and the promised ones, in a stable order; none
    for tensors that are recomputed, and scales of caches."""
    promised = tuple(promised)
    mismatches = [_difference(stored, tensor) for tensor in _unlike(stored, promised)]
    names = {tensor.name for tensor in promised}
    if not names.issuperset(stored):
        further = (name for name in stored if name not in names)
        mismatches += [
            _unexpected(name, stored)
            for name in further
            if not is_recomputed(name) and not is_cache_scale(name)
        ]
    return mismatches


def _unlike(
    stored: Mapping[str, HasLayout], promised: Iterable[StoredTensor]
) -> Iterator[StoredTensor]:
    """Yield the promised tensors that are not stored as promised."""
    for expected in promised:
        name, shape, dtypes, scale_of, optional = expected
        tensor = stored.get(name)
        if tensor is None:
            if not optional or scale_of in stored:
                yield expected
        elif (
            (tensor.shape != shape or tensor.dtype not in dtypes) and not expected.fits(tensor)
        ) or (scale_of is not None and scale_of not in stored):
            yield expected


def _difference(stored: Mapping[str, HasLayout], promise: StoredTensor) -> Mismatch:
    """Return how a tensor that is not as promised differs."""
    layout = f"{' or '.join(promise.dtypes)} {list(promise.shape)}"

    def mismatch(problem: str, found: str, expected: str = layout) -> Mismatch:
        return Mismatch(tensor=promise.name, problem=problem, expected=expected, found=found)

    tensor = stored.get(promise.name)
    if tensor is None:
        problem = "missing"
        if promise.scale_of in stored:
            problem = f"missing, though its weight {promise.scale_of} is there"
        return mismatch(problem, "no such tensor")
    actual = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.shape != promise.shape:
        return mismatch("wrong shape", actual)
    if tensor.dtype not in promise.dtypes:
        return mismatch("wrong dtype", actual)
    assert promise.scale_of is not None, "nothing else differs"
    return mismatch("a scale without its weight", "no such tensor", promise.scale_of)


def _unexpected(name: str, stored: Mapping[str, HasLayout]) -> Mismatch:
    tensor = stored[name]
    problem = "not a tensor of this model by its config.json"
    weight = name.removesuffix(_SCALE_SUFFIX)
    if weight != name and weight not in stored:
        problem = f"a scale without its weight ({weight} is not there)"
    actual = f"{tensor.dtype} {list(tensor.shape)}"
    return Mismatch(tensor=name, problem=problem, expected="no such tensor", found=actual)
