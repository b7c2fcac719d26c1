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
from mtp_export.bundle.options import OVERWRITE, RunOptions
from mtp_export.options import Access, Names, Panel, check_bounds, option, path_option
from mtp_runtime.config import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class DataOptions:
    """Texts to train on. held_out: a file of prompts to measure on, None for a tenth of the data.

    new_tokens are written after each prompt; a text is cut at text_tokens.
    """

    prompts: Path = field(
        metadata=path_option(
            'JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}; completion likewise.',
            Panel.DATA,
            "FILE.jsonl",
            "--data",
            access=Access.READ,
        )
    )
    held_out: Path | None = field(
        default=None,
        metadata=path_option(
            "Prompts to measure acceptance on; by default a tenth of the data.",
            Panel.DATA,
            "FILE.jsonl",
            access=Access.READ,
        ),
    )
    new_tokens: int = field(
        default=128,
        metadata=option(
            "New tokens that the target writes.",
            Panel.DATA,
            "--max-new-tokens",
            metavar="N",
            low=2,
            high=1 << 20,
        ),
    )
    text_tokens: int = field(
        default=2048,
        metadata=option(
            "Tokens at which a text is cut.",
            Panel.DATA,
            "--max-text-tokens",
            metavar="N",
            low=4,
            high=1 << 20,
        ),
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.text_tokens < self.new_tokens + 2:
            raise UsageError(
                "Texts are cut before their new tokens end",
                expected="--max-text-tokens of at least --max-new-tokens and 2",
                found=f"{self.text_tokens} and {self.new_tokens}",
            )


@dataclass(frozen=True)
class TrainOptions:
    """Course of the training.

    k: the deepest draft that is trained. rate: the highest learning rate. batch_tokens: rows of a
    step, over all processes together.
    """

    steps: int = field(
        default=1000,
        metadata=option(
            "Steps of the optimizer.", Panel.TRAINING, metavar="N", low=1, high=1 << 30
        ),
    )
    rate: float = field(
        default=2e-4,
        metadata=option(
            "Highest learning rate.", Panel.TRAINING, "--lr", metavar="X", low=0, high=1
        ),
    )
    k: int = field(
        default=3,
        metadata=option(
            "Deepest draft to train, or number of heads.",
            Panel.TRAINING,
            metavar="K",
            low=1,
            high=MAX_DRAFT_TOKENS,
        ),
    )
    lora_rank: int | None = field(
        default=None,
        metadata=option(
            "Train changes of this rank instead of whole matrices.",
            Panel.TRAINING,
            metavar="R",
            low=1,
            high=1 << 16,
        ),
    )
    batch_tokens: int = field(
        default=2048,
        metadata=option(
            "Tokens of a step, over all processes.",
            Panel.TRAINING,
            metavar="N",
            low=16,
            high=1 << 30,
        ),
    )
    dtype: str = field(
        default="float32",
        metadata=option(
            "Products in {names}.",
            Panel.PERFORMANCE,
            metavar="NAME",
            values=Names.DTYPE,
        ),
    )
    seed: int = field(
        default=0,
        metadata=option("Seed.", Panel.TRAINING, metavar="N", low=0, high=(1 << 31) - 1),
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class TuneOptions:
    """A bundle, the draft to train for it, and the bundle to write.

    workdir holds what a run resumes from. offload: parameters and optimizer stay in main memory.
    stream: the target is read layer by layer. save_seconds: time between two saved states.
    command are the words of the command that began the run, as RunOptions has them.
    """

    bundle: Path = field(
        metadata=path_option(
            "Bundle whose draft is trained.", Panel.INPUT_OUTPUT, "DIR", access=Access.READ
        )
    )
    output_dir: Path = field(
        metadata=path_option("Bundle to write.", Panel.INPUT_OUTPUT, "DIR", access=Access.WRITTEN)
    )
    data: DataOptions
    draft: str = field(
        default="mtp",
        metadata=option(
            "Draft to train: {names}.",
            Panel.TRAINING,
            metavar="NAME",
            values=Names.TRAINED_DRAFT,
        ),
    )
    device: str = field(
        default="cpu",
        metadata=option(
            "{names}.",
            Panel.PERFORMANCE,
            metavar="NAME",
            values=Names.TORCH_DEVICE,
            takes_others=True,
        ),
    )
    train: TrainOptions = field(default_factory=TrainOptions)
    workdir: Path | None = field(
        default=None,
        metadata=path_option(
            "Folder of what a run resumes from; by default beside the output.",
            Panel.INPUT_OUTPUT,
            "DIR",
            access=Access.WRITTEN,
        ),
    )
    offload: bool = field(
        default=False,
        metadata=option("Keep parameters and optimizer in main memory.", Panel.PERFORMANCE),
    )
    stream: bool = field(
        default=False,
        metadata=option(
            "Read the target layer by layer; every line then needs a completion.",
            Panel.PERFORMANCE,
        ),
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    save_seconds: float = 120.0
    command: tuple[str, ...] = ()

    @property
    def run(self) -> RunOptions:
        """Means of writing the bundle."""
        return RunOptions(overwrite=self.overwrite, command=self.command)

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
