"""Conversions on a device without a backend: the same bits, or the name of what differs."""

from __future__ import annotations

import json
from pathlib import Path

from forked import completed, script
from mtp_kernels.quantize.probe import difference

DEVICE = Path(__file__).resolve().parents[2] / "npu_device.py"


def test_a_device_is_compared_conversion_by_conversion() -> None:
    """One that converts as the CPU does, one without fp8, one that cuts scales off."""
    done = completed(script, DEVICE, "conversions")
    assert done.returncode == 0, done.stderr[-2000:]
    same, without_fp8, cut = json.loads(done.stdout)
    assert same is None
    assert without_fp8 == "bf16 to fp8 blocks: Float8_e4m3fn is not supported"
    assert cut == "bf16 to int8 channels: other bits"


def test_the_cpu_makes_its_own_bits() -> None:
    assert difference("cpu") is None
