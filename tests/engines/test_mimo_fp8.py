"""vLLM reads the joined projection of MiMo-V2 in fp8, which this tool wrote, as this tool does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from engine_runs import process

from cases import shard_of
from faults.small_model import family_config, write_dense, write_fp8
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import weights_on_disk

RANKS, HEADS, HEAD, VALUE = 2, 8, 32, 16
NAME = "model.layers.0.self_attn.qkv_proj.weight"


def test_every_rank_reads_its_rows(tmp_path: Path) -> None:
    """A rank of as many as stored it has its chunk bit for bit; one that takes all quantizes the
    rows anew, with an error that is that of fp8."""
    sizes = {"head_dim": HEAD, "v_head_dim": VALUE, "num_attention_heads": HEADS}
    sizes["hidden_size"] = 128  # vLLM takes whole blocks of columns alone
    dense = write_dense(tmp_path / "dense", config=family_config("mimo_v2") | sizes)
    main = write_fp8(dense, tmp_path / "fp8") / "main"
    job: dict[str, object] = {
        "one": {
            "file": str(shard_of(main, NAME)),
            "name": NAME,
            "ranks": RANKS,
            "sizes": {
                "num_heads": HEADS,
                "num_kv_heads": RANKS,
                "head_dim": HEAD,
                "v_head_dim": VALUE,
            },
        }
    }
    script = Path(__file__).with_name("vllm_tiled.py")
    status, log, result = process(script, job, tmp_path / "vllm")
    assert status == 0, log[-3000:]
    theirs = json.loads(result.read_text())["one"]
    checkpoint = Checkpoint.open(main)
    stored = stored_model(checkpoint.config, checkpoint.tensors).main
    (own,) = (w for w in weights_on_disk(stored, checkpoint.tensors) if w.name == NAME)
    ours = own.encoded(0, own.rows).dequantize()
    assert torch.tensor(theirs[str(RANKS)]).flatten(0, 1).equal(ours)
    parts = (HEADS * HEAD // RANKS, HEAD, VALUE)
    chunks = [chunk.split(parts) for chunk in ours.chunk(RANKS)]
    whole = torch.cat([torch.cat(part) for part in zip(*chunks, strict=True)])
    torch.testing.assert_close(torch.tensor(theirs["1"][0]), whole, rtol=0.07, atol=1e-3)
