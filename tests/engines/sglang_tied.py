"""SGLang's own loading of a tied model that stores another head too: `python sglang_tied.py
JOB.json RESULT.json`. The class is that of the wheel, over an embedding alone that is its head."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from sglang_families import _REAL, Table, prepare
from sglang_modules import Finder
from torch import nn
from vllm_drafts import stored_in
from vllm_tied import EMBEDDING, in_both_orders, loaded_by


class Tied(nn.Module):
    """Model with a tied embedding, as far as its loading asks."""

    start_layer, end_layer, pooler = 0, 1, None
    pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)

    def __init__(self, kind: type, rows: int, columns: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.model = nn.Module()
        self.lm_head = self.model.embed_tokens = Table(rows, columns)
        self.load_weights = kind.load_weights.__get__(self)  # type: ignore[attr-defined]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prepare(Finder(Path(job["wheel"]), _REAL))
    kind = getattr(importlib.import_module("sglang.srt.models.qwen3_5"), job["class"])
    stored = stored_in(job["main"])
    result = {
        order: loaded_by(Tied(kind, *stored[EMBEDDING].shape), tensors)
        for order, tensors in in_both_orders({EMBEDDING: stored[EMBEDDING]}).items()
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
