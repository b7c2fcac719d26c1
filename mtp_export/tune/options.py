"""Options of a tuning run, and the identity by which an interrupted one is found again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.options import RunOptions
from mtp_runtime.config import MAX_DRAFT_TOKENS, check_count, check_range


@dataclass(frozen=True)
class DataOptions:
    """Texts to train on. held_out: a file of prompts to measure on, None for a tenth of the data.

    new_tokens are written after each prompt; a text is cut at text_tokens.
    """

    prompts: Path
    held_out: Path | None = None
    new_tokens: int = 128
    text_tokens: int = 2048

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.new_tokens, 2, 1 << 20)
        check_count("max_text_tokens", self.text_tokens, self.new_tokens + 2, 1 << 20)


@dataclass(frozen=True)
class TrainOptions:
    """Course of the training.

    k: the deepest draft that is trained. rate: the highest learning rate. batch_tokens: rows of a
    step, over all processes together.
    """

    k: int = 3
    steps: int = 1000
    rate: float = 2e-4
    batch_tokens: int = 2048
    lora_rank: int | None = None
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("k", self.k, 1, MAX_DRAFT_TOKENS)
        check_count("steps", self.steps, 1, 1 << 30)
        check_range("lr", self.rate, 0.0, 1.0)
        check_count("batch_tokens", self.batch_tokens, 16, 1 << 30)
        check_count("seed", self.seed, 0, (1 << 31) - 1)
        if self.lora_rank is not None:
            check_count("lora_rank", self.lora_rank, 1, 1 << 16)
        if self.dtype not in ("float32", "bfloat16"):
            raise UsageError(
                "Option dtype is unknown", expected="float32 or bfloat16", found=self.dtype
            )


@dataclass(frozen=True)
class TuneOptions:
    """A bundle, the draft to train for it, and the bundle to write.

    workdir holds what a run resumes from. offload: parameters and optimizer stay in main memory.
    stream: the target is read layer by layer. save_seconds: time between two saved states.
    """

    bundle: Path
    output_dir: Path
    data: DataOptions
    draft: str = "mtp"
    train: TrainOptions = field(default_factory=TrainOptions)
    workdir: Path | None = None
    device: str = "cpu"
    offload: bool = False
    stream: bool = False
    overwrite: bool = False
    save_seconds: float = 120.0

    @property
    def run(self) -> RunOptions:
        """Means of writing the bundle."""
        return RunOptions(overwrite=self.overwrite)

    @property
    def place(self) -> str:
        """Device of parameters and optimizer."""
        return "cpu" if self.offload else self.device

    @property
    def work(self) -> Path:
        """Folder of rows and saved states."""
        output = Path(os.path.abspath(self.output_dir))  # "." has no name
        return self.workdir or output.parent / f"{output.name}-work"


def short_hash(facts: Mapping[str, Any]) -> str:
    """Return a name for what a file was made from."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
