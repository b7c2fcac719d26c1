"""Nemotron-H Puzzle: the layers and the MTP module of Nemotron-3, of sizes that differ from layer
to layer.

Source: vLLM's nemotron_h and nemotron_h_mtp; SGLang's NemotronHPuzzleConfig, which has the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtp_checkpoints.families.examples import NEMOTRON_H, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.nemotron_h import (
    MTP_KINDS,
    WORDS,
    Part,
    decoder,
    mtp_parts,
    part_of,
)
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_OF_MODULE, _EXPERTS = "mtp_block_configs", "mtp_n_routed_experts"


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    main = _blocks(fields, "block_configs", main_layers(fields))
    if fields.has(_OF_MODULE):
        module = _blocks(fields, _OF_MODULE, len(MTP_KINDS))
    else:
        known = fields.has(_EXPERTS)
        own = fields.with_values(n_routed_experts=fields.whole(_EXPERTS)) if known else fields
        module = mtp_parts(own)
    return decoder(TextPart.whole(fields), main, module)


def _blocks(fields: Fields, key: str, count: int) -> list[Part]:
    """Return the parts of layers whose own fields a list has."""
    listed = fields.values.get(key)
    blocks = listed if isinstance(listed, list) else []
    kinds = [str(one.get("block_type")) if isinstance(one, Mapping) else "" for one in blocks]
    if len(kinds) != count or not {*WORDS, *WORDS.values()}.issuperset(kinds):
        raise fields.unusable(key, f"an object with a block_type for each of {count} layers")
    parts = []
    for kind, block in zip(kinds, blocks, strict=True):
        own = fields.with_values(**block)
        if WORDS.get(kind, kind) == "moe":
            check_expert_count(own, "n_routed_experts", count)
        parts.append(part_of(own, kind))
    return parts


_OF_PATTERN = ("architectures", "model_type", "hybrid_override_pattern")
_BLOCKS = ({"n_routed_experts": 4, "moe_intermediate_size": 32}, {"n_routed_experts": 8})
_NEMOTRON_H_PUZZLE: Config = {
    **{key: one for key, one in NEMOTRON_H.items() if key not in _OF_PATTERN},
    "architectures": ["NemotronHPuzzleForCausalLM"],
    "model_type": "nemotron_h_puzzle",
    "num_hidden_layers": 4,
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe"} | _BLOCKS[0],
        {"block_type": "attention"},
        {"block_type": "moe"} | _BLOCKS[1],
    ],
    "mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe"} | _BLOCKS[0]],
}
_OF_ALL = {"n_routed_experts": 8, "moe_intermediate_size": 64}
EXAMPLES = {
    "nemotron_h_puzzle": Example(
        _NEMOTRON_H_PUZZLE,
        in_transformers=False,  # vLLM reads the counts of all layers, not those of the blocks.
        vllm=Reader(
            "NemotronHMTP",
            {"mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe"} | _OF_ALL]}
            | {"routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
            | {"mlp_hidden_act": "relu2", "mtp_hybrid_override_pattern": "*E"}
            | {"mtp_n_routed_experts": 8},
            needs_gpu=True,
        ),
        vllm_main=Reader(
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "ME*E", "use_conv_bias": True, "use_bias": False}
            | {"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False}
            | {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "routed_scaling_factor": 1.0}
            | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
            needs_gpu=True,
        ),
    ),
}
# Nemotron-Labs-3-Puzzle-75B-A9B: its config.json, layers aside, in a test of an engine.
RELEASES: Releases = {
    "nemotron_h_puzzle": {
        "norm_eps": (1e-5,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (5.0,),
    }
}
