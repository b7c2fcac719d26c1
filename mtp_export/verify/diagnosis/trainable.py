"""A main model of few layers in memory, whose tensors autograd follows: the likelihood of texts
under it, as a function of any tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.formats import unquantized
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import with_parts
from mtp_export.verify.diagnosis.experts import SHARED
from mtp_export.verify.diagnosis.layer_variants import WORDS, half_of
from mtp_export.verify.diagnosis.tensor_variants import (
    Place,
    held,
    layer_places,
    mlp_places,
    of_rate,
    rate_of,
)
from mtp_runtime.layers.decoder_layer import DecoderLayer, PostNormLayer
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Halves, StoredHalves
from mtp_runtime.layers.moe import HeldExperts, Mlp, Moe
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.models.execution import Head, Outputs, TorchExecution
from mtp_runtime.streaming import StreamedModel
from mtp_runtime.training.whole_texts import attend_over, takes_whole_texts

FEED_FORWARD = "feed_forward"
EMBEDDING, HEAD = "embedding", "head"  # before the layers, and behind them
_OF_ENDS = {EMBEDDING: "the embedding", HEAD: "the last norm (model.norm) and the head"}
Part = tuple[Tensor, tuple[slice, ...]]


def as_they_are(held: Tensor) -> Tensor:
    """Return a tensor."""
    return held


@dataclass(frozen=True, eq=False)
class Spot:
    """A tensor of half a layer, and the parts of what holds it in memory. offset: what is added to
    a norm when it is read."""

    layer: int
    half: str
    place: Place
    parts: tuple[Part, ...]
    offset: float = 0.0

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return its rows [n, m], or elements [n], as they are stored."""
        held = self._held(as_they_are)
        if self.place.is_rate:
            return of_rate(held)
        return held - self.offset if self.offset else held

    @torch.no_grad()
    def slope(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the slope at its values. of: returns that of what holds it."""
        slope = self._held(of)
        return slope * self._held(as_they_are) if self.place.is_rate else slope

    def _held(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        first, *more = (of(held)[where] for held, where in self.parts)
        if more:  # keys' and values' rows of each head
            return torch.cat([first, more[0].transpose(1, 2)], dim=1).flatten(0, 1)
        return first.t() if self._is_turned else first

    @torch.no_grad()
    def put(self, values: Tensor) -> None:
        """Write other values in its place."""
        if self.place.is_rate:
            values = rate_of(values)
        elif self.offset:
            values = values + self.offset
        first, *more = (held[where] for held, where in self.parts)
        if more:
            by_head = values.view(len(first), -1, values.shape[1])
            first.copy_(by_head[:, : first.shape[1]])
            more[0].copy_(by_head[:, first.shape[1] :].transpose(1, 2))
        else:
            first.copy_(values.t() if self._is_turned else values)

    @property
    def _is_turned(self) -> bool:
        return len(self.parts[0][1]) == 2  # a matrix [in, out]


@dataclass(frozen=True)
class Ends:
    """The embedding, a linear of tokens [vocab, d], before the layers, and the head behind them.
    is_tied: the embedding is the head's matrix."""

    table: Linear
    head: Head
    is_tied: bool

    @property
    def rows(self) -> Tensor:
        """The embeddings [vocab, d] of all tokens."""
        return self.table.matrix(torch.float32).t()

    @property
    def last(self) -> Head:
        """The head, of the embedding that there is."""
        return _with_matrix(self.head, self.table) if self.is_tied else self.head

    def places(self, half: str) -> Iterator[Place]:
        """Yield the tensors of an end."""
        return (p for p in _PLACES[half] if p.path != _MATRIX or not self.is_tied)


_MATRIX = ("head", "outputs", "linear")
# By their half.
_PLACES = {
    EMBEDDING: (Place("the embedding", ("table",)),),
    HEAD: (
        Place(causes.LAST_NORM, ("head", "norm")),
        Place("lm_head", _MATRIX),
    ),
}


@dataclass(frozen=True)
class Trainable:
    """Layers in float32, a head, and the embedding, None where others make the rows. noun: in
    words, what halves are of."""

    noun: ClassVar[str] = "layers"

    layers: tuple[Any, ...]
    head: Head
    table: Linear | None

    @classmethod
    def of(cls, streamed: StreamedModel) -> Trainable:
        """Read a model (UnsupportedError for layers that autograd does not follow)."""
        layers = tuple(followed(streamed.layer(n)) for n in range(streamed.config.layers))
        every = torch.arange(streamed.config.vocab, device=streamed.device)
        rows, head = streamed.embedded(every).float(), in_memory(streamed.rest().head)
        table = Linear(unquantized(rows), rows.t().contiguous())
        if rows.equal(head.linear.matrix(torch.float32).t()):
            head = _with_matrix(head, table)
        return cls(layers, head, table)

    @property
    def ends(self) -> Ends:
        """The embedding and the head."""
        assert self.table is not None, "a main model"
        return Ends(self.table, self.head, is_tied=self.head.linear is self.table)

    def part(self, number: int) -> Any:
        """Return a layer by its number, and for those before the first and behind the last the
        ends."""
        return self.layers[number] if self.is_layer(number) else self.ends

    def is_layer(self, number: int) -> bool:
        """False for what is before the layers, or behind them."""
        return 0 <= number < len(self.layers)

    def where(self, number: int) -> str:
        """Return the words for a layer, or for what is before or behind the layers."""
        return causes.main_layer(number) if self.is_layer(number) else "the main model"

    def words(self, half: str) -> str:
        """Return the words for half a layer, or for an end."""
        return (WORDS | _OF_ENDS)[half]

    def harm(self, half: str) -> str:
        """Return what is wrong with a half of which training mends a part."""
        return causes.DOES_HARM

    def places(self, layer: Any) -> Iterator[tuple[str, Place]]:
        """Yield the tensors of a layer, each behind its half."""
        for place in every_place(layer):
            yield half_of(place), place

    def spots(self) -> Iterator[Spot]:
        """Yield the tensors of all layers, and of the ends."""
        for number, layer in enumerate(self.layers):
            for half, place in self.places(layer):
                yield _spot(number, half, place, layer)
        if self.table is not None:
            for number, half in ((-1, EMBEDDING), (len(self.layers), HEAD)):
                for place in self.ends.places(half):
                    yield _spot(number, half, place, self.ends)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the rows [b * s, d] of texts [b, s] before the first layer."""
        return self.ends.rows[tokens.flatten()]

    @torch.no_grad()
    def states(self, tokens: Tensor) -> list[Tensor]:
        """Return the rows [b * s, d] of texts [b, s] before each layer, and behind the last."""
        found = [self.embedded(tokens)]
        for layer in self.layers:
            found.append(self.through(layer, found[-1], tokens))
        return found

    def through(self, layer: Any, x: Tensor, tokens: Tensor) -> Tensor:
        """Take rows x [b * s, d] of texts [b, s] through a layer."""
        return over_texts(layer, x, len(tokens))

    def behind(self, number: int, part: Any, x: Tensor, tokens: Tensor) -> tuple[Tensor, Head]:
        """Return the rows behind the last layer, and the head, with another part in the place of
        one, given the rows of texts before that."""
        if not isinstance(part, Ends):
            layers, head = (part, *self.layers[number + 1 :]), self.head
        elif number < 0:
            x, layers, head = part.rows[tokens.flatten()], self.layers, part.last
        else:
            layers, head = (), part.head
        for layer in layers:
            x = self.through(layer, x, tokens)
        return x, head

    def loss(
        self, first: int, x: Tensor, tokens: Tensor, temperatures: Iterable[float] = (1.0,)
    ) -> Tensor:
        """The mean loss of a token of texts [b, s], given their rows before layer `first`; none
        before the first one: at the one of some temperatures where it is least."""
        if first < 0:
            x = self.embedded(tokens)
        for layer in self.layers[max(0, first) :]:
            x = self.through(layer, x, tokens)
        kept = x.view(*tokens.shape, -1)[:, :-1].flatten(0, 1)
        logits = self.head.logits(self.head.normed(kept))
        wanted = tokens[:, 1:].flatten().to(x.device)
        return min(F.cross_entropy(logits / one, wanted) for one in temperatures)


def over_texts(layer: DecoderLayer, x: Tensor, texts: int) -> Tensor:
    """Take rows x [b * s, d] of texts of one length through a layer."""
    attended = attend_over(layer.attention, layer.normed(x), texts)
    return layer.fed_forward(layer.with_attended(x, attended))


def in_memory(head: Head) -> Head:
    """The head with tensors of its own."""
    return _with_matrix(replace(head, norm=with_parts(head.norm, in_float32)), _dense(head.linear))


def _with_matrix(head: Head, matrix: Linear) -> Head:
    return replace(head, outputs=Outputs(matrix, TorchExecution()))


def every_place(layer: DecoderLayer) -> Iterator[Place]:
    """Yield the tensors of a layer whose experts are held in memory."""
    yield from layer_places(layer)
    if isinstance(layer.attention, GatedDeltaNet):
        yield Place("A_log of the attention", ("attention", "rate"), is_rate=True)
    moe = layer.feed_forward
    if not isinstance(moe, Moe):
        return
    yield Place("the router", (FEED_FORWARD, "router", "weight"))
    for number, expert in enumerate(moe.experts.every()):
        name = f"expert {number}" if number < moe.routed_experts else SHARED
        for place in mlp_places(expert, name):
            path = (FEED_FORWARD, "experts", "held", number, *place.path)
            yield replace(place, name=f"{place.name} of {name}", path=path)


def followed(layer: DecoderLayer) -> DecoderLayer:
    """The layer with tensors of its own in float32."""
    is_plain = type(layer) in (DecoderLayer, PostNormLayer)
    is_fed = isinstance(layer.feed_forward, Mlp | Moe)
    if not (is_plain and is_fed and takes_whole_texts(layer.attention)):
        kinds = (type(one).__name__ for one in (layer, layer.attention, layer.feed_forward))
        raise UnsupportedError(
            "A layer cannot be trained",
            expected="latent or grouped-query attention to all tokens, or a gated delta net",
            found=", ".join(kinds),
        )
    found: DecoderLayer = with_parts(layer, in_float32)
    return found


def in_float32(part: Any) -> Any:
    """Return the part that takes a part's place; None for one whose parts are looked into."""
    if isinstance(part, Linear):
        return _dense(part)
    if isinstance(part, Rope):
        return part
    if isinstance(part, StoredHalves):
        return with_parts(part.dense, in_float32)
    if isinstance(part, Moe):
        held_experts = tuple(with_parts(one, in_float32) for one in part.experts.every())
        router, gate = (with_parts(one, in_float32) for one in (part.router, part.shared_gate))
        experts = HeldExperts(held_experts)
        return replace(part, router=router, shared_gate=gate, experts=experts)
    if isinstance(part, Tensor) and part.is_floating_point():
        return part.detach().float().clone()
    return None


def _dense(linear: Linear) -> Linear:
    """The linear with a matrix of its own [in, out]."""
    matrix = linear.matrix(torch.float32).detach().clone().contiguous()
    return Linear(unquantized(matrix.t()), matrix)


def _spot(number: int, half: str, place: Place, part: Any) -> Spot:
    found = held(part, place.path)
    offset = found.offset if isinstance(found, RmsNorm) else 0.0
    return Spot(number, half, place, tuple(_parts(found, place)), offset)


def _parts(part: Any, place: Place) -> Iterator[Part]:
    """Yield tensors in memory, and what of them a place is."""
    rows = slice(*place.rows)
    if isinstance(part, Linear):
        assert part.transposed is not None, "as _dense made it"
        yield part.transposed, (slice(None), rows)
    elif isinstance(part, Halves):
        yield part.key_up, ()
        yield part.value_up, ()
    else:
        yield part.weight if isinstance(part, RmsNorm) else part, (rows,)
