"""Quantize a checkpoint with llm-compressor, by its public API alone.

python with_llm_compressor.py SCHEME SOURCE OUTPUT CALIBRATION; CALIBRATION is a JSON file of lists
of token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

LINEARS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}}
BY_GROUPS: dict[str, Any] = GROUPS | {"ignore": ["lm_head"]}

NORM, UP = "post_attention_layernorm", ("gate_proj", "up_proj")
GROUPED_ATTENTION = {
    "input_layernorm": [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")],
    "self_attn.v_proj": ["self_attn.o_proj"],
}
LATENT_ATTENTION = {
    "input_layernorm": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
    "self_attn.q_a_layernorm": ["self_attn.q_b_proj"],
    "self_attn.kv_a_layernorm": ["self_attn.kv_b_proj"],
}


def mappings(config: dict[str, Any]) -> list[AWQMapping]:
    """Return what AWQ may scale: the tool's own mappings of the two families need a router in every
    layer, which the dense ones at the start lack."""
    attention = LATENT_ATTENTION if "kv_lora_rank" in config else GROUPED_ATTENTION
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    shared = [f"mlp.shared_experts.{name}" for name in UP]
    routed = [rf"mlp.experts.\d+.{name}" for name in UP]
    return [
        *(_mapping(range(layers), before, after) for before, after in attention.items()),
        _mapping(range(dense), NORM, [f"mlp.{name}" for name in UP]),
        _mapping(range(dense, layers), NORM, ["mlp.gate", *routed, *shared]),
        AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]),
    ]


def _mapping(layers: range, before: str, after: list[str]) -> AWQMapping:
    layer = rf"re:.*layers\.({'|'.join(map(str, layers))})\."
    return AWQMapping(f"{layer}{before}$", [f"{layer}{name}$" for name in after])


def recipe(scheme: str, source: Path) -> list[Any]:
    """Return the modifiers of a scheme."""
    if scheme == "W4A16":
        return [QuantizationModifier(**BY_GROUPS)]
    if scheme == "W4A16 GPTQ":
        return [GPTQModifier(**BY_GROUPS)]
    if scheme == "W4A16 AWQ":
        return [AWQModifier(), QuantizationModifier(**BY_GROUPS)]
    if scheme == "W4A16 AWQ, mappings":
        by_hand = mappings(json.loads((source / "config.json").read_text()))
        return [AWQModifier(mappings=by_hand), QuantizationModifier(**BY_GROUPS)]
    return [QuantizationModifier(**LINEARS, scheme=scheme)]


def main(scheme: str, source: Path, output: Path, calibration: Path) -> None:
    rows = json.loads(calibration.read_text())
    dataset = Dataset.from_list(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    )
    length = max(map(len, rows))
    oneshot(
        model=str(source),
        dataset=dataset,
        recipe=recipe(scheme, source),
        num_calibration_samples=len(rows),
        max_seq_length=length,
        output_dir=str(output),
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
