"""A device called npu, in a process of its own: tensors say that they lie there, and every operator
unwraps them and computes on the CPU.

    python tests/npu_device.py CHECKPOINT     decodes on it; prints JSON
    python tests/npu_device.py conversions    compares its conversions with a CPU's; prints JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class NpuTensor(torch.Tensor):
    """A tensor that says it is on the device."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> NpuTensor:
        made: NpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device="npu:0",
        )
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called outside the device")


class Device(TorchDispatchMode):
    """Runs every operator on the CPU, and refuses tensors of both devices in one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        target = given.get("device")
        if target is not None:
            given["device"] = torch.device("cpu")
        found: list[torch.Tensor] = []
        arguments = tree_map(lambda value: self.host(value, found), (args, given))
        self.check(func, found)
        made = func(*arguments[0], **arguments[1])
        moved = target.type == "npu" if target is not None else _any_here(found)
        return tree_map(lambda value: _wrapped(value, moved, args), made)

    @staticmethod
    def host(value: Any, found: list[torch.Tensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found.append(value)
        return value.on_host if isinstance(value, NpuTensor) else value

    @staticmethod
    def check(func: Any, found: list[torch.Tensor]) -> None:
        """Numbers may be anywhere, and copies and indices may cross."""
        if any(name in str(func) for name in ("copy", "index", "_local_scalar_dense")):
            return
        several = [tensor for tensor in found if tensor.dim()]
        devices = {tensor.device.type for tensor in several}
        assert len(devices) <= 1, f"{func} got tensors on {devices}"


class Numbers(TorchFunctionMode):
    """Numbers to tensors and back, for which torch calls no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.tensor and given.get("device") is not None:
            return func(*args, **given | {"device": "cpu"}).to(given["device"])
        if func is torch.Tensor.tolist and isinstance(args[0], NpuTensor):
            return args[0].on_host.tolist()
        if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]))
        return func(*args, **given)


def _any_here(found: list[torch.Tensor]) -> bool:
    return any(isinstance(tensor, NpuTensor) for tensor in found)


def _wrapped(value: Any, moved: bool, args: Any) -> Any:
    """Return a result, the very tensor that was given where an operator works in place."""
    if not moved or not isinstance(value, torch.Tensor):
        return value
    for given in args:
        if isinstance(given, NpuTensor) and given.on_host is value:
            return given
    return NpuTensor(value)


def main(checkpoint: Path) -> None:
    """Decode with and without drafts, every layer's attention through the registered operator."""
    from mtp_runtime import LLM, SamplingParams
    from npu_operator import registered

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [tuple(range(2, 30)), (5, 9, 4)]
    with registered() as calls, Device(), Numbers(), torch.inference_mode():
        options: dict[str, Any] = {"device": "npu", "dtype": "bfloat16", "cache_tokens": 512}
        plain = LLM(checkpoint, **options, page_size=16)
        drafting = LLM(
            checkpoint,
            **options,
            page_size=16,
            speculate_method="mtp",
            speculate_max_draft_token_num=2,
        )
        tokens = [
            [output.token_ids for output in llm.generate(prompts, params)]
            for llm in (plain, drafting)
        ]
        caches = [str(tensor.device) for tensor in plain.engine.cache.tensors]
    print(json.dumps({"tokens": tokens, "calls": len(calls), "caches": caches}))


class WithoutFp8(Device):
    """A device whose operators take no fp8."""

    @staticmethod
    def check(func: Any, found: list[torch.Tensor]) -> None:
        if "to_copy" in str(func) and found[0].dtype == torch.float8_e4m3fn and _any_here(found):
            raise RuntimeError("Float8_e4m3fn is not supported")
        Device.check(func, found)


def conversions() -> None:
    """Compare on devices that convert as a CPU does, that round otherwise, and that have no fp8."""
    from mtp_kernels.quantize import reference
    from mtp_kernels.quantize.probe import difference

    found = []
    for device in (Device(), WithoutFp8()):
        with device, Numbers():
            found.append(difference("npu"))
    rounded = reference._round_to_bf16

    def cut(values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.int32)
        return (bits & -65536).view(torch.float32) if _any_here([values]) else rounded(values)

    reference._round_to_bf16 = cut
    with Device(), Numbers():
        found.append(difference("npu"))
    print(json.dumps(found))


if __name__ == "__main__":
    torch_npu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    _setup_privateuseone_for_python_backend("npu", torch_npu)
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1] == "conversions":
        conversions()
    else:
        main(Path(sys.argv[1]))
