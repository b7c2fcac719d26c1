"""Quantize a checkpoint with GPTQModel, by its public API alone.

python with_gptqmodel.py METHOD SOURCE OUTPUT CALIBRATION; CALIBRATION is a JSON file of lists of
token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gptqmodel import GPTQModel, QuantizeConfig


def main(method: str, source: str, output: str, calibration: Path) -> None:
    quantize = {"gptq": {}, "gptq desc_act": {"desc_act": True}, "awq": {"method": "awq"}}[method]
    rows = json.loads(calibration.read_text())
    model = GPTQModel.load(source, QuantizeConfig(bits=4, group_size=32, **quantize))
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    model.save(output)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
