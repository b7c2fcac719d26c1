"""Main layers whose routed experts do not all fit into memory: compiled kernels have those that
were used last, and the others are read from their files."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.spec import ModelSpec
from mtp_kernels import decoder as kernels
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.linear import Linear, UnreadWeight
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.models.compiled import CompiledExecution, CompiledLayers, DeltaLayers, kind_of
from mtp_runtime.models.execution import Execution, Layers
from mtp_runtime.models.packing import Rows, Shared, experts_of, weights_of

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu import Backend
    from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache


@dataclass(frozen=True)
class OffloadedExecution(CompiledExecution):
    """Packs main layers but for their routed experts, which a cache reads when rows pick them."""

    cache: ExpertCache = field(kw_only=True)

    @classmethod
    def of(
        cls, others: Execution, spec: ModelSpec, size_bytes: int, pool: Executor
    ) -> OffloadedExecution:
        """Have experts take so many bytes, read by threads of a pool; other parts of the model are
        run by kernels too."""
        assert isinstance(others, CompiledExecution), "kernels keep experts in a cache"
        routed = (layer.feed_forward for layer in spec.layers)
        picked = [
            part.router.routing.experts_per_token for part in routed if isinstance(part, parts.Moe)
        ]
        maker = cast("Backend", others.backend)
        cache = maker.expert_cache(size_bytes, max(picked, default=0), pool)
        return cls(others.backend, cache=cache)

    def opened_cache(self) -> ExpertCache:
        """Return the cache, with its memory, once all layers were packed."""
        self.cache.open()
        return self.cache

    def packed(self, shared: Shared, layers: Iterable[DecoderLayer]) -> Layers:
        backend, packed = cast("Backend", self.backend), []
        for layer in layers:
            packed.append(backend.pack_offloaded(_offloaded(layer), self.cache))
            shared = shared.with_routing_of(layer)
        if isinstance(shared.config, kernels.DeltaConfig):
            return DeltaLayers(backend.offloaded_nets(shared.config, packed, self.cache))
        config, rope = shared.of_attention
        return CompiledLayers(backend.offloaded_decoder(config, packed, rope, self.cache))

    def _run(self, shared: Shared | None, layers: Iterable[DecoderLayer]) -> Layers:
        if shared is None:
            kind = kind_of(next(iter(layers)))
            raise UnsupportedError(
                "Only the compiled kernels keep a part of the experts in memory, and they do not"
                " run every layer of this model",
                found=f"attention {kind.attention}, feed-forward {kind.feed_forward}",
                todo="Leave --max-memory out, or give contexts of fewer tokens by --max-model-len",
            )
        return super()._run(shared, layers)


def _offloaded(layer: DecoderLayer) -> kernels.LayerWeights | kernels.OffloadedLayer:
    """Return a layer as kernels take it, routed experts apart."""
    feed_forward = layer.feed_forward
    experts = experts_of(feed_forward)
    if not isinstance(feed_forward, Moe):
        return weights_of(layer, experts)
    routed = experts[: feed_forward.routed_experts]
    weights = weights_of(layer, experts[feed_forward.routed_experts :], like=routed[0])
    return kernels.OffloadedLayer(weights, _routed(routed))


def _routed(experts: Sequence[Mlp]) -> kernels.RoutedExperts:
    """Return experts whose files are read whenever they are packed."""

    def matrices(number: int) -> tuple[kernels.Matrix, kernels.Matrix]:
        expert = experts[number]
        return Rows.stacked([expert.gate_up]), Rows.stacked([expert.down])

    def form(number: int) -> Hashable:
        return tuple(_form(linear) for linear in (experts[number].gate_up, experts[number].down))

    return kernels.RoutedExperts(len(experts), matrices, form)


def _form(linear: Linear) -> Hashable:
    """Return what linears have in common that take equally much memory."""
    form = linear.weight.form if isinstance(linear.weight, UnreadWeight) else None
    return form, tuple(linear.weight.shape)
