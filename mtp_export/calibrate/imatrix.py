"""Sums of squares of what goes into linears, as llama.cpp's imatrix: a GGUF file by which
llama-quantize weights the columns of each tensor.

Source: llama.cpp's tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_file import file_layout
from mtp_checkpoints.containers.gguf_forms import Form
from mtp_checkpoints.containers.gguf_values import text, texts, u32
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.sources.files import write_bytes
from mtp_export.bundle.bundle_plan import BundlePlan


class Squares(NamedTuple):
    """Squares of the inputs of a weight, by its released name: their sums [K], fp32, over so many
    rows."""

    name: str
    sums: Tensor
    rows: int


@dataclass(frozen=True)
class Imatrix:
    """An imatrix of a model's weights, which are named as in files of an architecture.

    form_of: the form of a weight in such files, by its released name; None for one as released.
    texts: of so many at most text_tokens each, read from a file of the name data.
    """

    architecture: Architecture
    form_of: Callable[[str], Form | None]
    family: ModelSpec
    data: str
    texts: int
    text_tokens: int

    @classmethod
    def of(cls, plan: BundlePlan, data: str, count: int, text_tokens: int) -> Imatrix:
        """Return that of a plan's model (UnsupportedError for one that llama.cpp has no names
        or no keys for)."""
        model_type = str(plan.checkpoint.config["model_type"])
        if model_type not in ARCHITECTURE_OF:
            raise UnsupportedError(
                "An imatrix has names of llama.cpp, and none are known for this model",
                where=plan.checkpoint.path,
                expected=f"a model_type of {', '.join(sorted(ARCHITECTURE_OF))}",
                found=model_type,
                todo="Leave --imatrix out",
            )
        architecture, family = ARCHITECTURE_OF[model_type], plan.family
        keys = architecture.keys(family, 1) if architecture.forms else {}
        form_of = architecture.form_in(keys, family.mtp_layers[0])
        return cls(architecture, form_of, family, data, count, text_tokens)

    def write(self, path: Path, squares: Iterable[Squares]) -> None:
        """Write the file whole or not at all (IoError): of every tensor of a file its sums [n, K]
        and counts [n, 1], fp32, where n counts the experts that it merges."""
        of_tensor = defaultdict[str, dict[int, Squares]](dict)
        for one in chain.from_iterable(map(self._in_file, squares)):
            place = self.architecture.place(one.name, mtp_layer=self.family.mtp_layers[0])
            assert place is not None, f"{one.name} is no tensor of {self.architecture.name}"
            of_tensor[place.name][place.expert or 0] = one
        values = dict[str, Tensor]()
        for name, experts in sorted(of_tensor.items()):
            own = [experts[number] for number in range(len(experts))]
            values[f"{name}.in_sum2"] = torch.stack([one.sums for one in own])
            values[f"{name}.counts"] = torch.tensor([[float(one.rows)] for one in own])
        write_bytes(path, self._content(values))

    def _in_file(self, one: Squares) -> list[Squares]:
        """Return the squares of a weight's inputs as files have the weight: in the order of their
        columns, and for each tensor that they split it into."""
        form = self.form_of(one.name)
        if form is None:
            return [one]
        if form.columns is not None:
            one = one._replace(sums=one.sums[torch.from_numpy(form.columns.released())])
        layer = one.name.partition("linear_attn.")[0]
        names = [f"{layer}{part}.weight" for part, _ in form.parts] or [one.name]
        return [one._replace(name=name) for name in names]

    def _content(self, values: Mapping[str, Tensor]) -> bytes:
        keys = {
            "general.type": text("imatrix"),
            "imatrix.datasets": texts([self.data]),
            "imatrix.chunk_count": u32(self.texts),
            "imatrix.chunk_size": u32(self.text_tokens),
        }
        tensors = [OutputTensor(n, DType.F32, tuple(v.shape)) for n, v in values.items()]
        layout = file_layout(keys, tensors)
        content = bytearray(layout.size_bytes)
        content[: len(layout.head)] = layout.head
        for name, place in layout.places.items():
            content[place.start : place.stop] = values[name].contiguous().numpy().tobytes()
        return bytes(content)
