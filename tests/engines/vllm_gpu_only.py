"""vLLM's own classes that need a GPU over drafts of ours, and main models: `python vllm_gpu_only.py
JOB RESULT`, as vllm_drafts.py.

What they ask of a GPU when they are built, where nothing is computed, is replaced: streams, kernels
of attention and experts, and packages that hold kernels. Parameters and the loading of weights are
vLLM's own.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

from vllm_drafts import loading_of
from vllm_modules import run_job

_FLASH = ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func")
_FLASH += ("get_scheduler_metadata", "reshape_and_cache_flash")
_PACKAGES = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
_PACKAGES += ("vllm.third_party.deep_gemm",)
Backend = MagicMock()  # of sparse attention
Backend.get_impl_cls()().dcp_world_size = 1


def replace_gpu_only() -> None:
    """Replace them for the whole process."""
    import torch
    import vllm.v1.attention.backends.fa_utils as flash
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.models import registry
    from vllm.models import deepseek_v4
    from vllm.platforms.cpu import CpuPlatform

    sys.modules.update({name: MagicMock(__path__=[]) for name in _PACKAGES})
    vars(flash).update(dict.fromkeys(_FLASH, MagicMock()))
    vars(flash)["is_flash_attn_varlen_func_available"] = lambda: True
    torch.cuda.Stream = torch.cuda.Event = MagicMock  # type: ignore[misc, assignment]
    vars(config)["current_platform"] = MagicMock()
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.models.deepseek_v4.nvidia.mtp import DeepSeekV4MTP

    vars(flashmla)["compute_fp8_einsum_recipe"] = lambda: (None, False)
    vars(deepseek_v4)["DeepSeekV4MTP"] = DeepSeekV4MTP  # that of a CPU cannot be built
    # It looks at classes in another process, where nothing is replaced.
    vars(registry)["_run_in_subprocess"] = lambda look: look()
    chosen_experts = UnquantizedMoeBackend.CPU, MagicMock()
    method = vars(unquantized_fused_moe_method)
    method["select_unquantized_moe_backend"] = lambda **_: chosen_experts
    chosen = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, *given: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return f"{__name__}.Backend"
        return str(chosen(cls, *given, attn_selector_config=attn_selector_config, **more))

    CpuPlatform.get_attn_backend_cls = classmethod(backend)


if __name__ == "__main__":
    replace_gpu_only()
    run_job(loading_of)
