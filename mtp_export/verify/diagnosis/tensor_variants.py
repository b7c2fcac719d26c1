"""Single tensors of a decoder layer, times the changes of one that converters make: the layer with
one of them undone in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import ChangedWeight, InRows
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.layers.gqa import GatedGqa, Gqa, HeadGatedGqa, SlidingGqa
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Halves, Mla, StoredHalves
from mtp_runtime.layers.moe import Mlp
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.sparse_mla import SparseMla

Order = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Place:
    """A tensor: its name, the attributes, and numbers of elements, that lead to what holds it, and
    its rows in that.

    adds: what it is the last matrix of, in words, which adds to the stream; "" for others. is_rate:
    what holds it are the rates of decays, and what is stored their logarithms.
    """

    name: str
    path: tuple[str | int, ...]
    rows: tuple[int, int | None] = (0, None)
    adds: str = ""
    is_rate: bool = False


def rate_of(stored: torch.Tensor) -> torch.Tensor:
    """Return the rates of decays [n] that stored logarithms stand for."""
    return -stored.exp()


def of_rate(rate: torch.Tensor) -> torch.Tensor:
    """Return the logarithms that rates of decays [n] are stored as."""
    return (-rate).clamp_min(1e-30).log()


@dataclass(frozen=True)
class Change:
    """A change of a tensor: in words that follow "when", {} being its name, and what is wrong with
    one that is better with it.

    rows, columns: the order that they are put in. shift: added. is_flat: a vector becomes its mean.
    only_last: for what adds to the stream alone.
    """

    done: str
    wrong: str
    factor: float = 1.0
    rows: Order | None = None
    columns: Order | None = None
    shift: float = 0.0
    is_flat: bool = False
    only_last: bool = False

    @property
    def is_size(self) -> bool:
        """True where it makes a model more or less certain by itself."""
        return self.factor > 0 and self.factor != 1 or self.shift != 0


def _reversed(size: int) -> torch.Tensor:
    return torch.arange(size).flip(0)


def _halves(size: int) -> torch.Tensor:
    return torch.arange(size).roll(size // 2)


def _apart(size: int) -> torch.Tensor:
    """Even ones first, then the odd ones."""
    return torch.cat([torch.arange(start, size, 2) for start in (0, 1)])


def _by_turns(size: int) -> torch.Tensor:
    return _apart(size).argsort()


def _times(factors: Sequence[float]) -> tuple[Change, ...]:
    return tuple(
        Change(f"{{}} is multiplied by {f:g}", causes.times(1 / f), factor=f) for f in factors
    )


# A factor between two is mended by the nearer one.
SIZES = _times((0.5, 2.0))
# Those in between, and farther ones, which tell what is off from what makes up for it.
MORE_SIZES = _times([2.0 ** (step / 2) for step in (-5, -4, -3, -1, 1, 3, 4, 5)])
NEGATED = Change("{} is negated", causes.WRONG_SIGN, factor=-1.0)
OF_MATRICES: tuple[Change, ...] = (
    NEGATED,
    Change("{} is left out", causes.DOES_HARM, factor=0.0, only_last=True),
    *SIZES,
    Change("the rows of {} are reversed", causes.ROWS_REVERSED, rows=_reversed),
    Change("the halves of the rows of {} are exchanged", causes.ROW_HALVES, rows=_halves),
    Change("the even rows of {} are put first", causes.ROWS_BY_TURNS, rows=_apart),
    Change("the halves of {} are put by turns", causes.ROWS_APART, rows=_by_turns),
    Change(
        "the columns of {} are put in reverse order", causes.COLUMNS_REVERSED, columns=_reversed
    ),
    Change("the halves of the columns of {} are exchanged", causes.COLUMN_HALVES, columns=_halves),
)
OF_VECTORS: tuple[Change, ...] = (
    Change("1 is added to the weights of {}", causes.LACKS_ONE, shift=1.0),
    Change("1 is taken from the weights of {}", causes.ONE_TOO_MUCH, shift=-1.0),
    NEGATED,
    *SIZES,
    Change("{} is reversed", causes.ELEMENTS_REVERSED, rows=_reversed),
    Change("the halves of {} are exchanged", causes.ELEMENT_HALVES, rows=_halves),
    Change("every weight of {} is their mean", causes.ELEMENTS_ELSEWHERE, is_flat=True),
)
# Those of vectors by which most others of one show: an order is worse than none at all.
SCREENED = (*SIZES, OF_VECTORS[-1])


def tensor_variants(
    whole: Any, places: Iterable[Place], changes: Sequence[Change] | None = None
) -> Iterator[tuple[Place, Change, Any]]:
    """Yield the dataclass with one change of one of its tensors undone: each that a tensor of its
    kind can have, or each of some."""
    for place in places:
        found = held(whole, place.path)
        is_vector = isinstance(found, RmsNorm | torch.Tensor)
        for change in changes or (OF_VECTORS if is_vector else OF_MATRICES):
            if place.adds or not change.only_last:
                yield place, change, replaced(whole, place.path, _changed(found, place, change))


def layer_places(layer: Any) -> Iterator[Place]:
    """Yield the tensors of a decoder layer, but for those of its experts and its router."""
    if layer.input_norm is not None:
        yield Place("input_layernorm", ("input_norm",))
    yield Place("post_attention_layernorm", ("post_norm",))
    of_attention = _ATTENTIONS.get(type(layer.attention))
    for place in () if of_attention is None else of_attention(layer.attention):
        yield replace(place, path=("attention", *place.path))
    if isinstance(layer.feed_forward, Mlp):
        for place in mlp_places(layer.feed_forward, "the feed-forward"):
            yield replace(place, path=("feed_forward", *place.path))


def decay_places(layer: Any) -> Iterator[Place]:
    """Yield the tensors that decays and betas of a layer's gated delta net are made with, of which
    what the net adds as a whole shows little."""
    if isinstance(layer.attention, GatedDeltaNet):
        for place in _decays(layer.attention):
            yield replace(place, path=("attention", *place.path))


def vectors(layer: Any) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield the vectors of a layer, as it holds them."""
    for place in layer_places(layer):
        found = held(layer, place.path)
        if isinstance(found, RmsNorm):
            yield place, found.weight
        elif isinstance(found, torch.Tensor):
            yield place, found[slice(*place.rows)]


def with_vector(layer: Any, place: Place, values: torch.Tensor) -> Any:
    """Return a layer with other values of one of its vectors."""
    found = held(layer, place.path)
    if isinstance(found, RmsNorm):
        return replaced(layer, place.path, replace(found, weight=values))
    changed = found.clone()
    changed[slice(*place.rows)] = values
    return replaced(layer, place.path, changed)


def mlp_places(mlp: Mlp, name: str) -> Iterator[Place]:
    """Yield the tensors of an MLP of this name."""
    middle = mlp.gate_up.weight.shape[0] // 2 if mlp.is_gated else 0
    if mlp.is_gated:
        yield Place("gate_proj", ("gate_up",), (0, middle))
    yield Place("up_proj", ("gate_up",), (middle, None))
    yield Place("down_proj", ("down",), adds=name)


def _latent(mla: Mla) -> Iterator[Place]:
    queries = mla.down.weight.shape[0] - mla.sizes.latent - mla.sizes.rope
    low = mla.query_up is not None
    yield Place("q_a_proj" if low else "q_proj", ("down",), (0, queries))
    yield Place("kv_a_proj_with_mqa", ("down",), (queries, None))
    if low:
        yield Place("q_a_layernorm", ("query_norm",))
        yield Place("q_b_proj", ("query_up",))
    yield Place("kv_a_layernorm", ("latent_norm",))
    yield Place("kv_b_proj", ("up",))
    yield Place("o_proj", ("output",), adds="the attention")


def _sparse(attention: SparseMla) -> Iterator[Place]:
    for place in _latent(attention.mla):
        yield replace(place, path=("mla", *place.path))


def _grouped(attention: Gqa) -> Iterator[Place]:
    queries, keys = (
        n * attention.sizes.head for n in (attention.sizes.queries, attention.sizes.kv_heads)
    )
    last = queries + keys
    places = (
        Place("q_proj", ("qkv",), (0, queries)),
        Place("k_proj", ("qkv",), (queries, last)),
        Place("v_proj", ("qkv",), (last, None)),
    )
    for place in places:
        yield place
        if attention.bias is not None:
            yield replace(place, name=f"{place.name}.bias", path=("bias",))
    if attention.query_norm is not None:
        yield Place("q_norm", ("query_norm",))
        yield Place("k_norm", ("key_norm",))
    yield Place("o_proj", ("output",), adds="the attention")


def _delta(attention: GatedDeltaNet) -> Iterator[Place]:
    channels = attention.sizes.channels
    yield Place("in_proj_qkv", ("inputs",), (0, channels))
    yield Place("in_proj_z", ("inputs",), (channels, None))
    yield Place("conv1d of the attention", ("convolution",))
    yield from _decays(attention)
    yield Place("the norm of the attention", ("norm", "weight"))
    yield Place("out_proj", ("output",), adds="the attention")


def _decays(attention: GatedDeltaNet) -> Iterator[Place]:
    heads = attention.sizes.value_heads
    yield Place("in_proj_b", ("gate_inputs",), (0, heads))
    yield Place("in_proj_a", ("gate_inputs",), (heads, None))
    yield Place("dt_bias of the attention", ("bias",))


# By the kind of attention; of one that is not listed no tensor is tried.
_ATTENTIONS: dict[type, Callable[[Any], Iterator[Place]]] = {
    Mla: _latent,
    SparseMla: _sparse,
    Gqa: _grouped,
    GatedGqa: _grouped,
    SlidingGqa: _grouped,
    HeadGatedGqa: _grouped,
    GatedDeltaNet: _delta,
}


def replaced(whole: Any, path: Sequence[str | int], part: object) -> Any:
    """Return a dataclass with another part at the end of a path."""
    if not path:
        return part
    step, *rest = path
    other = replaced(held(whole, [step]), rest, part)
    if isinstance(step, int):
        return *whole[:step], other, *whole[step + 1 :]
    return replace(whole, **{step: other})


def exchanged(whole: Any, one: Sequence[str | int], other: Sequence[str | int]) -> Any:
    """Return a dataclass with the parts at the ends of two paths in each other's place."""
    first, second = held(whole, one), held(whole, other)
    return replaced(replaced(whole, one, second), other, first)


def held(whole: Any, path: Sequence[str | int]) -> Any:
    """Return the part at the end of a path."""
    for step in path:
        whole = whole[step] if isinstance(step, int) else getattr(whole, step)
    return whole


def _changed(held: Any, place: Place, change: Change) -> Any:
    """Return a norm, a vector, a linear, or the halves of kv_b_proj, with a change at a place."""
    rows = slice(*place.rows)
    if place.is_rate:
        return rate_of(changed_vector(of_rate(held), change))
    if isinstance(held, RmsNorm):
        stored = changed_vector(held.weight - held.offset, change)
        return replace(held, weight=stored + held.offset)
    if isinstance(held, torch.Tensor):
        changed = held.clone()
        changed[rows] = changed_vector(held[rows], change)
        return changed
    if isinstance(held, Halves | StoredHalves):
        return _changed_halves(held.dense, change)
    return _changed_linear(held, rows, change)


def changed_vector(weight: torch.Tensor, change: Change) -> torch.Tensor:
    """Return a vector [n] with a change of all of it."""
    if change.is_flat:
        return weight.mean().expand_as(weight).contiguous()
    if change.rows is not None:
        weight = weight[change.rows(len(weight))]
    return weight * change.factor + change.shift


def _changed_halves(halves: Halves, change: Change) -> Halves:
    """The halves of kv_b_proj, changed as the matrix [h*(n+v), c] that they are of."""
    by_head = torch.cat([halves.key_up, halves.value_up.transpose(1, 2)], dim=1)
    heads, nope = halves.key_up.shape[:2]
    matrix = by_head.flatten(0, 1)
    if change.rows is not None:
        matrix = matrix[change.rows(len(matrix))]
    if change.columns is not None:
        matrix = matrix[:, change.columns(matrix.shape[1])]
    return Halves.of(matrix * change.factor, heads, nope)


def _changed_linear(linear: Linear, rows: slice, change: Change) -> Linear:
    size, width = linear.weight.shape
    if change.columns is not None:
        other = ChangedWeight(linear.weight, columns=change.columns(width))
        return Linear(InRows(linear.weight, other, rows))
    if change.rows is not None:
        order = torch.arange(size)
        order[rows] = order[rows][change.rows(len(order[rows]))]
        return Linear(ChangedWeight(linear.weight, rows=order))
    factors = torch.ones(size)
    factors[rows] = change.factor
    return Linear(ChangedWeight(linear.weight, row_factors=factors))
