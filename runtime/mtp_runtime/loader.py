"""From checkpoint folders to weights, one tensor at a time, and a ledger of what became of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.reader import CONFIG_NAME, Checkpoint
from mtp_export.errors import InvalidInputError
from mtp_export.families import family_of
from mtp_export.families.base import Discrepancy, ModelFamily, TensorSpec, compare
from mtp_kernels import quantize
from mtp_runtime.layers.linear import Dense, Fp8Block, Linear, Weight

logger = logging.getLogger(__name__)

MAIN_FOLDER = "main"
MTP_FOLDER = "mtp"


@dataclass(frozen=True)
class Ledger:
    """What became of every tensor, by name.

    loaded: read into the model. skipped: stored but not needed for this run. tied: equal to
    another tensor, which is used in its place. Every stored tensor is in one of the three;
    expected is what config.json promises.
    """

    expected: frozenset[str]
    loaded: frozenset[str]
    skipped: frozenset[str]
    tied: frozenset[str]


@dataclass
class WeightSource:
    """Stored tensors by name, and the notes for the ledger; the state of one loading."""

    stored: dict[str, TensorInfo]
    owners: dict[str, Checkpoint]
    expected: dict[str, TensorSpec]
    family: ModelFamily
    dtype: torch.dtype
    device: torch.device
    keep_dense: bool
    loaded: set[str] = field(default_factory=set)
    tied: set[str] = field(default_factory=set)

    @property
    def has_mtp(self) -> bool:
        return any(self.family.mtp_layer_of(name) is not None for name in self.stored)

    def raw(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the device (InvalidInputError where there is none)."""
        if name not in self.owners:
            raise InvalidInputError(
                f"Tensor {name} is missing", todo="Get the checkpoint again, or correct config.json"
            )
        self.loaded.add(name)
        return self.owners[name].tensor(name).to(self.device)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in the dtype of the run."""
        return self.raw(name).to(self.dtype)

    def weight(self, module: str) -> Weight:
        """A linear's weight in the format it is stored in."""
        name = f"{module}.weight"
        scale = self._scales.get(name)
        if scale is None:
            return Dense(self.tensor(name))
        return Fp8Block(quantize.Fp8Block(self.raw(name), self.raw(scale)))

    def linear(self, module: str) -> Linear:
        return Linear.build(self.weight(module), self.dtype, self.keep_dense)

    def dense_matrix(self, module: str) -> torch.Tensor:
        """A linear's weight [out, in], dequantized."""
        return self.weight(module).dense(self.dtype)

    def tied_or_own(self, own: str, main: str, loaded: torch.Tensor) -> torch.Tensor:
        """A copy of a main tensor: the loaded original when they are equal, else the copy."""
        if own not in self.owners:
            return loaded
        if torch.equal(self.owners[own].tensor(own), self.owners[main].tensor(main)):
            self.tied.add(own)
            return loaded
        logger.warning("%s differs from %s: the MTP module uses its own", own, main)
        return self.tensor(own)

    @cached_property
    def _scales(self) -> dict[str, str]:
        """The scale that belongs to each quantized weight."""
        return {
            spec.scale_of: name for name, spec in self.expected.items() if spec.scale_of is not None
        }

    def ledger(self) -> Ledger:
        """Close the books (InvalidInputError for a tensor that nothing explains)."""
        stored = frozenset(self.stored)
        loaded, tied = frozenset(self.loaded), frozenset(self.tied)
        skipped = stored - loaded - tied
        unexplained = [n for n in skipped if self.family.mtp_layer_of(n) is None]
        if unexplained:
            raise InvalidInputError(
                f"Tensor {min(unexplained)} was loaded by nothing ({len(unexplained)} like it)",
                expected="every tensor of the main model in use",
            )
        return Ledger(frozenset(self.expected), loaded, skipped, tied)


def open_source(
    folder: Path, dtype: torch.dtype, device: torch.device, keep_dense: bool
) -> tuple[WeightSource, Checkpoint]:
    """Open a bundle (main and mtp side by side) or a single checkpoint folder, and compare it.

    Returns the weights and the checkpoint of the main part. Raises InvalidInputError for a tensor
    that is missing, of the wrong shape or dtype, or not promised by config.json. A checkpoint
    without any tensor of the MTP layer is taken as the main part alone.
    """
    if (folder / CONFIG_NAME).exists():
        main = Checkpoint.open(folder)
        mtp = None
    elif (folder / MAIN_FOLDER / CONFIG_NAME).exists():
        main = Checkpoint.open(folder / MAIN_FOLDER)
        mtp = Checkpoint.open(folder / MTP_FOLDER) if (folder / MTP_FOLDER).is_dir() else None
    else:
        raise InvalidInputError(
            "There is neither a bundle nor a checkpoint here",
            where=folder,
            expected=f"{CONFIG_NAME}, or {CONFIG_NAME} in {MAIN_FOLDER} and in {MTP_FOLDER}",
            todo="Point at the output folder of an export, or at a Hugging Face checkpoint",
        )
    family = family_of(main.config)
    expected = _checked(main, family, mtp)
    parts = [main] if mtp is None else [main, mtp]
    owners = {name: part for part in parts for name in part.tensors}
    stored = {name: info for part in parts for name, info in part.tensors.items()}
    return WeightSource(stored, owners, expected, family, dtype, device, keep_dense), main


def _checked(
    main: Checkpoint, family: ModelFamily, mtp: Checkpoint | None
) -> dict[str, TensorSpec]:
    """The tensors that the folders must hold, after holding the folders against them."""
    specs = list(family.expected.values())
    main_specs = [spec for spec in specs if spec.mtp_layer is None]
    mtp_specs = [spec for spec in specs if spec.mtp_layer is not None]
    if mtp is not None:
        _raise_first(main, main_specs)
        if family_of(mtp.config).mtp_layers != family.mtp_layers:
            raise InvalidInputError(
                "The MTP folder's config names other MTP layers than the main model's",
                where=mtp.folder / CONFIG_NAME,
                expected=list(family.mtp_layers),
                found=list(family_of(mtp.config).mtp_layers),
                todo="Export both parts from one checkpoint with --target hf",
            )
        drafted = [s for s in family_of(mtp.config).expected.values() if s.mtp_layer is not None]
        _raise_first(mtp, drafted)
        return {spec.name: spec for spec in (*main_specs, *drafted)}
    has_mtp = any(family.mtp_layer_of(name) is not None for name in main.tensors)
    wanted = main_specs + (mtp_specs if has_mtp else [])
    _raise_first(main, wanted)
    return {spec.name: spec for spec in wanted}


def _raise_first(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> None:
    problems: Sequence[Discrepancy] = compare(checkpoint.tensors, specs)
    if problems:
        problems[0].raise_as_error(checkpoint.folder, len(problems) - 1)
