"""python -m fuzz --seed N --seconds S: a campaign in this process and its forked children.

A process of its own: a fork is safe only where no compiled kernel has started threads yet.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from fuzz.campaign import run_campaign
from fuzz.control import run_controls
from fuzz.lab import build_lab


def main() -> int:
    """Run a campaign; print its report, and return 1 when there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # power cuts are the subject of other tests
    with tempfile.TemporaryDirectory(prefix="mtp-fuzz-") as folder:
        lab = build_lab(Path(folder, "lab"))
        run_controls(lab, Path(folder, "controls"))
        report = run_campaign(lab, Path(folder, "cases"), arguments.seed, arguments.seconds)
    print(f"seed {arguments.seed}: {report.summary()}")
    if report.findings:
        print(f"\n{report.failures()}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
