"""vLLM's own modules over our configs: `python vllm_modules.py JOB.json RESULT.json`.

Builds target and draft as vLLM does, on the meta device, and notes what its quantization config
says of every linear, head and embedding that asks: module name, class, and the scheme it resolves
to. The weights are never made: methods that need a GPU are replaced by none at all once they are
noted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
Noted = list[dict[str, Any]]
TABLES = ("ParallelLMHead", "VocabParallelEmbedding")


def arguments(value: Any) -> dict[str, Any] | None:
    """compressed-tensors' arguments of a weight or an activation, the fields that say the form."""
    if value is None:
        return None
    fields = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
    return {name: getattr(value, name) for name in fields}


def resolved(config: Any, layer: Any, prefix: str) -> dict[str, Any]:
    """Return the answer of vLLM's resolver for a module; experts are asked for one by one."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    if not isinstance(config, CompressedTensorsConfig):
        return {"method": _method_name(config, layer, prefix)}
    if type(layer).__name__ in TABLES:
        method = _method_name(config, layer, prefix)
        if method != "CompressedTensorsLinearMethod":
            return {"method": method}
    names = [prefix]
    if type(layer).__name__ == "RoutedExperts":
        config._add_fused_moe_to_target_scheme_map()
        names = [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    first, *others = [config.get_scheme_dict(layer, name) for name in names]
    assert all(other == first for other in others), f"{prefix}: {first}, {others}"
    if first is None:
        return {"method": "unquantized"}
    return {
        "method": "compressed-tensors",
        "format": first["format"],
        "weights": arguments(first["weights"]),
        "input_activations": arguments(first["input_activations"]),
    }


class NvFp4:
    """Replacement of vLLM's methods of ModelOpt's nvfp4, which need kernels."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Fp8:
    """Replacement of vLLM's fp8 methods, which need a device that has them."""

    def __init__(self, *_: Any) -> None:
        pass


def _method_name(config: Any, layer: Any, prefix: str) -> str:
    """Fp8, ModelOpt's algorithm or unquantized, by the class of the method; plain heads and
    embeddings get none at all, packed ones that of linears."""
    from unittest.mock import patch

    from vllm.model_executor.layers.quantization import fp8, modelopt

    with (
        patch.multiple(fp8, Fp8MoEMethod=Fp8, Fp8LinearMethod=Fp8),
        patch.object(modelopt, "build_linear_method", NvFp4),
        patch.object(modelopt.ModelOptNvFp4Config, "FusedMoEMethodCls", NvFp4),
    ):
        method = config.get_quant_method(layer, prefix)
    name = config.quant_method if isinstance(method, NvFp4) else type(method).__name__
    return "unquantized" if method is None or name.startswith("Unquantized") else name


def note_all(config: Any, noted: Noted) -> None:
    """Let a quantization config note what it is asked, and quantize nothing."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    own = type(config)

    class Noting(own):  # type: ignore[misc, valid-type]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            name = type(layer).__name__
            asks = isinstance(layer, LinearBase) or name == "RoutedExperts" or name in TABLES
            if not asks:
                return None
            config.__class__ = own
            answer = resolved(config, layer, prefix)
            config.__class__ = Noting
            noted.append({"module": prefix, "class": name} | answer)
            if name in TABLES:
                return None
            if name == "RoutedExperts":
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return UnquantizedLinearMethod()

    config.__class__ = Noting


@contextmanager
def noting_own_configs(noted: Noted) -> Iterator[None]:
    """Let the quantization config of a draft that has its own note what it is asked too."""
    from unittest.mock import patch

    from vllm.config import VllmConfig

    read = VllmConfig.get_quantization_config

    def noting(*arguments: Any) -> Any:
        config = read(*arguments)
        if config is not None:
            note_all(config, noted)
        return config

    with patch.object(VllmConfig, "get_quantization_config", staticmethod(noting)):
        yield


def modules_of(main: str, mtp: str, method: str = "mtp") -> dict[str, Noted]:
    """Every linear of target and draft, as vLLM builds the two."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    speculation = {"method": method, "model": mtp, "num_speculative_tokens": 1}
    config = EngineArgs(
        model=main, dtype="bfloat16", enforce_eager=True, speculative_config=speculation,
        max_model_len=256, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    noted: Noted = []
    if config.quant_config is not None:
        note_all(config.quant_config, noted)
    result: dict[str, Noted] = {}
    for part, model_config in (
        ("main", config.model_config),
        ("mtp", config.speculative_config.draft_model_config),
    ):
        before = len(noted)
        own = noting_own_configs(noted)
        with set_current_vllm_config(config), torch.device("meta"), own:
            initialize_model(vllm_config=config, model_config=model_config)
        result[part] = noted[before:]
    return result


def run_job(action: Callable[..., Any]) -> None:
    """Write the result of an action for every entry of a job, in vLLM's world of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    job = json.loads(Path(sys.argv[1]).read_text())
    rendezvous = Path(sys.argv[2]).with_suffix(".rendezvous")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0,
            distributed_init_method=f"file://{rendezvous}", backend="gloo",
        )  # fmt: skip
        ensure_model_parallel_initialized(1, 1)
    result = {name: action(**folders) for name, folders in job.items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    run_job(modules_of)
