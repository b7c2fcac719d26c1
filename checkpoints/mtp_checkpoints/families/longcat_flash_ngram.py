"""LongCat-Flash-Lite: LongCat-Flash and its MTP layer, with embeddings of n-grams beside that of
tokens, which are carried as they are.

Source: vLLM's longcat_flash_ngram, which leaves the tensors of the MTP layer out.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import longcat_flash
from mtp_checkpoints.families.examples import Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec

_EMBEDDINGS = ("model.ngram_embeddings.embedders.", "model.ngram_embeddings.post_projs.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json, without an MTP layer where it counts none, as engines take none."""
    known = fields.with_defaults(num_nextn_predict_layers=0)
    return replace(longcat_flash.spec(known), carried=_EMBEDDINGS, engines=())


_WITHOUT = longcat_flash.EXAMPLES["longcat_flash"].config | {"zero_expert_num": 0}
EXAMPLES = {
    "longcat_flash_ngram": Example(
        _WITHOUT
        | {
            "architectures": ["LongcatFlashNgramForCausalLM"],
            "model_type": "longcat_flash_ngram",
            "num_nextn_predict_layers": 1,
            "ngram_vocab_size_ratio": 2,
            "emb_neighbor_num": 2,
            "emb_split_num": 2,
        },
        like=_WITHOUT,
    ),
}
# LongCat-Flash-Lite: its config.json in tests of two engines.
RELEASES: Releases = {
    "longcat_flash_ngram": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (5e6,),
        "routed_scaling_factor": (6.0,),
    }
}
