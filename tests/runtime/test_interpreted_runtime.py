"""The runtime on Triton's kernels, where there is no GPU: batches, static steps and the texts of
verify, whose pages are of one token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Sizes that the kernels take, in one layer with experts.
SIZES = {"kv_lora_rank": 16, "qk_rope_head_dim": 16, "num_hidden_layers": 1}
ONE_LAYER = SIZES | {"first_k_dense_replace": 0, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.nightly
def test_tokens_and_drafts_are_those_of_the_reference(variant: Any) -> None:
    pytest.importorskip("triton")
    roots = [ROOT / name for name in (".", "runtime", "checkpoints", "kernels", "tests")]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, roots))}
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_runtime.py", variant(**ONE_LAYER)],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    eager, static = result["found"]
    assert eager == static == result["wanted"][0]
    assert result["apart"] < 1e-4
