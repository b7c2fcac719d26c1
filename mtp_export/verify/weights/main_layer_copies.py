"""A main layer, or a part of one, in the MTP module's place in another format or quantized anew, of
whose linears no bytes are equal, or hardly trained since, and norms and biases of a main layer in a
module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.restored import Restored
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.formats.base import BLOCK
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import copies
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.weight_facts import WeightFacts

if TYPE_CHECKING:
    import torch

_IN_PART = 3  # components of the name of a linear of a part of a layer; experts' have more
_SAMPLES = 8  # linears whose first rows are compared
_FEWEST = 3  # linears that tell a layer without the norm before them
_LEAST_ELEMENTS = 8  # of a vector, of which fewer may be equal by chance
# What rounding a norm or a bias to the coarsest dtype of one, bf16, changes at most.
_ROUNDING, _SMALLEST = 2.0**-8, 1e-7
# The signal-to-noise ratio of linears that have nothing in common is -3 dB; one that training began
# with, and whose norms it may not have moved, is far above.
_UNLIKE_DB = 1.0
# That of linears which moved by 2 % of their size: less than any training that serves a module.
_UNTRAINED_DB = 34.0

Layer = Mapping[str, WeightFacts]
Pair = tuple[WeightFacts, WeightFacts]  # the module's weight, and the main layer's of its name


def in_other_formats(main: Sequence[WeightFacts], mtp: Sequence[WeightFacts]) -> Iterator[Item]:
    """No MTP layer is a main one whose linears are stored in another format or in other codes.

    It is where all that engines never quantize (norms, router, biases) is that layer's, and the
    linears are within the error of the format; its attention, MLP or experts alone are where the
    other parts are unlike, as no training leaves it. Nor is one a main layer whose linears have
    moved by a trace. Equal bytes are found by their digests alone.
    """
    layers, problems, compared = _by_layer(main), list[Problem](), 0
    held = {(name, one.digest) for layer in layers.values() for name, one in layer.items()}
    for layer, own in _by_layer(mtp).items():
        near = dict[str, tuple[float, str]]()
        for other, theirs in layers.items():
            pairs = _pairs(own, theirs)
            if not any(map(_differ_in_codes, pairs)):
                problems += _hardly_trained(layer, other, pairs)
                continue
            compared += 1
            for part in [""] if _are_one(pairs) else _taken_parts(own, theirs):
                linears = _sampled([*filter(_differ_in_codes, _of(part, own, theirs))])
                room = median(map(_room_db, linears)), other
                near[part] = max(near.get(part, room), room)
        for part in [""] if "" in near else near:
            other = near[part][1]
            pairs = _of(part, own, layers[other])
            taken = [one for one, _ in filter(_is_linear, pairs)]
            exact = sum(
                (in_layer(one.weight.stored.weight.name)[1], one.digest) in held for one in taken
            )
            if 2 * exact >= len(taken):
                continue  # an exact copy, which `value_checks` tells by its digests
            of_all = part == "" or _are_one(pairs)
            place = f"{layer}{part}", f"{other}{part}"
            words = copies.main_layer_in_its_place(*place, of_all=of_all)
            taken += [one for one, _ in pairs if one not in taken]
            problems += [Problem(one.weight.name, words) for one in taken]
    if compared or problems:
        figure = f"{counted(compared, 'main layer')} in other codes"
        yield verdict("mtp: no main layer in its place", problems, figure)


def _hardly_trained(layer: str, other: str, pairs: Sequence[Pair]) -> list[Problem]:
    """Name the linears of a layer that all are a main layer's but for a trace."""
    linears = [pair for pair in pairs if _is_linear(pair)]
    moved = [pair for pair in linears if pair[0].digest != pair[1].digest]
    if len(moved) < _FEWEST or len(moved) < len(linears) / 2:
        return []  # exact copies, which `value_checks` tells by their digests
    if any(_sqnr_db(pair) < _UNTRAINED_DB for pair in _sampled(moved)):
        return []
    words = copies.hardly_trained(layer, other)
    return [Problem(one.weight.name, words) for one, _ in moved]


def vectors_taken(main: Sequence[WeightFacts], mtp: Sequence[WeightFacts]) -> Item:
    """No norm or bias of an MTP layer is a main layer's whose linears are unlike its own, or
    others, as of a layer of another kind."""
    layers, problems = _by_layer(main), list[Problem]()
    for own in _by_layer(mtp).values():
        for theirs in layers.values():
            pairs = _pairs(own, theirs)
            vectors = [pair for pair in pairs if _is_vector(pair) and _are_equal(pair)]
            linears = [pair for pair in pairs if _is_linear(pair)][:_SAMPLES]
            if vectors and all(map(are_unlike, linears)):
                names = [[fact.weight.name for fact in pair] for pair in vectors]
                problems += [Problem(one, causes.taken_for_another(one, two)) for one, two in names]
    return verdict(
        "mtp: no norm or bias is a main layer's", problems, counted(len(layers), "main layer")
    )


def _by_layer(facts: Sequence[WeightFacts]) -> Mapping[str, Layer]:
    """Sound weights of decoder layers that are not all one value, by their names in the layer."""
    found: dict[str, dict[str, WeightFacts]] = defaultdict(dict)
    for fact in facts:
        layer, name = in_layer(fact.weight.stored.weight.name)
        if layer and fact.statistics.is_sound and not fact.statistics.is_constant:
            found[layer][name] = fact
    return found


def _pairs(own: Layer, theirs: Layer) -> list[Pair]:
    pairs = [(fact, theirs[name]) for name, fact in own.items() if name in theirs]
    return [
        (one, other)
        for one, other in pairs
        if one.weight.stored.weight.shape == other.weight.stored.weight.shape
    ]


def _of(part: str, own: Layer, theirs: Layer) -> list[Pair]:
    """Pairs of a part of a layer, of all for ""."""
    start = f"{part.removeprefix('.')}." if part else ""
    return _pairs({name: fact for name, fact in own.items() if name.startswith(start)}, theirs)


def _taken_parts(own: Layer, theirs: Layer) -> list[str]:
    """Parts of a layer that are another's, of whose other linears none is; where the layer has one
    part alone, as those of one mixer, all of its linears."""
    of_parts = {part: _of(part, own, theirs) for part in _parts(own)}
    taken = [
        part
        for part, pairs in of_parts.items()
        if any(map(_differ_in_codes, pairs)) and (_are_one(pairs) or _have_linears_of_one(pairs))
    ]
    inside = {id(one) for part in taken for one, _ in of_parts[part]}
    others = [pair for pair in _of("", own, theirs) if _is_linear(pair)]
    others = [pair for pair in others if taken and id(pair[0]) not in inside]
    if not others and not _is_of_one_mixer(own, taken):
        # Of a layer of another kind, as a dense one, which no training starts from.
        is_other = any(id(one) not in inside for one in own.values() if _has_linear(one))
        taken = [part for part in taken if is_other and _has_vectors_of_one(of_parts[part])]
    if not all(map(are_unlike, _sampled(others))):
        return []
    return [part for part in taken if part.rpartition(".")[0] not in taken]


def _is_of_one_mixer(layer: Layer, taken: Sequence[str]) -> bool:
    """Return whether a part that was taken has all linears of a layer, which are several."""
    linears = [name for name, fact in layer.items() if _has_linear(fact)]
    parts = {f".{name.partition('.')[0]}" for name in linears}
    return len(linears) >= _FEWEST and parts == {*taken}


def _parts(layer: Layer) -> list[str]:
    """Attention, MLP and the like, and the experts of an MLP, whose router may be the layer's."""
    names = [name.split(".") for name in layer]
    parts = [f".{name[0]}" for name in names]
    parts += [f".{name[0]}.{name[1]}" for name in names if len(name) > _IN_PART]
    return [*dict.fromkeys(parts)]


def _sampled(pairs: Sequence[Pair]) -> Sequence[Pair]:
    return pairs[:: -(-len(pairs) // _SAMPLES)] if pairs else pairs


def _is_linear(pair: Pair) -> bool:
    return _has_linear(pair[0])


def _has_linear(fact: WeightFacts) -> bool:
    return fact.weight.stored.weight.is_linear_weight


def _is_vector(pair: Pair) -> bool:
    (size, *others) = pair[0].weight.stored.weight.shape
    return size >= _LEAST_ELEMENTS and not others


def _differ_in_codes(pair: Pair) -> bool:
    one, other = pair
    if not _is_linear(pair) or one.weight.form != other.weight.form:
        return _is_linear(pair)
    return one.weight.stored.format is not UNQUANTIZED and one.digest != other.digest


def _are_one(pairs: Sequence[Pair]) -> bool:
    """Return whether the pairs are one layer's weights."""
    if not all(_are_equal(pair) for pair in pairs if not _is_linear(pair)):
        return False
    sampled = _sampled([pair for pair in pairs if _differ_in_codes(pair)])
    if all(map(_is_linear, pairs)):  # experts, which have nothing else to tell them by
        return all(_room_db(pair) >= 0 for pair in sampled)
    return median(map(_room_db, sampled)) >= 0


def _have_linears_of_one(pairs: Sequence[Pair]) -> bool:
    """Return whether several linears are one layer's, whatever norms and biases are beside them."""
    linears = [pair for pair in pairs if _is_linear(pair)]
    if any(not _is_linear(pair) and not _is_vector(pair) for pair in pairs):  # a router
        return False
    return len(linears) >= _FEWEST and all(_room_db(pair) >= 0 for pair in _sampled(linears))


def _has_vectors_of_one(pairs: Sequence[Pair]) -> bool:
    """Return whether a part is one layer's by its linears and by norms or biases too."""
    return any(map(_is_vector, pairs)) and _are_one(pairs)


def _are_equal(pair: Pair) -> bool:
    """Return whether two weights are equal but for the rounding of their dtypes."""
    one, other = pair
    if one.weight.form == other.weight.form:
        return one.digest == other.digest
    rows = one.weight.rows
    own, theirs = (fact.weight.encoded(0, rows).dequantize().float() for fact in pair)
    files = (fact.weight.tensors[0].file for fact in pair)
    of_sums = (file.rounding for file in files if isinstance(file, Restored))
    return own.allclose(theirs, rtol=_ROUNDING, atol=max((_SMALLEST, *of_sums)))


def _room_db(pair: Pair) -> float:
    """Distance in dB of the signal-to-noise ratio of the first rows from the bound of the coarser
    format."""
    return _sqnr_db(pair) - min(fact.weight.stored.format.gate.sqnr_db for fact in pair)


def are_unlike(pair: Pair) -> bool:
    """Return whether the first rows of two weights have nothing in common."""
    return _sqnr_db(pair) < _UNLIKE_DB


def _sqnr_db(pair: Pair) -> float:
    """Signal-to-noise ratio of the first rows; below any where they cannot be decoded."""
    from mtp_kernels import weight_statistics

    try:
        values, wanted = _first_rows(pair)
    except ValueError:  # value_checks says why
        return float("-inf")
    return weight_statistics.difference(wanted, values).sqnr_db


def _first_rows(pair: Pair) -> list[torch.Tensor]:
    rows = min(BLOCK, pair[0].weight.rows)
    return [fact.weight.encoded(0, rows).dequantize().float() for fact in pair]
