"""Quantize a checkpoint with AutoRound, by its public API alone: rounding without training.

python with_auto_round.py SCHEME SOURCE OUTPUT CALIBRATION; SCHEME is a format of the tool, with
", model free" for the rounding that loads no model. CALIBRATION is a JSON file of lists of token
ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound


def main(scheme: str, source: str, output: str, calibration: Path) -> None:
    form, _, way = scheme.partition(", ")
    rows = json.loads(calibration.read_text())
    rounding = AutoRound(
        source,
        scheme="W4A16",
        group_size=32,
        iters=0,
        disable_opt_rtn=way == "model free",
        dataset=[{"input_ids": torch.tensor([row])} for row in rows],
        nsamples=len(rows),
        seqlen=min(map(len, rows)),
        device_map="cpu",
    )
    rounding.quantize_and_save(output, format=form)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
