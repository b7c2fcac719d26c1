"""A decoder-only model with MTP modules: hidden states and logits at every row of a ragged batch.

The layers may be of any kind and run by torch or by compiled kernels; see MODELS for the models.

Source: DeepSeek-V3 technical report, sections 2.1 and 2.2; the released weights concatenate
[embedding, hidden], the other way round than the report prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import ModuleInputs
from mtp_runtime.cache import Cache, JoinedCaches, PageAllocator
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.sandwich_layer import PerLayerEmbeddings
from mtp_runtime.models.draft_cost import DraftCost
from mtp_runtime.models.execution import DraftModule, Execution, Head, Layers


@dataclass(frozen=True)
class MtpModule(DraftModule):
    """One MTP layer: a later token's embedding and a hidden state in, the token after it out.

    Module m (from 0) takes at position i token i+m+1 and the hidden state of position i: the
    target's where m is 0, else module m-1's output. It drafts token i+m+2. usual_contract is the
    family's, contract the one that the module is run by.
    """

    projection: Linear
    contract: MtpContract
    usual_contract: MtpContract

    @property
    def recycles_normed(self) -> bool:
        return self.contract.recycled_hidden is Hidden.AFTER_NORM

    @cached_property
    def inputs(self) -> ModuleInputs:
        return ModuleInputs(
            self.execution.norm(self.embedding_norm),
            self.execution.norm(self.hidden_norm),
            self.execution.linear(self.projection),
        )

    def joined(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded = self.embedding(next_tokens)
        if self.contract.zero_first_embedding:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        return self.inputs.joined(embedded, hidden)


@dataclass(frozen=True)
class States:
    """Hidden states of rows [T, d]: before and after the last norm, and the inputs of the tapped
    layers side by side [T, taps * d], None without taps."""

    before: torch.Tensor
    after: torch.Tensor
    taps: torch.Tensor | None = None


@dataclass(frozen=True)
class ModelCache:
    """Cache of a model's main layers, and one of each of its MTP modules."""

    main: Cache
    mtp: tuple[Cache, ...] = ()

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return (tensor for cache in (self.main, *self.mtp) for tensor in cache.tensors)

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        return (block for cache in (self.main, *self.mtp) for block in cache.blocks)

    @property
    def states(self) -> Iterable[torch.Tensor]:
        return (tensor for cache in (self.main, *self.mtp) for tensor in cache.states)


@dataclass(frozen=True)
class Model:
    """The main model, and the MTP modules that were loaded with it, in order of depth.

    taps are main layers, ascending and none of them the first, whose inputs are kept. draft_cost:
    of the modules' drafts, by the bytes that steps touch, where that is known. per_layer: what
    layers are given of tokens beside the stream, None in most models.
    """

    config: ModelConfig
    embedding: Embedding
    layers: Layers
    head: Head
    mtp_modules: tuple[MtpModule, ...] = ()
    taps: tuple[int, ...] = ()
    draft_cost: DraftCost | None = None
    per_layer: PerLayerEmbeddings | None = None

    def tapped(self, taps: Sequence[int]) -> Model:
        """Return the model, its weights shared, with the inputs of some layers in its states."""
        return replace(self, taps=tuple(taps))

    def make(self) -> tuple[object, ...]:
        """Make the parts that are otherwise made when they are first used: their files are read."""
        return self.head.projected, *(module.make() for module in self.mtp_modules)

    @cached_property
    def _runs(self) -> tuple[Layers, ...]:
        """Main layers, cut at the taps."""
        cuts = (0, *self.taps, len(self.layers))
        return tuple(self.layers.part(*cut) for cut in pairwise(cuts))

    @property
    def mtp(self) -> MtpModule | None:
        """The module of the first draft."""
        return self.mtp_modules[0] if self.mtp_modules else None

    @property
    def execution(self) -> Execution:
        """Execution of the model's parts, and of what is made beside it."""
        return self.head.execution

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and caches."""
        return self.embedding.dtype

    def new_cache(self, pages: PageAllocator) -> ModelCache:
        """Make a cache with room for all pages."""
        spec = pages.spec(self.dtype, self.device)
        main = JoinedCaches(tuple(run.new_cache(spec) for run in self._runs))
        return ModelCache(main, tuple(module.new_cache(pages) for module in self.mtp_modules))

    def __call__(
        self,
        tokens: torch.Tensor,  # [T]
        cache: ModelCache,
        layout: BatchLayout,
    ) -> States:
        """Return the hidden states of every row."""
        assert isinstance(cache.main, JoinedCaches), "the cache that new_cache made"
        x = self.embedding(tokens)
        forward = ForwardPass(layout, per_layer=self.beside(tokens, x))
        kept = x.new_empty(len(x), len(self.taps), x.shape[1])
        for number, (run, run_cache) in enumerate(zip(self._runs, cache.main.parts, strict=True)):
            if number:
                kept[:, number - 1] = x  # a run may overwrite it
            x = run(x, run_cache, forward)
        return States(x, self.head.normed(x), kept.flatten(1) if self.taps else None)

    def beside(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Return what layers are given of tokens [T] beside the stream, which begins with
        their embeddings [T, d]."""
        return None if self.per_layer is None else self.per_layer(tokens, embedded)

    def mtp_input(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Return the side of the last norm that the first MTP module is fed with."""
        if self.mtp is None or self.mtp.contract.target_hidden is Hidden.AFTER_NORM:
            return after
        return before
