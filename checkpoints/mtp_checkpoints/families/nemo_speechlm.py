"""Nemotron-3.5-Transcribe: Nemotron-3 and its MTP module as the decoder of a model of speech, whose
encoders are carried as they are.

Source: transformers' nemotron3_5_transcribe and its conversion mapping, which leaves the module
out.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.examples import NEMOTRON_H, Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.layer_halves import Attention
from mtp_checkpoints.families.nemotron_h import decoder, main_parts, mtp_parts
from mtp_checkpoints.families.parts.mamba2 import Mamba2
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_MODEL = "llm.model"
_ENCODERS = ("perception.", "ctc_timestamp.")
_APART = ("A_log", "D", "dt_bias")  # of Mamba-2, kept in float32 under a module of their own


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    part = TextPart.of(fields, _MODEL, _ENCODERS)
    described = decoder(part, main_parts(part.fields), mtp_parts(part.fields), "llm.")
    layers = (
        replace(layer, prefix=f"{_MODEL}.layers.{at}", attention=_attention(layer.attention))
        for at, layer in enumerate(described.layers)
    )
    return replace(
        described,
        layers=tuple(layers),
        embedding=f"{_MODEL}.embed_tokens",
        norm=f"{_MODEL}.norm",
        uncomputed="steps and decays of Mamba-2 are in a module of their own",
        engines=(),
    )


def _attention(part: Attention) -> Attention:
    if not isinstance(part, Mamba2):
        return part
    entries = (
        one._replace(name=f"_fp32_params.{one.name}") if one.name in _APART else one
        for one in part.entries
    )
    return replace(part, entries=tuple(entries))


_ENCODER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_ENCODER |= {"num_attention_heads": 2}
EXAMPLES = {
    "nemo_speechlm": Example(
        {
            "architectures": ["Nemotron3_5TranscribeForConditionalGeneration"],
            "model_type": "nemo_speechlm",
            "tie_word_embeddings": False,
            "text_config": NEMOTRON_H,
            "audio_config": {
                "asr_config": _ENCODER | {"num_mel_bins": 16},
                "diarization_config": {
                    "model_type": "nemotron3_diarization",
                    "audio_config": _ENCODER,
                    "head_config": {"audio_hidden_size": 32, "hidden_size": 16},
                },
            },
            "word_timestamp_config": _ENCODER | {"vocab_size": 96, "blank_token_id": 95},
        },
    ),
}
RELEASES: Releases = {"nemo_speechlm": None}  # no release read
