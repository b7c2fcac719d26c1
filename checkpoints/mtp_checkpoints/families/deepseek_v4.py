"""DeepSeek-V4: queries to one head of keys that are values too, with sinks, to the last tokens and
in most layers to summaries of those before them; experts, in the first layers picked by token;
several streams with hyper-connections around both parts, and an MTP layer of the same kind.

Source: transformers' deepseek_v4 and its conversion mapping; vLLM's and SGLang's deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import SGLANG_DRAFT, ModulePatterns, Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.examples import ENDS, EXPERTS, PLAIN, Config, Example, Reader
from mtp_checkpoints.families.facts import EXPERT_DTYPE, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.glm5_next import hyper_connections
from mtp_checkpoints.families.listed_decoder import listed_decoder, listed_layer
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import Router
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(
    Hidden.BEFORE_NORM,
    recycled_hidden=Hidden.BEFORE_NORM,
    zero_first_embedding=True,
    source="vLLM: all streams",
)
_NORMS = ("attn_norm", "ffn_norm")
_SLIDING, _PICKED, _DENSE = (
    *("sliding_attention", "compressed_sparse_attention"),
    "heavily_compressed_attention",
)
_RATIOS = {0: _SLIDING, 4: _PICKED, 128: _DENSE}  # tokens of a summary, as releases list them
_BY_TOKEN, _BY_SCORE = "hash_moe", "moe"
_OWN = Role.ATTENTION
_PATTERNS = ModulePatterns(
    linears={
        _OWN: "((self_)?attn[.](wq_a|wkv|fused_wqa_wkv|wqkv_a|wq_b|wo_a|wo_b)|[eh]_proj)$",
        Role.INDEXER: "(self_)?attn[.]indexer[.]wq_b$",
        Role.SHARED_EXPERT: "(ffn|mlp)[.]shared_experts[.](w1|w2|w3|(gate|up|gate_up|down)_proj)$",
        Role.ROUTED_EXPERT: "(ffn|mlp)[.]experts[.].*",
    },
    other_matrices=(
        *("re:.*(ffn|mlp)[.]gate$", "re:.*attn[.]indexer[.]weights_proj$"),
        *("re:.*compressor[.].*", "re:(embed|head)$"),
    ),
    fused={("wq_a", "wkv"): ("fused_wqa_wkv",), ("w1", "w3"): ("gate_up_proj",)},
    absorbed=("wo_a",),
)


@dataclass(frozen=True)
class _Part(Listed):
    """Part whose modules engines know by other names, too."""

    @property
    def patterns(self) -> ModulePatterns:
        """Names in vLLM and in SGLang."""
        return _PATTERNS


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json. Raises UnsupportedError for the layout of the fp8 releases."""
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(fields, key)
    _refuse_released(fields)
    main, count = main_layers(fields), mtp_count(fields)
    check_expert_count(fields, "n_routed_experts", main + count)
    attentions = {kind: _attention(fields, kind) for kind in (_SLIDING, _PICKED, _DENSE)}
    experts = {kind: _experts(fields, kind) for kind in (_BY_TOKEN, _BY_SCORE)}
    streams = hyper_connections(fields)

    def layer(prefix: str, kind: str, picking: str) -> LayerSpec:
        made = listed_layer(prefix, attentions[kind], experts[picking], _NORMS)
        return replace(made, more=streams)

    described = listed_decoder(
        TextPart.whole(fields),
        [
            layer(f"layers.{index}", kind, picking)
            for index, (kind, picking) in enumerate(zip(*_kinds(fields, main), strict=True))
        ],
        [_mtp(fields, layer(f"mtp.{index}", _SLIDING, _BY_SCORE)) for index in range(count)],
        _CONTRACT,
        mtp_prefix="mtp",
    )
    return replace(
        described,
        embedding="embed",
        norm="norm",
        head="head",
        mtp_names=(*(f"model.layers.{main + index}" for index in range(count)), SGLANG_DRAFT),
        quantized_fields=((EXPERT_DTYPE, "fp8"),),
        more=_one_stream(fields, ""),
    )


def _refuse_released(fields: Fields) -> None:
    """Refuse fp8 with scales of other names and experts in fp4, as it is released."""
    dtype = fields.values.get(EXPERT_DTYPE, "fp4")
    native = fields.section("quantization_config").values.get("quant_method") == "fp8"
    if native and dtype != "fp8":
        raise UnsupportedError(
            "DeepSeek-V4's release in fp8 and fp4 is not read",
            expected="a copy in bf16, or fp8 blocks with scales named weight_scale_inv and"
            f' "{EXPERT_DTYPE}": "fp8"',
            found=f"quant_method fp8 and {EXPERT_DTYPE} {dtype}",
            todo="Start from a copy in bf16 that has the release's names, and its MTP layer",
        )


def _kinds(fields: Fields, layers: int) -> tuple[list[str], list[str]]:
    """Return the kinds of main layers' attention, and the ways in which they pick experts."""
    if fields.has("layer_types"):
        attention = [*fields.kinds("layer_types", (*_RATIOS.values(),), layers)]
    else:
        ratios = fields.wholes("compress_ratios")[:layers]
        if len(ratios) != layers or not _RATIOS.keys() >= set(ratios):
            raise fields.unusable("compress_ratios", f"0, 4 or 128 for each of {layers} layers")
        attention = [_RATIOS[ratio] for ratio in ratios]
    if fields.has("mlp_layer_types"):
        return attention, [*fields.kinds("mlp_layer_types", (_BY_TOKEN, _BY_SCORE), layers)]
    by_token = fields.whole("num_hash_layers", 3, minimum=0)
    return attention, [_BY_TOKEN if index < by_token else _BY_SCORE for index in range(layers)]


def _mtp(fields: Fields, layer: LayerSpec) -> MtpSpec:
    hidden, prefix = fields.whole("hidden_size"), layer.prefix
    inputs = (f"{prefix}.{one}" for one in ("e_proj", "h_proj"))
    return MtpSpec(
        layer,
        MtpModules(None, f"{prefix}.enorm", f"{prefix}.hnorm", None, f"{prefix}.norm", None),
        more=(
            *(matrix(one, hidden, hidden, _OWN) for one in inputs),  # as the release quantizes them
            *_one_stream(fields, f"{prefix}."),
        ),
    )


def _attention(fields: Fields, kind: str) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head, rank = fields.whole("head_dim"), fields.whole("q_lora_rank")
    groups = fields.whole("o_groups")
    if fields.whole("qk_rope_head_dim", 64) % 2:
        raise fields.unusable("qk_rope_head_dim", "an even number: positions turn pairs")
    joined = groups * fields.whole("o_lora_rank")
    entries = [
        Entry("attn_sink", (heads,), _OWN),
        matrix("wq_a", rank, hidden, _OWN),
        norm("q_norm", rank),
        matrix("wq_b", heads * head, rank, _OWN),
        matrix("wkv", head, hidden, _OWN),
        norm("kv_norm", head),
        matrix("wo_a", joined, heads * head // groups, _OWN),
        matrix("wo_b", hidden, joined, _OWN),
    ]
    title = "attention with sinks, to the last tokens"
    if kind == _SLIDING:
        return _Part(title, "attn", tuple(entries))
    if kind == _DENSE:
        entries += _compressor("compressor", hidden, head, tokens=128)
        return _Part(f"{title} and summaries of the others", "attn", tuple(entries))
    index_heads, index_head = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    entries += [
        *_compressor("compressor", hidden, 2 * head, tokens=4),
        matrix("indexer.wq_b", index_heads * index_head, rank, Role.INDEXER),
        matrix("indexer.weights_proj", index_heads, hidden, Role.INDEXER_HEADS),
        *_compressor("indexer.compressor", hidden, 2 * index_head, tokens=4),
    ]
    return _Part(f"{title} and picked summaries of the others", "attn", tuple(entries))


def _compressor(name: str, hidden: int, width: int, *, tokens: int) -> tuple[Entry, ...]:
    """Return what makes one row of several tokens'; of 4 tokens, of those before them too."""
    role = Role.COMPRESSOR
    return (
        Entry(f"{name}.ape", (tokens, width), role),
        matrix(f"{name}.wkv", width, hidden, role),
        matrix(f"{name}.wgate", width, hidden, role),
        norm(f"{name}.norm", width // 2 if tokens == 4 else width),
    )


def _experts(fields: Fields, kind: str) -> Listed:
    """Return a mixture of experts; picked by token, by a table in place of a bias."""
    hidden, inner = fields.whole("hidden_size"), fields.whole("moe_intermediate_size")
    experts, vocab = fields.whole("n_routed_experts"), fields.whole("vocab_size")
    Router.of(fields, experts)  # refuses more experts than can be picked, and the like
    shared = inner * fields.whole("n_shared_experts", 1)
    picking = Entry("gate.bias", (experts,), Role.ROUTER)
    if kind == _BY_TOKEN:
        table = (vocab, fields.whole("num_experts_per_tok"))
        picking = Entry("gate.tid2eid", table, Role.ROUTER, (DType.I64, DType.I32))
    entries = [
        matrix("gate", experts, hidden, Role.ROUTER),
        picking,
        *_gated_mlp("shared_experts", hidden, shared, Role.SHARED_EXPERT),
    ]
    for expert in range(experts):
        entries += _gated_mlp(f"experts.{expert}", hidden, inner, Role.ROUTED_EXPERT)
    how = "by token" if kind == _BY_TOKEN else "by the roots of their scores"
    return _Part(f"experts that are picked {how}", "ffn", tuple(entries))


def _gated_mlp(prefix: str, hidden: int, inner: int, role: Role) -> tuple[Entry, ...]:
    return (
        matrix(f"{prefix}.w1", inner, hidden, role),
        matrix(f"{prefix}.w2", hidden, inner, role),
        matrix(f"{prefix}.w3", inner, hidden, role),
    )


def _one_stream(fields: Fields, prefix: str) -> tuple[Entry, ...]:
    """Return what makes one stream of all, before a last norm."""
    streams, role = fields.whole("hc_mult", 4), Role.HYPER_CONNECTION
    return (
        Entry(f"{prefix}hc_head_fn", (streams, streams * fields.whole("hidden_size")), role),
        Entry(f"{prefix}hc_head_base", (streams,), role),
        Entry(f"{prefix}hc_head_scale", (1,), role),
    )


_DEEPSEEK_V4: Config = {
    **{key: PLAIN[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", *ENDS)},
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "compress_ratios": [0, 4, 128],
    "sliding_window": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 32,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    **EXPERTS,
}
EXAMPLES = {
    "deepseek_v4": Example(
        _DEEPSEEK_V4,  # vLLM has sinks for 64 heads or more.
        vllm=Reader(
            "DeepSeekV4MTP",
            {
                "num_attention_heads": 64,
                "rms_norm_eps": 1e-6,
                "hc_eps": 1e-6,
                "hc_sinkhorn_iters": 20,
            }
            | {"rope_theta": 1e4, "compress_rope_theta": 1.6e5, "routed_scaling_factor": 1.5}
            | {"norm_topk_prob": True, "hidden_act": "silu", "swiglu_limit": 10.0},
            needs_gpu=True,
        ),
    ),
}
# V4-Flash, then V4-Pro: their config.json in NVIDIA's aiconfigurator.
RELEASES: Releases = {
    "deepseek_v4": {
        "rms_norm_eps": (1e-6,),
        "hc_eps": (1e-6,),
        "rope_theta": (10000.0,),
        "compress_rope_theta": (160000.0,),
        "rope_scaling": (
            {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        ),
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (1.5, 2.5),
        "swiglu_limit": (10.0,),
        "sliding_window": (128,),
    }
}
