"""Options of a calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_export.options import Access, Panel, check_bounds, option, path_option


class Method(StrEnum):
    """Choice of the codes of a calibrated weight."""

    GPTQ = "gptq"
    AWQ = "awq"


@dataclass(frozen=True)
class CalibrationOptions:
    """Texts to calibrate with, and how they are made.

    calibrate: None leaves calibration out. main: the main model is calibrated too. method chooses
    the codes. measure_inputs: numbers of inputs are those of the largest that went into a weight.
    new_tokens are written after each prompt without an answer. imatrix: file that the
    sums of squared inputs are written to. stream: the main model is read layer by layer. workdir
    holds what a run resumes from.
    """

    calibrate: Path | None = field(
        default=None,
        metadata=path_option(
            "Choose codes of the MTP module by what these prompts (lines as tune --data takes them)"
            " make of it, beside the main model as it was quantized.",
            Panel.PRECISION,
            "FILE.jsonl",
            access=Access.READ,
        ),
    )
    method: Method = field(
        default=Method.GPTQ,
        metadata=option(
            "With --calibrate: how codes are chosen: {names}.", Panel.PRECISION, metavar="NAME"
        ),
    )
    main: bool = field(
        default=False,
        metadata=option(
            "With --calibrate: choose codes of the main model too, layer by layer, by what the"
            " same lines make of the layers before.",
            Panel.PRECISION,
            "--calibrate-main",
        ),
    )
    measure_inputs: bool = field(
        default=False,
        metadata=option(
            "With --calibrate: scales of inputs of a4w4_nvfp4 are those of the largest input of a"
            " linear, or of all experts of a layer, in place of 1.",
            Panel.PRECISION,
        ),
    )
    new_tokens: int = field(
        default=128,
        metadata=option(
            "New tokens that the main model writes to calibrate with.",
            Panel.PRECISION,
            "--max-new-tokens",
            metavar="N",
            low=2,
            high=1 << 20,
        ),
    )
    stream: bool = field(
        default=False,
        metadata=option(
            "Calibrate with a main model that is read layer by layer; every line then needs a"
            " completion.",
            Panel.PERFORMANCE,
        ),
    )
    imatrix: Path | None = field(
        default=None,
        metadata=path_option(
            "With --calibrate: write the sums of squared inputs as an imatrix of llama.cpp too.",
            Panel.INPUT_OUTPUT,
            "FILE.gguf",
            access=Access.WRITTEN,
        ),
    )
    workdir: Path | None = field(
        default=None,
        metadata=path_option(
            "Folder of what a calibration resumes from; by default beside the output.",
            Panel.INPUT_OUTPUT,
            "DIR",
            access=Access.WRITTEN,
        ),
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    def check(self) -> None:
        """Refuse what belongs to a calibration without one (UsageError)."""
        given = {
            "--method": (self.method is not Method.GPTQ, "A method chooses the codes"),
            "--calibrate-main": (self.main, "The codes of the main model are chosen by the texts"),
            "--measure-inputs": (self.measure_inputs, "Inputs are those of the texts"),
            "--imatrix": (self.imatrix is not None, "An imatrix has the statistics"),
        }
        for name, (is_given, words) in given.items():
            if is_given and self.calibrate is None:
                raise UsageError(
                    f"{words} of a calibration",
                    expected=f"{name} beside --calibrate",
                    found=f"{name} alone",
                    todo="Name the prompts with --calibrate FILE.jsonl",
                )

    def kept(self, is_shared: bool) -> dict[str, Any]:
        """Return the options, by name, that runs have in common which go on with one another: rows
        of a streamed model differ in bits, and shares fold the same scales from one folder."""
        given = None if self.workdir is None else os.path.abspath(self.workdir)
        return {"--stream": self.stream} | ({"--workdir": given} if is_shared else {})

    def work(self, output: Path) -> Path:
        """Return the folder of rows and chosen codes, given that of the bundle."""
        whole = Path(os.path.abspath(output))  # "." has no name
        return self.workdir or whole.parent / f"{whole.name}-work"
