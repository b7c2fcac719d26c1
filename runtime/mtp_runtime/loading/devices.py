"""Devices that models are loaded to."""

from __future__ import annotations

import torch

from mtp_checkpoints.errors import UnsupportedError

DEVICES = {"cpu": "CPU", "cuda": "CUDA device", "npu": "NPU (torch_npu beside CANN)"}


def kind_of_device(name: str) -> str:
    """Return a name of DEVICES, as of cuda:1."""
    return name.partition(":")[0]


def device_of(name: str) -> torch.device:
    """Return a device that is here (UnsupportedError); torch_npu adds torch.npu when torch is
    imported."""
    kind = kind_of_device(name)
    if kind not in DEVICES:
        raise UnsupportedError(
            "The runtime has no such device", expected=", ".join(DEVICES), found=name
        )
    module = getattr(torch, kind, None)
    if kind != "cpu" and (module is None or not module.is_available()):
        raise UnsupportedError(
            f"There is no {DEVICES[kind]} here", found=name, todo="Use device cpu"
        )
    return torch.device(name)
