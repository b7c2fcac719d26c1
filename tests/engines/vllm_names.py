"""The names by which vLLM's own classes of drafts ask a quantization config for their linears:
`python vllm_names.py JOB.json RESULT.json`."""

from __future__ import annotations

from typing import Any

from vllm_drafts import register
from vllm_modules import run_job


def names_of(main: str, draft: str) -> list[str]:
    """The linears and experts that a draft asks for, as vLLM builds it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader.utils import initialize_model

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

    register(main)
    config = EngineArgs(
        model=main, dtype="bfloat16", enforce_eager=True, max_model_len=256,
        speculative_config={"method": "mtp", "model": draft, "num_speculative_tokens": 6},
        mamba_block_size=256, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    config.quant_config = Asked()
    own = config.speculative_config.draft_model_config
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(vllm_config=config, model_config=own)
    return sorted(asked)


if __name__ == "__main__":
    run_job(names_of)
