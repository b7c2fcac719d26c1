"""MiMo-V2 and V2.5: attention with sinks, in most layers to the last tokens alone, values narrower
than queries, a mixture of experts, and MTP layers with dense MLPs that config.json does not count.

V2-Flash stores queries, keys and values apart, V2 and V2.5 as one matrix.

Source: transformers' mimo_v2_flash; vLLM's mimo_v2_mtp, SGLang's mimo_v2_nextn.
"""

from __future__ import annotations

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL, EngineDraft
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, grouped, matrix
from mtp_checkpoints.families.releases import BIASED, PLAIN_GROUPS, Releases, Values
from mtp_checkpoints.families.signs import USUAL_COUNTS
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(Hidden.BEFORE_NORM, source="SGLang, which feeds it to each layer")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MTP = "model.mtp.layers"
_MODULES = ("enorm", "hnorm", "eh_proj", "final_layernorm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of V2 or V2.5."""
    return _decoder(fields, joined=True)


def flash_spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of V2-Flash."""
    return _decoder(fields, joined=False)


def _decoder(fields: Fields, *, joined: bool) -> ModelSpec:
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(fields, key)
    main, count = main_layers(fields), mtp_count(fields, USUAL_COUNTS["mimo_v2"])
    sparse = _flags(fields, main, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"))
    slides = _flags(fields, main, "hybrid_layer_pattern", "layer_types", (_FULL, _SLIDING))
    check_expert_count(fields, "n_routed_experts", sum(sparse))
    moe, mlp = _moe(fields), GatedMlp.of(fields)
    full, sliding = (_attention(fields, slides=one, joined=joined) for one in (False, True))
    layers = [
        LayerSpec(f"model.layers.{at}", sliding if slides[at] else full, moe if of else mlp)
        for at, of in enumerate(sparse)
    ]
    norms = ("input_layernorm", "pre_mlp_layernorm")
    mtp = [
        MtpSpec(
            LayerSpec(f"{_MTP}.{index}", sliding, mlp, norms=norms),
            MtpModules.without_copies(f"{_MTP}.{index}", _MODULES),
        )
        for index in range(count)
    ]
    return listed_decoder(
        TextPart.whole(fields),
        layers,
        mtp,
        _CONTRACT,
        mtp_prefix="model.mtp",
        vllm=EngineDraft(plain=("self_attn.o_proj",)),
        sglang=SGLANG_USUAL,
    )


def _moe(fields: Fields) -> Moe:
    known = fields
    for key, usual in (("routed_scaling_factor", 1.0), ("n_shared_experts", 0)):
        if not fields.has(key):  # the release has nulls
            known = known.with_values(**{key: usual})
    return Moe.of(known)


def _flags(
    fields: Fields, layers: int, key: str, listed: str, kinds: tuple[str, str]
) -> list[bool]:
    """Return which layers are of the second kind, by a list of 0 and 1 or of words."""
    if key not in fields.values:
        return [kind == kinds[1] for kind in fields.kinds(listed, kinds, layers)]
    found = fields.values[key]
    if (
        not isinstance(found, list)
        or len(found) != layers
        or any(type(one) is not int or one not in (0, 1) for one in found)
    ):
        raise fields.unusable(key, f"0 or 1 for each of {layers} layers")
    return [one == 1 for one in found]


def _attention(fields: Fields, *, slides: bool, joined: bool) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads, head = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    ranks = kv_heads  # of those that the joined projection was stored on, in layers of either kind
    value = fields.whole("v_head_dim", head)
    if slides:
        heads = fields.whole("swa_num_attention_heads", heads)
        kv_heads = fields.whole("swa_num_key_value_heads", 2 * kv_heads)
        head, value = fields.whole("swa_head_dim", head), fields.whole("swa_v_head_dim", value)
    entries = list(grouped(hidden, heads, kv_heads, head, value))
    if joined:
        rows = sum(entry.shape[0] for entry in entries[:3])
        if any(entry.shape[0] % ranks for entry in entries[:3]):
            raise fields.unusable(
                "num_key_value_heads", "a divisor of the rows of every projection"
            )
        joint = matrix("qkv_proj", rows, hidden, Role.ATTENTION)
        entries[:3] = [joint._replace(row_chunks=ranks)]
    key = f"add_{'swa' if slides else 'full'}_attention_sink_bias"
    if fields.flag(key, slides):
        entries.append(Entry("attention_sink_bias", (heads,), Role.ATTENTION))
    where = ", to the last tokens alone" if slides else ""
    return Listed(f"attention with values of their own width{where}", "self_attn", tuple(entries))


_MIMO_V2_FLASH: Config = PLAIN | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "v_head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    **EXPERTS,
}
_MIMO_V2: Config = {
    **{key: one for key, one in _MIMO_V2_FLASH.items() if not key.endswith("layer_types")},
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "swa_v_head_dim": 8,
    "add_swa_attention_sink_bias": True,
}
_READ: Config = (
    {"layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}
    | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
    | {"swa_v_head_dim": 8, "add_swa_attention_sink_bias": True, "attention_value_scale": 0.7}
    | {"swa_rope_theta": 10000, "partial_rotary_factor": 0.5, "sliding_window_size": 32}
)
READ_OF_V2: Config = (
    _READ
    | {"attention_bias": False, "hidden_act": "silu", "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.0, "n_shared_experts": None, "topk_method": "noaux_tc"}
)  # fmt: skip
EXAMPLES = {
    "mimo_v2_flash": Example(
        _MIMO_V2_FLASH,  # vLLM loads the first of their three layers.
        vllm=Reader("MiMoV2MTP", _READ, layers=3),
    ),
    "mimo_v2": Example(
        _MIMO_V2,
        in_transformers=False,
        vllm=Reader("MiMoV2MTP", READ_OF_V2, layers=3),
        vllm_main=Reader("MiMoV2ForCausalLM", READ_OF_V2),
    ),
}
# V2-Flash: config.json in NVIDIA's aiconfigurator; where transformers saves it, the bases of both
# kinds of attention are side by side. V2.5 and V2.6, Flash and Pro: config.json as tests and
# reports of engines quote it; a null routed_scaling_factor is 1.
_OF_BOTH: Values = {
    **BIASED,
    **PLAIN_GROUPS,
    "routed_scaling_factor": (1.0,),
    "swa_rope_theta": (10000.0,),
    "partial_rotary_factor": (0.334,),
    "attention_value_scale": (0.707,),
    "sliding_window": (128,),
}
RELEASES: Releases = {
    "mimo_v2_flash": {
        **_OF_BOTH,
        "layernorm_epsilon": (1e-5,),
        "rope_theta": (5e6, 10000.0),
    },
    "mimo_v2": {
        **_OF_BOTH,
        "layernorm_epsilon": (1e-5, 1e-6),
        "rope_theta": (1e7,),
        "attention_value_scale": (0.707, 0.612),
    },
}
