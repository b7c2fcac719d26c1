"""Run as a script under TRITON_INTERPRET=1, which must be set before triton is imported."""

from __future__ import annotations

import sys

from quantize_cases import disagreements

# Ragged rows of a program, ragged segments and blocks, more than one block in each direction.
SHAPES = [(3, 130), (130, 4), (5, 128), (2, 288)]

if __name__ == "__main__":
    sys.exit("\n".join(disagreements(SHAPES[: int(sys.argv[1])], "triton_cuda")) or 0)
