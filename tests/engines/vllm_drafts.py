"""vLLM's own classes over drafts of ours, and main models: `python vllm_drafts.py JOB RESULT`.

Builds each as vLLM does, fills its parameters with a value that no weight has, loads the
folder, and notes the class, the parameters that kept the value, and those that were loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_modules import run_job

UNTOUCHED = 12345.0


def register(main: str) -> None:
    """Have transformers take the config of a model whose release brings its own class of it."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    name = json.loads(Path(main, "config.json").read_text())["model_type"]
    if name not in CONFIG_MAPPING:
        AutoConfig.register(name, type("Config", (PretrainedConfig,), {"model_type": name}))


def loading_of(main: str, draft: str, method: str) -> dict[str, Any]:
    """The loading of one draft, or of the main model where no method drafts."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    register(main)
    count = 1 if method == "eagle" else 3
    speculation = {"method": method, "model": draft, "num_speculative_tokens": count}
    config = EngineArgs(
        model=main, dtype="bfloat16", enforce_eager=True,
        speculative_config=speculation if method else None, max_model_len=256,
        mamba_block_size=256, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    own = config.speculative_config.draft_model_config if method else config.model_config
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config, model_config=own)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        with torch.no_grad():
            parameter.fill_(UNTOUCHED)
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(Path(draft if method else main).glob("*.safetensors")):
        stored |= load_file(path)
    model.load_weights(iter(stored.items()))
    untouched = [name for name, p in parameters.items() if bool((p == UNTOUCHED).any())]
    return {
        "class": type(model).__name__,
        "untouched": untouched,
        "elements": sum(p.numel() for n, p in parameters.items() if n not in untouched),
    }


if __name__ == "__main__":
    run_job(loading_of)
