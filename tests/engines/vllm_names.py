"""The names by which vLLM's own classes of drafts ask a quantization config for their linears:
`python vllm_names.py JOB.json RESULT.json`."""

from __future__ import annotations

from typing import Any

from vllm_drafts import built, engine_config
from vllm_modules import run_job


def names_of(main: str, draft: str) -> list[str]:
    """The linears and experts that a draft asks for, as vLLM builds it."""
    import torch
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    asked: list[str] = []

    class Asked(QuantizationConfig):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if type(layer).__name__ == "RoutedExperts":
                asked.append(prefix)
                return UnquantizedFusedMoEMethod(layer.moe_config)
            if isinstance(layer, LinearBase):
                asked.append(prefix)
                return UnquantizedLinearMethod()
            return None

        get_name = get_supported_act_dtypes = get_config_filenames = lambda self: []
        get_min_capability = classmethod(lambda cls: 0)
        from_config = classmethod(lambda cls, config: cls())

    config = engine_config(main, draft, "mtp")
    config.quant_config = Asked()
    with torch.device("meta"):
        built(config)
    return sorted(asked)


if __name__ == "__main__":
    run_job(names_of)
