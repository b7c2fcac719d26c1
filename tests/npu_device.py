"""A device called npu, in a process of its own, whose tensors lie in main memory.

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
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from memory_device import Device, Numbers, any_there


def main(checkpoint: Path) -> None:
    """Decode with and without drafts, every layer's attention through the registered operator."""
    from mtp_runtime import LLM, SamplingParams
    from npu_operator import registered

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [tuple(range(2, 30)), (5, 9, 4)]
    with registered() as calls, Device("npu"), Numbers(), torch.inference_mode():
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

    def check(self, func: Any, found: list[torch.Tensor]) -> None:
        if "to_copy" in str(func) and found[0].dtype == torch.float8_e4m3fn and any_there(found):
            raise RuntimeError("Float8_e4m3fn is not supported")
        super().check(func, found)


def conversions() -> None:
    """Compare on devices that convert as a CPU does, that round otherwise, and that have no fp8."""
    from mtp_kernels.quantize import reference
    from mtp_kernels.quantize.probe import difference

    found = []
    for device in (Device("npu"), WithoutFp8("npu")):
        with device, Numbers():
            found.append(difference("npu"))
    rounded = reference._round_to_bf16

    def cut(values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.int32)
        return (bits & -65536).view(torch.float32) if any_there([values]) else rounded(values)

    reference._round_to_bf16 = cut
    with Device("npu"), Numbers():
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
    if sys.argv[1] == "conversions":
        conversions()
    else:
        main(Path(sys.argv[1]))
