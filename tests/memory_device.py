"""A device whose tensors lie in main memory: they say that they are elsewhere, and every operator
unwraps them, refuses tensors of both devices in one, and computes on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Operators that take tensors of two devices: copies, and the host's indices of a device's tensor.
CROSSING = ("aten.copy_.", "aten._to_copy.", "aten._copy_from", "aten.to.")
INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index")


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a device."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor, kind: str) -> DeviceTensor:
        # Views within inference mode of a tensor from outside are like that.
        with torch.inference_mode(False):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                on_host.size(),
                strides=on_host.stride(),
                storage_offset=on_host.storage_offset(),
                dtype=on_host.dtype,
                device=f"{kind}:0",
            )
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Threads that were started beside have no mode of their own."""
        found: list[torch.Tensor] = []
        tree_map(lambda value: on_host(value, found), (args, kwargs))
        kind = next(one.device.type for one in found if isinstance(one, DeviceTensor))
        return Device(kind).__torch_dispatch__(func, types, args, kwargs)


class Device(TorchDispatchMode):
    """Runs every operator on the CPU, and refuses tensors of both devices in one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[torch.Tensor] = []
        devices: list[torch.device] = []
        host_args, given = tree_map(
            lambda value: on_host(value, found, devices), (args, dict(kwargs or {}))
        )
        self.check(func, found)
        made = func(*host_args, **given)
        moved = self._moves(func, found, devices)
        if str(func).startswith("aten.to.") and moved != isinstance(found[0], DeviceTensor):
            made = made.clone()  # another device's memory
        return tree_map(lambda value: self._wrapped(value, moved, args), made)

    def _moves(self, func: Any, found: list[torch.Tensor], devices: list[torch.device]) -> bool:
        """Return True where the result lies on the device: where it is told to, else as its inputs.

        Within inference mode `.to` arrives whole: its target is among the arguments, or is where
        another tensor lies.
        """
        if devices:
            return devices[0].type == self.kind
        if str(func) == "aten.to.other":
            return isinstance(found[1], DeviceTensor)
        return any_there(found)

    def check(self, func: Any, found: list[torch.Tensor]) -> None:
        """Refuse what a device refuses; numbers may be anywhere."""
        name = str(func)
        if name.startswith(CROSSING):
            return
        several = [tensor for tensor in found if tensor.dim()]
        if name.startswith(INDEXING) and several and isinstance(several[0], DeviceTensor):
            return
        devices = {tensor.device.type for tensor in several}
        assert len(devices) <= 1, f"{func} got tensors on {devices}"

    def _wrapped(self, value: Any, moved: bool, args: Any) -> Any:
        """Return a result, the very tensor that was given where an operator works in place."""
        if not moved or not isinstance(value, torch.Tensor):
            return value
        for given in args:
            if isinstance(given, DeviceTensor) and given.on_host is value:
                return given
        return DeviceTensor(value, self.kind)


# Methods for which torch calls no operator, or asks the device's library for its number first.
READ_BACK = ("tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__")
_WRITTEN = (torch.Tensor.__setitem__, torch.Tensor.copy_)  # from anywhere
_READ_BACK = tuple(getattr(torch.Tensor, name) for name in READ_BACK)


class Numbers(TorchFunctionMode):
    """Numbers to tensors and back, and what is indexed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, given = tree_map(_numbered, (args, dict(kwargs or {})))
        if func is torch.Tensor.to and isinstance(args[1], str):
            args = (args[0], _numbered(torch.device(args[1])), *args[2:])
        if func is torch.tensor and given.get("device") is not None:
            return func(*args, **given | {"device": "cpu"}).to(given["device"])
        if func in _READ_BACK and isinstance(args[0], DeviceTensor):
            assert func is not torch.Tensor.numpy, "no numpy array lies on a device"
            return func(args[0].on_host)
        if func is torch.Tensor.contiguous and isinstance(args[0], DeviceTensor):
            own = args[0]
            return own if own.is_contiguous() else own.clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], DeviceTensor):
            kind = args[0].device.type
            return DeviceTensor(func(*tree_map(lambda value: on_host(value, []), args)), kind)
        if func is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return DeviceTensor(func(args[0].on_host, *args[1:], **given), args[0].device.type)
        if func is torch.Tensor.nonzero and isinstance(args[0], DeviceTensor):
            return DeviceTensor(func(args[0].on_host), args[0].device.type)
        if func in _WRITTEN and isinstance(args[0], DeviceTensor):
            func(*tree_map(lambda value: on_host(value, []), args), **given)
            return args[0]
        return func(*args, **given)


def _numbered(value: Any) -> Any:
    """Return a device with its number, which torch would ask the device's library for."""
    return (
        torch.device(value.type, 0)
        if isinstance(value, torch.device) and value.index is None and value.type != "cpu"
        else value
    )


def on_host(
    value: Any, found: list[torch.Tensor], devices: list[torch.device] | None = None
) -> Any:
    """Return a value, a tensor as it lies in main memory, a device as the CPU.

    found gets every tensor, devices every device; without a list devices stay.
    """
    if devices is not None and isinstance(value, torch.device):
        devices.append(value)
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor):
        return value
    found.append(value)
    return value.on_host if isinstance(value, DeviceTensor) else value


def any_there(found: list[torch.Tensor]) -> bool:
    """Return True where a tensor is on the device."""
    return any(isinstance(tensor, DeviceTensor) for tensor in found)
