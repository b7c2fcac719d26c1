"""MiMo-V2-Omni: MiMo-V2 and its MTP layers, beside towers for images and sound that are carried as
they are.

Source: vLLM's mimo_v2_omni and mimo_v2_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import mimo_v2
from mtp_checkpoints.families.examples import Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec

_TOWERS = ("visual.", "audio_encoder.", "speech_embeddings.", "audio_tokenizer.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json, whose fields of the text model lie beside those of the towers."""
    return replace(mimo_v2.spec(fields), carried=_TOWERS, engines=("vllm",))


_OF_V2 = mimo_v2.EXAMPLES["mimo_v2"]
EXAMPLES = {
    "MiMoV2OmniForCausalLM": replace(
        _OF_V2,
        config=_OF_V2.config | {"architectures": ["MiMoV2OmniForCausalLM"]},
        vllm=Reader("MiMoV2OmniMTP", mimo_v2.READ_OF_V2, layers=3),
        vllm_main=None,
    ),
}
# vLLM reads each release of mimo_v2 that has towers by this name.
RELEASES: Releases = {"MiMoV2OmniForCausalLM": mimo_v2.RELEASES["mimo_v2"]}
