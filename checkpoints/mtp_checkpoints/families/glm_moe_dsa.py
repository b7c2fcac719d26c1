"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's tensors in other sizes. In 5.2 a layer may share the choice
of the indexer before it, and has none of its own then.

The norms of the latents take config.json's rms_norm_eps, as in glm4_moe_lite.

Source: config.json and the index of the released checkpoints; transformers' glm_moe_dsa.
"""

from __future__ import annotations

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.deepseek_v32 import sparse_decoder
from mtp_checkpoints.families.engine_draft import SGLANG_NEXTN
from mtp_checkpoints.families.examples import GLM4_MOE_LITE, INDEXER, Config, Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.releases import GLM, Releases
from mtp_checkpoints.families.spec import ModelSpec

_KINDS = {"F": "full", "S": "shared"}  # of index_topk_pattern, and of indexer_types


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json; every MTP layer has an indexer of its own."""
    types = indexer_types(fields, main_layers(fields))

    def has_indexer(layer: int) -> bool:
        return layer >= len(types) or types[layer] == "full"

    return sparse_decoder(fields, has_indexer, usually_rotates_pairs=True, sglang=SGLANG_NEXTN)


def indexer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of every main layer's indexer: as listed, by a pattern, or by a period."""
    listed = fields.values.get("indexer_types") or fields.values.get("index_topk_pattern")
    if listed is None:
        known = fields.without_nulls()
        period = known.whole("index_topk_freq", 1)
        first = known.whole("index_skip_topk_offset", 2, minimum=0)
        return tuple(
            "shared" if max(layer - first + 1, 0) % period else "full" for layer in range(layers)
        )
    kinds = tuple(_KINDS.get(kind, kind) for kind in listed) if _is_list(listed) else ()
    known_kinds = set(kinds) <= set(_KINDS.values()) and kinds[:1] != ("shared",)
    if len(kinds) != layers or not known_kinds:
        raise InvalidInputError(
            "config.json has no usable indexer_types or index_topk_pattern",
            expected=f"full or shared for each of {layers} layers, first full",
            found=repr(listed)[:100],
        )
    return kinds


def _is_list(listed: object) -> bool:
    """True for letters or words, of which each is one layer's."""
    return isinstance(listed, str) or (
        isinstance(listed, list) and all(isinstance(kind, str) for kind in listed)
    )


_GLM_MOE_DSA: Config = (
    GLM4_MOE_LITE
    | INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "full", "shared"],
        "routed_scaling_factor": 2.5,
    }
)


EXAMPLES = {
    "glm_moe_dsa": Example(
        _GLM_MOE_DSA,
    ),
}
# The second base is GLM-5.2's: config.json in NVIDIA's aiconfigurator.
RELEASES: Releases = {
    "glm_moe_dsa": {**GLM, "rope_theta": (1e6, 8e6), "routed_scaling_factor": (2.5,)}
}
