"""vLLM's map of models to drafts, executed: `python vllm_draft_map.py JOB.json RESULT.json`.

Gives it a config of every model_type that transformers, vLLM or the job knows, and of every
architecture that vLLM has, and notes those that it takes for models with an MTP module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Fields that the map reads of some configs; a count for all.
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_experts")
_UNKNOWN = "unknown"


def drafts(model_type: str, architecture: str) -> bool:
    """Return True where the map makes a draft of a model, or fails for want of its fields."""
    from transformers import PretrainedConfig
    from vllm.config.speculative import SpeculativeConfig

    fields: dict[str, Any] = dict.fromkeys(_COUNTS, 1)
    config = PretrainedConfig(architectures=[architecture], layer_types=[], **fields)
    config.model_type = model_type
    config.text_config = PretrainedConfig(architectures=[architecture], **fields)
    config.text_config.model_type = model_type
    config.mtp_config = fields
    try:
        made = SpeculativeConfig.hf_config_override(config)
    except (AttributeError, ValueError, TypeError, KeyError):
        return True
    return bool(made.model_type != model_type or made.architectures != [architecture])


def main() -> None:
    """Write the model types and architectures that the map knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    job, result = map(Path, sys.argv[1:])
    types = {*CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY, *json.loads(job.read_text())["types"]}
    found = {
        "types": sorted(each for each in types if drafts(each, _UNKNOWN)),
        "architectures": sorted(
            each for each in ModelRegistry.get_supported_archs() if drafts(_UNKNOWN, each)
        ),
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
