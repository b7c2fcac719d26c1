"""Cost of drafts by the bytes of weights that they touch, from headers alone: decoding takes as
long as memory, or a disk, gives what it multiplies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_runtime.models.expert_memory import MatrixMemory

_HALVINGS = 30  # of the interval in which an acceptance lies


@dataclass(frozen=True)
class Routed:
    """Routed experts of one layer: their bytes, and the share of them that a row picks."""

    held_bytes: int
    picked: float

    def touched_bytes(self, rows: int) -> float:
        """Return the expected bytes of those that any of some rows picks, where each row picks as
        if by chance. Rows of one text pick some experts together, so that this is rather many."""
        return self.held_bytes * (1.0 - (1.0 - self.picked) ** rows)


@dataclass(frozen=True)
class Touched:
    """Weights that a pass touches: fixed_bytes whatever its rows are, and what they pick."""

    fixed_bytes: int
    routed: tuple[Routed, ...] = ()

    def by(self, rows: int) -> float:
        """Return the expected bytes of a pass over some rows."""
        return self.fixed_bytes + sum(layer.touched_bytes(rows) for layer in self.routed)


@dataclass(frozen=True)
class DraftCost:
    """Bytes of a step of the target, and of one draft by the first MTP layer.

    v and c are what `verify` measures: a step that verifies k drafts of each request, and one draft
    of each, over a step of plain decoding.
    """

    target: Touched
    draft: Touched

    def v(self, k: int, batch: int = 1) -> float:
        """Return the bytes of a step that verifies k drafts over those of one without."""
        return self.target.by(batch * (k + 1)) / self.target.by(batch)

    def c(self, batch: int = 1) -> float:
        """Return the bytes of one draft over those of a step without."""
        return self.draft.by(batch) / self.target.by(batch)

    def step(self, k: int, batch: int = 1) -> float:
        """Return the bytes of k drafts and the step that verifies them over those of one without:
        the tokens that such a step has to yield, lest it be slower."""
        return self.v(k, batch) + k * self.c(batch)

    def needed_acceptance(self, k: int) -> float | None:
        """Return the acceptance of every draft from which k of them are faster than none for one
        request, 1 + a + ... + a^k = v + k c; None where not even k accepted drafts are."""
        cost, low, high = self.step(k), 0.0, 1.0
        if cost >= k + 1:
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = sum(middle**place for place in range(k + 1)) >= cost
            low, high = (low, middle) if enough else (middle, high)
        return high

    @property
    def read(self) -> DraftCost:
        """The cost by what is read from disk where the main layers' routed experts are there, and
        none that a step picks is in memory."""
        return DraftCost(Touched(0, self.target.routed), Touched(0))

    @classmethod
    def of(cls, spec: ModelSpec, matrices: Mapping[str, MatrixMemory]) -> DraftCost | None:
        """Add up the matrices that passes touch, given by their names; None where those of MTP
        layers are not among them."""
        embeddings = {weight_name(spec.embedding)}
        embeddings |= {weight_name(m.modules.embedding) for m in spec.mtp if m.modules.embedding}
        beginnings = [tuple(f"{name}." for name in mtp.names) for mtp in spec.mtp]
        drafting = [{name for name in matrices if name.startswith(own)} for own in beginnings]
        if not any(drafting):
            return None
        head = weight_name(spec.head)
        read = matrices.keys() - embeddings | {head}  # which may be the embedding
        own_head = spec.mtp[0].own_head or spec.mtp[0].modules.head
        has_own = own_head is not None and weight_name(own_head) in matrices
        draft = read & drafting[0] | (set() if has_own else {head})
        return cls(
            _touched(read.difference(*drafting), spec.layers, matrices),
            _touched(draft, [spec.mtp[0].layer], matrices),
        )


def _touched(
    names: Collection[str], layers: Sequence[LayerSpec], matrices: Mapping[str, MatrixMemory]
) -> Touched:
    """Divide matrices of these names into the routed experts of layers and all others."""
    routed = tuple(_routed(layer, matrices) for layer in layers if _is_sparse(layer))
    all_bytes = sum(matrices[name].held_bytes for name in names)
    return Touched(all_bytes - sum(layer.held_bytes for layer in routed), routed)


def _is_sparse(layer: LayerSpec) -> bool:
    return isinstance(layer.feed_forward, parts.Moe | parts.UngatedMoe)


def _routed(layer: LayerSpec, matrices: Mapping[str, MatrixMemory]) -> Routed:
    part = layer.feed_forward
    assert isinstance(part, parts.Moe | parts.UngatedMoe)
    modules = part.modules(layer.feed_forward_prefix)
    names = map(weight_name, chain.from_iterable(modules.experts))
    held = sum(matrices[name].held_bytes for name in names)
    return Routed(held, part.router.routing.experts_per_token / part.experts)
