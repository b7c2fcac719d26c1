"""vLLM's own reading of others' checkpoints: `python vllm_foreign.py JOB.json RESULT.json`.

The job has a folder per name. Builds the draft in it as vLLM does, on the meta device, and notes
for every linear, head and expert layer whether its quantization config builds it quantized, and
what the projection is built as; or why vLLM refuses the folder. What is chosen for a GPU is chosen
here too: checks for kernels say yes, and methods of quantized layers are none that compute.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from vllm_modules import TABLES, run_job


class Quantized:
    """Replacement of vLLM's methods of quantized layers, which need kernels."""

    backend = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Scheme:
    """Replacement of AutoRound's schemes, as one for a GPU answers."""

    get_linear_method = get_moe_method = staticmethod(Quantized)


def as_on_a_gpu() -> ExitStack:
    """Replace what asks for kernels, in the modules of all methods."""
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, modelopt
    from vllm.model_executor.layers.quantization.inc.schemes import factory

    replaced: dict[Any, tuple[str, ...]] = {
        auto_awq: ("AutoAWQMarlinLinearMethod", "AutoAWQLinearMethod", "AutoAWQMoEMethod"),
        auto_gptq: ("AutoGPTQLinearMethod", "AutoGPTQMoEMethod"),
        fp8: ("Fp8LinearMethod", "Fp8MoEMethod"),
        modelopt: ("build_linear_method",),
        modelopt.ModelOptFp8Config: ("FusedMoEMethodCls",),
        modelopt.ModelOptNvFp4Config: ("FusedMoEMethodCls",),
    }
    stack = ExitStack()
    for owner, names in replaced.items():
        stack.enter_context(patch.multiple(owner, **dict.fromkeys(names, Quantized)))
    for module in (auto_awq, auto_gptq):
        yes = patch.object(module, "check_moe_marlin_supports_layer", lambda *_, **__: True)
        stack.enter_context(yes)
    stack.enter_context(patch.object(factory, "resolve_scheme", lambda _: Scheme()))
    return stack


def is_quantized(config: Any, layer: Any, prefix: str) -> bool:
    """vLLM's answer for a module; of compressed-tensors, its scheme for each of an expert's."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    kind = type(layer).__name__
    if isinstance(config, CompressedTensorsConfig) and kind not in TABLES:
        names = [prefix]
        if kind == "RoutedExperts":
            config._add_fused_moe_to_target_scheme_map()
            names = [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        answers = {config.get_scheme_dict(layer, name) is not None for name in names}
        assert len(answers) == 1, f"{prefix}: experts are of two kinds"
        return answers.pop()
    with as_on_a_gpu():
        method = config.get_quant_method(layer, prefix)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def note_all(config: Any, noted: dict[str, bool]) -> None:
    """Let a quantization config note what it is asked, and quantize nothing."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    own = type(config)

    class Noting(own):  # type: ignore[misc, valid-type]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            kind = type(layer).__name__
            if not (isinstance(layer, LinearBase) or kind == "RoutedExperts" or kind in TABLES):
                return None
            config.__class__ = own
            noted[prefix] = is_quantized(config, layer, prefix)
            config.__class__ = Noting
            if kind in TABLES:
                return None
            if kind == "RoutedExperts":
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return UnquantizedLinearMethod()

    config.__class__ = Noting


def draft_of(folder: str) -> dict[str, Any]:
    """The draft of one folder as vLLM builds it, or why it does not."""
    try:
        return _built_draft(folder)
    except (ValueError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _built_draft(folder: str) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=256,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    noted: dict[str, bool] = {}
    if config.quant_config is not None:
        note_all(config.quant_config, noted)
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(vllm_config=config)  # whose class tells what is fused
        noted.clear()
        draft = config.speculative_config.draft_model_config
        model = initialize_model(vllm_config=config, model_config=draft)
    kinds = {n: type(m) for n, m in model.named_modules() if n.endswith("eh_proj")}
    return {"modules": noted, "projections": [kind is torch.nn.Linear for kind in kinds.values()]}


if __name__ == "__main__":
    run_job(draft_of)
