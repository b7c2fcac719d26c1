"""transformers loads the main part: nothing missing, nothing unexpected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import UNQUANTIZED, WHOLE_TILES, export, make_checkpoint, read_tensors

CONFIGS = {"bf16": UNQUANTIZED, "fp8": WHOLE_TILES}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CONFIGS)
def test_main_loads_with_nothing_missing(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config

    source = make_checkpoint(tmp_path / "source", CONFIGS[kind])
    assert export(source, tmp_path / "out").code == 0
    options: dict[str, Any] = {}
    if kind == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out/main", dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    embedding = read_tensors(source)["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight.detach(), embedding)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/mtp")
    assert tokenizer.decode(tokenizer.encode("split, then verify")) == "split, then verify"
