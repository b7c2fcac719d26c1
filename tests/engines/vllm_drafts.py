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

    document = json.loads(Path(main, "config.json").read_text())

    class Config(PretrainedConfig):
        model_type = document["model_type"]

        def __init__(self, text_config: Any = None, **fields: Any) -> None:
            if text_config is not None:
                self.text_config = AutoConfig.for_model(**dict(text_config))
            if "vision_config" in fields:
                fields["vision_config"] = PretrainedConfig(**dict(fields["vision_config"]))
            super().__init__(**fields)

        def get_nemotron_h_config_for_layer(self, index: int) -> Any:
            """The config of one layer, as the release of Puzzle has it."""
            blocks = getattr(self, "block_configs", [])
            return PretrainedConfig(**document | blocks[index]) if index < len(blocks) else self

    if Config.model_type not in CONFIG_MAPPING:
        AutoConfig.register(Config.model_type, Config)


def engine_config(main: str, draft: str, method: str, dtype: str = "bfloat16") -> Any:
    """vLLM's config of a main model with one draft, or without where no method drafts."""
    from vllm.engine.arg_utils import EngineArgs

    register(main)
    # Medusa has as many heads as tokens, others a divisor of 6 of layers.
    count = {"eagle": 1, "medusa": 3}.get(method, 6)
    speculation = {"method": method, "model": draft, "num_speculative_tokens": count}
    return EngineArgs(
        model=main, dtype=dtype, enforce_eager=True,
        speculative_config=speculation if method else None, max_model_len=256,
        mamba_block_size=256, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip


def built(config: Any) -> Any:
    """The model of the draft of a config, or the main model where there is none, as vLLM builds
    it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    drafts = config.speculative_config
    own = config.model_config if drafts is None else drafts.draft_model_config
    with set_current_vllm_config(config):
        return initialize_model(vllm_config=config, model_config=own)


def stored_in(folder: str) -> dict[str, Any]:
    """The tensors of a folder, by name."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def loading_of(main: str, draft: str, method: str) -> dict[str, Any]:
    """The loading of a model that vLLM builds."""
    import torch

    model = built(engine_config(main, draft, method))
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        with torch.no_grad():
            parameter.fill_(UNTOUCHED)
    model.load_weights(iter(stored_in(draft if method else main).items()))
    untouched = [name for name, p in parameters.items() if bool((p == UNTOUCHED).any())]
    return {
        "class": type(model).__name__,
        "untouched": untouched,
        "elements": sum(p.numel() for n, p in parameters.items() if n not in untouched),
    }


if __name__ == "__main__":
    run_job(loading_of)
