"""openPangu-Ultra-MoE: the layers of DeepSeek-V3 under its names, with norms after attention and
MLP as well as before them.

Source: vLLM's openpangu and openpangu_mtp. They read DeepSeek-V3's names in config.json, not those
of the first release, such as attention_q_lora_dim.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import deepseek_v3
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.examples import PANGU_LIKE, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import BIASED, GREEDY, Moe, MoeNames
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec

_CONTRACT = MtpContract(zero_first_embedding=True, source="vLLM")
_AROUND = ("pre_mlp_layernorm", "post_mlp_layernorm")
_OF_MAIN = MoeNames(bias="e_score_correction_bias")  # vLLM's loader of the module has the usual one


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    is_biased = fields.flag("router_enable_expert_bias", False)
    known = fields.with_values(topk_method=BIASED if is_biased else GREEDY)
    around = _AROUND if fields.flag("sandwich_norm", False) else ()
    described = deepseek_v3.spec(known, _CONTRACT)
    return replace(
        described,
        layers=tuple(_layer(one, around, _OF_MAIN) for one in described.layers),
        mtp=tuple(replace(one, layer=_layer(one.layer, around)) for one in described.mtp),
        uncomputed="norms surround attention and MLP" if around else "",
        engines=("vllm",),
    )


def _layer(layer: LayerSpec, around: tuple[str, ...], names: MoeNames | None = None) -> LayerSpec:
    """Return a layer with norms around its parts, and with names of the mixture's modules."""
    layer = replace(layer, norms=(*layer.norms, *around))
    if names is not None and isinstance(layer.feed_forward, Moe):
        return replace(layer, feed_forward=replace(layer.feed_forward, names=names))
    return layer


_PANGU_ULTRA_MOE: Config = PANGU_LIKE | {
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "router_enable_expert_bias": True,
    "sandwich_norm": True,
}
_READ = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
EXAMPLES = {
    "pangu_ultra_moe": Example(
        _PANGU_ULTRA_MOE,
        in_transformers=False,
        vllm=Reader("OpenPanguMTP", _READ),
        vllm_main=Reader("PanguUltraMoEForCausalLM", _READ),
    ),
}
# openPangu-Ultra-MoE-718B and V1.1: config.json in a memory estimator for vLLM and in a listing of
# the model's parts, which agree.
RELEASES: Releases = {
    "pangu_ultra_moe": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (25600000.0,),
        "rope_scaling": (None,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.5,),
    }
}
