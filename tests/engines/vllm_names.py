"""The names by which vLLM's own classes of drafts ask a quantization config for their linears, and
which of those a list of native fp8 leaves out: `python vllm_names.py JOB.json RESULT.json`."""

from __future__ import annotations

from typing import Any

from vllm_drafts import built, engine_config
from vllm_gpu_only import replace_gpu_only
from vllm_modules import run_job


def names_of(main: str, draft: str, kind: str, entries: list[str]) -> dict[str, bool | None]:
    """The linears and experts that a draft asks for beside a main model in a kind, as vLLM builds
    it, each with whether entries leave it out; None where they do so with a part of it."""
    import torch
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.model_loader.utils import (
        configure_quant_config,
        get_model_architecture,
    )

    asked: dict[str, bool | None] = {}

    class Asked(Fp8Config):  # type: ignore[misc]
        get_name = classmethod(lambda cls: kind)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            is_of_experts = type(layer).__name__ == "RoutedExperts"
            if not is_of_experts and not isinstance(layer, LinearBase):
                return None
            try:
                asked[prefix] = is_layer_skipped(
                    prefix,
                    self.ignored_layers,
                    self.packed_modules_mapping,
                    match_mode=self.ignored_layers_match_mode,
                )
            except ValueError:
                asked[prefix] = None
            if is_of_experts:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return UnquantizedLinearMethod()

    config = engine_config(main, draft, "mtp")
    config.quant_config = Asked(ignored_layers=entries, weight_block_size=[128, 128])
    configure_quant_config(config.quant_config, get_model_architecture(config.model_config)[0])
    with torch.device("meta"):
        built(config)
    return asked


if __name__ == "__main__":
    replace_gpu_only()
    run_job(names_of)
