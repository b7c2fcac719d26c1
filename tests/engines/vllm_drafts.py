"""vLLM's own classes over drafts of ours: `python vllm_drafts.py JOB.json RESULT.json`.

Builds each draft as vLLM does, fills its parameters with a value that no weight has, loads the
folder, and notes the class, the parameters that kept the value, and those that were loaded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
UNTOUCHED = 12345.0


def draft_of(main: str, draft: str, method: str) -> dict[str, Any]:
    """The loading of one draft."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    speculation = {"method": method, "model": draft, "num_speculative_tokens": 3}
    if method == "eagle":
        speculation["num_speculative_tokens"] = 1
    config = EngineArgs(
        model=main, dtype="bfloat16", enforce_eager=True, speculative_config=speculation,
        max_model_len=256, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    own = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config, model_config=own)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        with torch.no_grad():
            parameter.fill_(UNTOUCHED)
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(Path(draft).glob("*.safetensors")):
        stored |= load_file(path)
    model.load_weights(iter(stored.items()))
    untouched = [name for name, p in parameters.items() if bool((p == UNTOUCHED).any())]
    return {
        "class": type(model).__name__,
        "untouched": untouched,
        "elements": sum(p.numel() for n, p in parameters.items() if n not in untouched),
    }


def main() -> None:
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
    result = {name: draft_of(**folders) for name, folders in job.items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
