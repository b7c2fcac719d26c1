"""Quantize a checkpoint with Quark, by its public API alone.

python with_quark.py SCHEME SOURCE OUTPUT CALIBRATION; CALIBRATION is a JSON file of lists of
equally many token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import Int4PerGroupSpec, OCP_MXFP4Spec, QConfig, QLayerConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYERS = {
    "INT4": {"weight": Int4PerGroupSpec(ch_axis=-1, group_size=32)},
    "MXFP4": {
        "weight": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "input_tensors": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True),
    },
}


def main(scheme: str, source: str, output: str, calibration: Path) -> None:
    rows = json.loads(calibration.read_text())
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    layer = {name: spec.to_quantization_spec() for name, spec in LAYERS[scheme].items()}
    quantizer = ModelQuantizer(QConfig(QLayerConfig(**layer), exclude=["lm_head"]))
    quantized = quantizer.quantize_model(model, DataLoader(torch.tensor(rows)))
    with torch.no_grad():
        export_safetensors(quantizer.freeze(quantized), output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
