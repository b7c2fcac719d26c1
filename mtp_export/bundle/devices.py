"""Devices that convert weights, each only where it makes the bits of a CPU."""

from __future__ import annotations

from mtp_checkpoints.errors import UnsupportedError
from mtp_export.bundle.precision import Device


def device_of(wanted: Device) -> str:
    """Return the torch device that an option names (UnsupportedError where there is none)."""
    if wanted is Device.CPU:
        return "cpu"
    import torch

    if wanted is Device.NPU:
        return _npu()
    if torch.cuda.is_available():
        return "cuda"
    if wanted is Device.CUDA:
        raise UnsupportedError(
            "There is no CUDA device here", expected="--device cpu or auto", found="--device cuda"
        )
    return "cpu"


def _npu() -> str:
    """Return the NPU (UnsupportedError where there is none that makes the bits of a CPU)."""
    import torch

    from mtp_kernels.quantize.probe import difference

    module = getattr(torch, "npu", None)
    if module is None or not module.is_available():
        raise UnsupportedError(
            "There is no NPU (torch_npu beside CANN) here",
            expected="--device cpu, cuda or auto",
            found="--device npu",
        )
    found = difference("npu")
    if found is not None:
        raise UnsupportedError(
            "This NPU does not convert weights as a CPU does",
            expected="the same bits of every conversion",
            found=found,
            todo="Use --device cpu",
        )
    return "npu"
