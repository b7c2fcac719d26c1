"""Folders of drafts that are no models of their own: a config.json and one file of tensors."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo
from mtp_checkpoints.containers.safetensors_header import read_header
from mtp_checkpoints.dtypes import OutputTensor, dtype_name
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.files import write_all, write_whole
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import TensorReader, read_rows

# What torch's reader raises for a file that is damaged, or none of its own.
UNREADABLE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, pickle.UnpicklingError),
)
MEDUSA_NAME, MEDUSA_PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"

# In a file, to be read when it is wanted, or in memory.
DraftTensor = TensorInfo | torch.Tensor


@dataclass(frozen=True)
class DraftFolder:
    """An opened draft: its config.json, and its tensors as they are stored. Another process opens
    it anew."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, DraftTensor]

    def __reduce__(self) -> tuple[Any, ...]:
        return read_draft, (self.path,)


def read_draft(folder: Path) -> DraftFolder:
    """Open a draft: a checkpoint, or Medusa's file of heads beside its config.json.

    Raises InvalidInputError for a folder that holds neither, or files that are damaged, IoError
    for one that cannot be read.
    """
    tensors: Mapping[str, DraftTensor]
    medusa = medusa_file(folder)
    if medusa is None:
        tensors = Checkpoint.open(folder).tensors
    elif medusa.name == MEDUSA_PICKLE:
        tensors = _of_pickle(medusa)
    else:
        header = read_header(LocalFolder(folder).file(MEDUSA_NAME))
        tensors = {info.name: info for info in header.tensors}
    return DraftFolder(folder, read_json_object(folder / CONFIG_NAME), tensors)


def medusa_file(folder: Path) -> Path | None:
    """Return Medusa's file of heads in a folder, None where there is none."""
    files = (folder / MEDUSA_NAME, folder / MEDUSA_PICKLE)
    return next((file for file in files if file.is_file()), None)


def values_of(tensor: DraftTensor) -> torch.Tensor:
    """Return a tensor's values, in its own dtype."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    return read_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1)


def part_of(tensor: DraftTensor, rows: range, columns: range) -> torch.Tensor:
    """Return some rows and columns of a matrix; of one in a file no others are read."""
    if isinstance(tensor, torch.Tensor):
        return tensor[rows.start : rows.stop, columns.start : columns.stop]
    with TensorReader(tensor) as reader:
        return reader.window(rows, columns)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file of tensors in memory, whole or not at all (IoError)."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(plain, metadata={"format": "pt"})
    write_whole(path, lambda fd: write_all(fd, memoryview(content), 0))


def layout_on_disk(tensor: DraftTensor) -> OutputTensor:
    """Return a tensor's safetensors dtype and shape, under no name."""
    if isinstance(tensor, TensorInfo):
        return OutputTensor("", tensor.dtype, tensor.shape)
    return _output("", tensor)


def _output(name: str, tensor: torch.Tensor) -> OutputTensor:
    return OutputTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def unpickled(path: Path, *, mapped: bool = False) -> Any:
    """Read what torch saved, on the CPU, with nothing in it that runs (UNREADABLE); mapped: tensors
    stay on disk. Torch warns of some damage before it refuses the file: its refusal says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _of_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read a pickled file of tensors, and nothing else that it may hold."""
    try:
        content = unpickled(path)
    except UNREADABLE as error:
        raise InvalidInputError(
            "A file of tensors cannot be read, or holds more than tensors",
            where=path,
            found=str(error).partition("\n")[0][:200],
            todo="Do not trust this file; get the draft as safetensors",
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in content.items()
    ):
        raise InvalidInputError(
            "A file of heads holds something else", where=path, expected="tensors by name"
        )
    return content
