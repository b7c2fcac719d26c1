"""Values of config.json that no shape depends on, as releases of a family have them. Each family's
file has its own, with the releases and where they were read; here is what several have alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By field, the values of the releases that were read. A field that is not here may have any.
Values = Mapping[str, tuple[Any, ...]]
# By model_type; None where no release was read, so that nothing is known of any field.
Releases = Mapping[str, Values | None]

PLAIN_GROUPS: Values = {"n_group": (1,), "topk_group": (1,)}
BIASED: Values = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
}
# V3, R1, their later versions, V3.1 and V3.2: config.json of the released checkpoints.
DEEPSEEK: Values = {
    **BIASED,
    "rms_norm_eps": (1e-6,),
    "rope_theta": (10000.0,),
    "rope_scaling": (
        {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "routed_scaling_factor": (2.5,),
    "n_group": (8,),
    "topk_group": (4,),
}
# GLM-4.5 to 5.2: config.json of the released checkpoints.
GLM: Values = {
    **BIASED,
    **PLAIN_GROUPS,
    "rms_norm_eps": (1e-5,),
    "rope_theta": (1e6,),
    "rope_scaling": (None,),
}
# Qwen3-Next, Qwen3.5 and 3.6: config.json of the released checkpoints.
QWEN: Values = {
    "rms_norm_eps": (1e-6,),
    "rope_theta": (1e7,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (0.25,),
}
