"""vLLM's own head over our folders: `python vllm_heads.py JOB.json RESULT.json`.

Builds the head of target and draft by the quantization_config, as their models do, and loads the
tensors on disk by its own loaders. What asks for a kernel is told that there is one, as on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_modules import run_job


class Kernel:
    """Replacement of vLLM's kernels, which need a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def heads_of(main: str, mtp: str) -> dict[str, dict[str, bool]]:
    """By the tensors of each folder's head, whether the loaded parameter has their values."""
    layer = json.loads((Path(main) / "config.json").read_text())["num_hidden_layers"]
    copy = f"model.layers.{layer}.shared_head.head"
    return {
        "lm_head": _loaded(Path(main), "lm_head", "lm_head"),
        copy: _loaded(Path(mtp), f"model.layers.{layer}.head", copy),
    }


def _loaded(folder: Path, asked: str, stored: str) -> dict[str, bool]:
    import torch
    from safetensors import safe_open
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    config = json.loads((folder / "config.json").read_text())
    quantization = compressed_tensors.CompressedTensorsConfig.from_config(
        config["quantization_config"]
    )
    with patch.object(compressed_tensors_wNa16, "choose_mp_linear_kernel", lambda _: Kernel):
        head = ParallelLMHead(
            config["vocab_size"],
            config["hidden_size"],
            params_dtype=torch.bfloat16,
            quant_config=quantization,
            prefix=asked,
        )
    parameters, result = dict(head.named_parameters()), {}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in (name for name in index if name.startswith(f"{stored}.")):
        with safe_open(folder / index[name], "pt") as file:
            tensor = file.get_tensor(name)
        parameter = parameters.pop(name.rpartition(".")[2])
        parameter.weight_loader(parameter, tensor)
        result[name] = bool(torch.equal(parameter.data[: len(tensor)], tensor))
    assert not parameters, f"not loaded: {[*parameters]}"
    return result


if __name__ == "__main__":
    run_job(heads_of)
