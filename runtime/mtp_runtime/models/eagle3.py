"""EAGLE-3 draft of a DeepSeek target: a layer over the embedding of the next token and the joined
inputs of several of the target's layers, and a head over some of the target's tokens.

Made of tensors by name, as they are stored: of parameters all but attention over a cache records
gradients, so that it trains where attention is computed from Mla's projections.

Source: Li et al., EAGLE-3 (arXiv 2503.01840); vLLM's deepseek_eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.eagle3 import TARGET_MASK, TARGET_OFFSETS, Eagle3Family, own_name
from mtp_checkpoints.quantization.mismatches import StoredTensor, compare
from mtp_kernels.decoder import ModuleInputs, RowStep
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.tensor_parallel import ALONE, TensorParallel
from mtp_runtime.loading.draft_folder import DraftFolder, DraftTensor, layout_on_disk, values_of
from mtp_runtime.loading.held_source import HeldSource
from mtp_runtime.models.execution import DraftModule, Head, Outputs
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import layer_type, load_layer
from mtp_runtime.models.model import Model

Tensors = Mapping[str, DraftTensor]


@dataclass(frozen=True)
class ReducedHead(Head):
    """Norm and projection to some of the target's tokens, whose ids [Vd] ascend; all others have no
    probability."""

    tokens: torch.Tensor
    vocab: int

    @property
    def token_ids(self) -> torch.Tensor:
        return self.tokens

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [T, vocab] of rows that passed the norm."""
        drafted = super().logits(normed)
        none = drafted.new_full((len(drafted), self.vocab), -torch.inf)
        return none.index_copy(1, self.tokens, drafted)

    def best(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the best token [T] of rows that passed the norm."""
        return self.tokens[super().best(normed)]


@dataclass(frozen=True)
class Eagle3Module(DraftModule):
    """The draft.

    It is fed the tapped states of the target's row, joined, and the embedding of the next token; a
    further draft is fed its own output instead of the joined states, behind the norm where
    norm_output is True. The attention of its layer is given [embedding | state], both normed.
    """

    joining: Linear  # [taps * d] -> [d]
    tap_norms: tuple[RmsNorm, ...]
    norm_before_residual: bool
    norm_output: bool

    @property
    def recycles_normed(self) -> bool:
        return self.norm_output

    def make(self) -> object:
        return super().make(), self.joining_of_taps, self.normed_taps

    @cached_property
    def joining_of_taps(self) -> RowStep:
        """The joining of taps, as it is run."""
        return self.execution.linear(self.joining)

    @cached_property
    def normed_taps(self) -> tuple[RowStep, ...]:
        """The norms of taps, as they are run."""
        return tuple(map(self.execution.norm, self.tap_norms))

    @cached_property
    def inputs(self) -> ModuleInputs:
        return ModuleInputs(
            self.execution.norm(self.embedding_norm),
            self.execution.norm(self.hidden_norm),
            projection=None,
            normed_residual=self.norm_before_residual,
        )

    def combined(self, taps: torch.Tensor) -> torch.Tensor:
        """Join the inputs of the target's tapped layers [T, taps * d] to one state [T, d]."""
        if self.tap_norms:
            parts = [part.contiguous() for part in taps.chunk(len(self.tap_norms), dim=-1)]
            normed = [norm(part) for norm, part in zip(self.normed_taps, parts, strict=True)]
            taps = torch.cat(normed, dim=-1)
        return self.joining_of_taps(taps)


def eagle3_module(
    family: Eagle3Family, tensors: Tensors, target: Model, parallel: TensorParallel = ALONE
) -> Eagle3Module:
    """Make a draft of tensors by the family's names; what is absent is the target's.

    It is run as the target is. Beside a target that torch runs, gradients reach tensors in memory
    that require them, so that a draft in training is made anew after each step. parallel: the ranks
    that divide it as they do the target; each calls this.
    Raises UnsupportedError for an activation or a scaling that is not computed.
    """
    source = HeldSource.of(
        tensors, target.dtype, target.device, parallel, packs=target.execution.packs
    )
    loader = LayerLoader(source, family.facts, family.facts.max_positions)
    for part in (family.layer.attention, family.layer.feed_forward):
        layer_type(part)
    local_embedding = weight_name(family.embedding)
    layer = replace(load_layer(loader, family.layer), input_norm=None)
    return Eagle3Module(
        joining=source.column_parallel(family.projection),
        tap_norms=tuple(map(loader.norm, family.fc_norms)),
        embedding=source.embedding(local_embedding)
        if local_embedding in tensors
        else target.embedding,
        embedding_norm=loader.norm(family.layer.input_norm),
        hidden_norm=loader.norm(family.hidden_norm),
        norm_before_residual=family.norm_before_residual,
        layer=layer,
        head=_head(loader, family, tensors, target),
        norm_output=family.norm_output,
    )


def _head(loader: LayerLoader, family: Eagle3Family, tensors: Tensors, target: Model) -> Head:
    is_local, execution = weight_name(family.head) in tensors, target.execution
    outputs = target.head.outputs
    if is_local:
        outputs = Outputs(loader.source.head(family.head), execution)
    norm = loader.norm(family.norm)
    if TARGET_OFFSETS not in tensors:
        return Head(norm, outputs)
    tokens = target_tokens(values_of(tensors[TARGET_OFFSETS])).to(target.device)
    return ReducedHead(norm, outputs, tokens=tokens, vocab=target.config.vocab)


def target_tokens(offsets: torch.Tensor) -> torch.Tensor:
    """Return the target's token of every draft id [Vd], given d2t: id k is token k + d2t[k]."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def checked_tensors(draft: DraftFolder, family: Eagle3Family) -> dict[str, DraftTensor]:
    """Return a folder's tensors by the family's names.

    Raises InvalidInputError for one that config.json does not promise, or that contradicts it, and
    for a d2t that names no ascending tokens, or others than t2d.
    """
    tensors = {own_name(name): tensor for name, tensor in draft.tensors.items()}
    promised = [
        StoredTensor(spec.name, spec.shape, spec.dtypes, optional=spec.optional)
        for spec in family.tensors.values()
    ]
    problems = compare({name: layout_on_disk(one) for name, one in tensors.items()}, promised)
    if problems:
        problems[0].raise_as_error(draft.path, len(problems) - 1)
    if TARGET_OFFSETS in tensors:
        _check_vocabulary(draft, tensors, family.vocab)
    return tensors


def _check_vocabulary(draft: DraftFolder, tensors: Tensors, vocab: int) -> None:
    tokens = target_tokens(values_of(tensors[TARGET_OFFSETS]))
    ascending = bool((tokens[1:] > tokens[:-1]).all())
    if not ascending or int(tokens[0]) < 0 or int(tokens[-1]) >= vocab:
        raise InvalidInputError(
            f"Tensor {TARGET_OFFSETS} of the draft does not name ascending tokens",
            where=draft.path,
            expected=f"k + {TARGET_OFFSETS}[k] ascending from 0 to {vocab - 1}",
            found=f"{int(tokens.min())} to {int(tokens.max())}",
            todo="It holds offsets, not the tokens themselves: get the draft again",
        )
    mask = tensors.get(TARGET_MASK)
    if mask is not None and not torch.equal(values_of(mask).nonzero()[:, 0], tokens):
        raise InvalidInputError(
            f"Tensors {TARGET_OFFSETS} and {TARGET_MASK} of the draft name different tokens",
            where=draft.path,
            expected=f"the {int(values_of(mask).sum())} tokens of {TARGET_MASK}",
            found=f"{len(tokens)} tokens, the first of them {int(tokens[0])}",
            todo="One of them is shifted or of another draft: get the draft again",
        )
