"""Parallel heads: bodies over one hidden state of the target, and projections to its vocabulary.

Made of tensors by name, as they are stored, and run as the target is. Beside a target that torch
runs they record the gradients of parameters, and so train.

Source: Stern et al., Blockwise Parallel Decoding (arXiv 1811.03115); Cai et al., Medusa (arXiv
2401.10774); Gloeckle et al., Better & Faster Large Language Models (arXiv 2404.19737).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import TensorMaker
from mtp_checkpoints.families.parallel_heads import (
    Body,
    HeadsLayout,
    implied_config,
    layout_of,
    released_name,
)
from mtp_checkpoints.quantization.mismatches import StoredTensor, compare
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import RowStep
from mtp_runtime.cache import Cache, JoinedCaches, PageAllocator
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.tensor_parallel import ALONE, TensorParallel
from mtp_runtime.loading.draft_folder import DraftFolder, DraftTensor, layout_on_disk
from mtp_runtime.loading.held_source import HeldSource
from mtp_runtime.models.attention_types import check_chooses
from mtp_runtime.models.execution import Execution, Head, Layers, Outputs, TorchExecution
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import load_layer
from mtp_runtime.models.model import Model

Tensors = Mapping[str, DraftTensor]
_FLOATS = (DType.BF16, DType.F16, DType.F32)
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "relu": F.relu}


@dataclass(frozen=True)
class Affine:
    """x @ weight.T + bias, without a bias where there is none."""

    linear: RowStep
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Block:
    """A residual block: x + act(up(x)), or x + down(act(up(x))) where there is a second matrix."""

    up: Affine
    down: Affine | None
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = _ACTIVATIONS[self.activation](self.up(x))
        return x + (inner if self.down is None else self.down(inner))


Blocks = tuple[tuple[Block, ...], ...]  # by head


@dataclass(frozen=True)
class FfnHeads:
    """Heads of residual blocks over the target's hidden state after its last norm.

    projections: one for all heads, or one each; their norms are not applied.
    """

    blocks: Blocks
    projections: tuple[Head, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def bodies(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of each head's blocks [k, T, d] for states [T, d]."""
        return run_blocks(self.blocks, hidden)

    def new_cache(self, pages: PageAllocator) -> JoinedCaches:
        """Make no cache: the heads take one state."""
        return JoinedCaches(())

    def logits(self, bodies: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [k, T, vocab] of the bodies [k, T, d] of the first k heads."""
        if len(self.projections) == 1:
            rows = self.projections[0].logits(bodies.flatten(0, 1))
            return rows.view(*bodies.shape[:2], -1)
        pairs = zip(self.projections, bodies, strict=False)
        return torch.stack([head.logits(x) for head, x in pairs])

    def best(self, bodies: torch.Tensor) -> torch.Tensor:
        """Return the best token [k, T] of the bodies [k, T, d] of the first k heads."""
        if len(self.projections) == 1:
            return self.projections[0].best(bodies.flatten(0, 1)).view(bodies.shape[:2])
        pairs = zip(self.projections, bodies, strict=False)
        return torch.stack([head.best(x) for head, x in pairs])


def run_blocks(blocks: Blocks, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of each head's blocks [k, T, d] for states [T, d]."""
    outputs = []
    for head_blocks in blocks:
        x = hidden
        for block in head_blocks:
            x = block(x)
        outputs.append(x)
    return torch.stack(outputs)


@dataclass(frozen=True)
class LayerHeads:
    """Heads that are decoder layers beside the target's last one, under its norm and head."""

    layers: tuple[Layers, ...]
    target: Model

    def __len__(self) -> int:
        return len(self.layers)

    def new_cache(self, pages: PageAllocator) -> JoinedCaches:
        """Make a cache with room for all pages."""
        spec = pages.spec(self.target.dtype, self.target.device)
        return JoinedCaches(tuple(layer.new_cache(spec) for layer in self.layers))

    def bodies(self, x: torch.Tensor, cache: JoinedCaches, layout: BatchLayout) -> torch.Tensor:
        """Return each layer's output [k, T, d] for the input [T, d] of the target's last layer."""
        parts: Sequence[Cache] = cache.parts
        pairs = zip(self.layers, parts, strict=True)
        return torch.stack(
            [layer(x.clone(), layer_cache, ForwardPass(layout)) for layer, layer_cache in pairs]
        )

    def logits(self, bodies: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [k, T, vocab] of the bodies [k, T, d] of the first k heads."""
        head = self.target.head
        rows = head.logits(head.normed(bodies.flatten(0, 1)))
        return rows.view(*bodies.shape[:2], -1)

    def best(self, bodies: torch.Tensor) -> torch.Tensor:
        """Return the best token [k, T] of the bodies [k, T, d] of the first k heads."""
        head = self.target.head
        return head.best(head.normed(bodies.flatten(0, 1))).view(bodies.shape[:2])


@dataclass(frozen=True)
class StoredHeads:
    """Tensors of heads by vLLM's names, with what they are; parallel: the ranks that divide them as
    they do the target, each of which makes its own part."""

    layout: HeadsLayout
    tensors: Tensors
    parallel: TensorParallel = ALONE

    @classmethod
    def of(cls, draft: DraftFolder, target: Model, parallel: TensorParallel = ALONE) -> StoredHeads:
        """Take a folder's tensors, in any known layout.

        Raises InvalidInputError for a tensor of none, and for heads that are damaged or of another
        target.
        """
        tensors = {
            released_name(name, draft.config): tensor for name, tensor in draft.tensors.items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        config = implied_config(draft.tensors, draft.config)
        layout = layout_of(shapes, config, target.config.vocab)
        if layout.hidden != target.config.hidden:
            raise InvalidInputError(
                "The heads were made for another target",
                where=draft.path,
                expected=f"hidden states of {target.config.hidden} elements",
                found=layout.hidden,
            )
        return cls(layout, tensors, parallel)

    def ffn(self, target: Model) -> FfnHeads:
        """Make heads of residual blocks."""
        assert self.layout.body is Body.FFN, "the caller looked"
        alone = self.parallel.group.is_one
        # Ranks join their parts of each product, which torch makes.
        execution = target.execution if alone else TorchExecution()
        source = self._source(execution, target, self.tensors)
        blocks = tuple(
            tuple(
                self._block(f"blocks.{head}.layers.{number}", source, execution)
                for number in range(self.layout.blocks)
            )
            for head in range(self.layout.heads)
        )
        if self.layout.own_projections:
            names = [f"lm_heads.{head}" for head in range(self.layout.heads)]
        elif self.layout.stored_projection:
            names = ["lm_head"]
        else:
            return FfnHeads(blocks, (target.head,))
        heads = self._source(target.execution, target, self.tensors)
        outputs = [Outputs(heads.head(name), target.execution) for name in names]
        return FfnHeads(
            blocks, tuple(replace(target.head, outputs=projection) for projection in outputs)
        )

    def layers(self, target: Model, folder: Path) -> LayerHeads:
        """Make heads that are layers like the target's last one, with its names; folder: where the
        target's config.json is.

        Raises InvalidInputError for tensors that are not those of such a layer, UnsupportedError
        for a layer that takes the tokens to attend to from the one before.
        """
        spec = family_of(read_json_object(folder / CONFIG_NAME))
        facts, last, positions = spec.facts, spec.layers[-1], target.config.max_positions
        check_chooses(last, positions)
        promised = [
            StoredTensor(tensor.name, tensor.shape, _FLOATS)
            for tensor in last.tensors(facts.hidden, TensorMaker(facts.dtype))
        ]
        heads = []
        for head in range(self.layout.heads):
            prefix = f"extra_heads.{head}"
            tensors = {
                last.prefix + name.removeprefix(prefix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(f"{prefix}.")
            }
            problems = compare({n: layout_on_disk(t) for n, t in tensors.items()}, promised)
            if problems:
                problems[0].raise_as_error(prefix, len(problems) - 1)
            source = self._source(target.execution, target, tensors)
            loader = LayerLoader(source, facts, positions)
            heads.append(target.execution.layers([load_layer(loader, last)]))
        return LayerHeads(tuple(heads), target)

    def _block(self, name: str, source: HeldSource, execution: Execution) -> Block:
        activation = self.layout.activation
        if not self.layout.inner:
            whole = execution.linear(source.column_parallel(name))
            return Block(Affine(whole, self._bias(name, source)), None, activation)
        up, down = f"{name}.up", f"{name}.down"
        parts = source.split.nonempty_parts(source.shape(up)[0], "outputs")
        local, bias = parts[source.split.rank], self._bias(up, source)
        local_bias = None if bias is None else bias[local.start : local.stop]
        inner = Affine(execution.linear(source.linear(up, local)), local_bias)
        joined = execution.linear(source.row_parallel(down, parts))
        return Block(inner, Affine(joined, self._bias(down, source)), activation)

    def _bias(self, name: str, source: HeldSource) -> torch.Tensor | None:
        return source.tensor(f"{name}.bias") if self.layout.biases else None

    def _source(self, execution: Execution, target: Model, tensors: Tensors) -> HeldSource:
        """Return tensors for an execution."""
        return HeldSource.of(
            tensors, target.dtype, target.device, self.parallel, packs=execution.packs
        )
