"""Quantize a checkpoint with ModelOpt, by its public API alone.

python with_modelopt.py SCHEME SOURCE OUTPUT CALIBRATION; CALIBRATION is a JSON file of lists of
equally many token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(scheme: str, source: str, output: str, calibration: Path) -> None:
    rows = json.loads(calibration.read_text())
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    configuration = getattr(mtq, f"{scheme}_DEFAULT_CFG")
    mtq.quantize(model, configuration, lambda calibrated: calibrated(torch.tensor(rows)))
    export_hf_checkpoint(model, export_dir=output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
