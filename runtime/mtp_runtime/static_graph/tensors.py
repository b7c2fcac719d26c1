"""Tensors of a model's parts: taken out of their dataclasses, put back in, and described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")


@dataclass(frozen=True)
class Outline:
    """Stands for a tensor of a shape, strides and a dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def tensors_of(part: Any) -> list[torch.Tensor]:
    """Return every tensor of a part once: those in fields of dataclasses and in tuples."""
    found = list[torch.Tensor]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _changed(part, note, {})
    return found


def with_tensors(part: Part, tensors: Sequence[torch.Tensor]) -> Part:
    """Return a part with other tensors, in the order of tensors_of; what it shares stays shared."""
    following = iter(tensors)
    made: Part = _changed(part, lambda tensor: next(following), {})
    return made


def outline(part: Any) -> str:
    """Return what a part computes as text: its classes, numbers, and the forms of its tensors."""
    return repr(_changed(part, Outline.of, {}))


def _changed(part: Any, change: Callable[[torch.Tensor], Any], made: dict[int, Any]) -> Any:
    """Return a part with every tensor changed once; made: by identity, what became of parts."""
    if id(part) not in made:
        made[id(part)] = _rebuilt(part, change, made)
    return made[id(part)]


def _rebuilt(part: Any, change: Callable[[torch.Tensor], Any], made: dict[int, Any]) -> Any:
    if isinstance(part, torch.Tensor):
        return change(part)
    if isinstance(part, tuple):
        items = [_changed(item, change, made) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in fields(part) if field.init]
        return replace(part, **{n: _changed(getattr(part, n), change, made) for n in names})
    return part
