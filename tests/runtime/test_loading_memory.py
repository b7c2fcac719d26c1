"""Memory of loading into compiled kernels: the packed model, and pieces of it on their way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from runtime.checkpoints import SMALL, write_checkpoint

LARGE = SMALL | {
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_hidden_layers": 2,
}
PACKED_BYTES = 2 * 32 * 3 * 512 * 512 * 2  # experts of a layer and of the MTP layer, in bf16
# A layer's experts whole in float32 are 100 MB, and beside them side by side once more.
PIECES_BYTES = 64 << 20

# Without huge pages, which make memory of freed pieces stay: how much is the system's own affair.
PROGRAM = """
import ctypes, json, sys
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
from pathlib import Path
from mtp_runtime import LLM, SamplingParams

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def load(folder):
    llm = LLM(folder, dtype="bfloat16", speculate_method="mtp")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    return llm

small = load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = memory("VmRSS:")
large = load(sys.argv[2])
print(json.dumps([memory("VmHWM:") - before, memory("VmRSS:") - before]))
"""


def test_no_layer_lies_in_memory_beside_the_packed_model(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / "s"), write_checkpoint(tmp_path / "l", LARGE)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=True,
    )
    peak, held = json.loads(done.stdout)
    assert PACKED_BYTES <= held <= PACKED_BYTES + PIECES_BYTES
    assert peak <= PACKED_BYTES + PIECES_BYTES
