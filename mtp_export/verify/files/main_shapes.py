"""Shapes of MTP tensors beside those of the main layers' tensors of the same name: several others
are of another model's layer, and one that is transposed can only be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.base import FLOATS, Role, TensorSpec
from mtp_checkpoints.families.signs import has_layers, in_layer
from mtp_checkpoints.families.stored_names import as_weight, holds
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.files.tensor_problems import COPIED

_STORED_WHOLE = frozenset({*FLOATS, "F8_E4M3", "F8_E5M2", "I8"})  # an element per number
_COMPONENTS = 3  # of a tensor's name, that tell it in its layer
_PAIR = 2
_OF_ALL = 3  # dimensions of a tensor of all experts
_Shape = tuple[int, ...]


def shapes_as_main(
    main: Mapping[str, TensorInfo], mtp: Mapping[str, TensorInfo], repair: str
) -> Iterator[Item]:
    """No matrix is stored transposed beside the main layers', which agree on its shape; other
    shapes than theirs are not tested. repair: the command of a failure."""
    name, usual = "MTP tensors in the main layers' shapes", _shapes(main)
    problems, others, count = list[Problem](), list[str](), 0
    for own, tensor in mtp.items():
        shapes = usual.get(_ending(own), set())
        if not is_matrix(tensor) or len(shapes) != 1:
            continue
        count += 1
        (wanted,), shape = shapes, tuple(tensor.shape)
        if shape == wanted:
            continue
        if shape == (*wanted[:-2], wanted[-1], wanted[-2]):
            problems.append(Problem(own, causes.transposed_beside_main(own, shape, wanted)))
        else:
            others.append(causes.another_shape(own, shape, wanted))
    if problems:
        yield replace(verdict(name, problems, counted(count, "tensor")), repair=repair)
    elif others:
        yield not_tested(name, causes.other_shapes(others[0], len(others), count))
    elif count:
        yield verdict(name, [], counted(count, "tensor"))


def _shapes(main: Mapping[str, TensorInfo]) -> Mapping[tuple[str, ...], set[_Shape]]:
    """Shapes of the matrices of the main layers, by the ends of their names."""
    found: dict[tuple[str, ...], set[_Shape]] = {}
    for name, tensor in main.items():
        if is_matrix(tensor) and has_layers((name,)):
            found.setdefault(_ending(name), set()).add(tuple(tensor.shape))
    return found


def is_matrix(tensor: TensorInfo) -> bool:
    """Return whether a tensor has an element per number, so that its shape is its matrix's."""
    return len(tensor.shape) > 1 and tensor.dtype in _STORED_WHOLE


def _ending(name: str) -> tuple[str, ...]:
    """The last components of a name, without the numbers of experts."""
    return tuple("*" if one.isdigit() else one for one in name.split(".")[-_COMPONENTS:])


def of_other_shapes(
    wanted: Mapping[str, TensorSpec],
    every: Mapping[str, TensorInfo],
    mtp: Mapping[str, TensorInfo],
    width: int | None,
    wrong: Collection[str],
) -> list[Problem]:
    """The weights of a module that have other shapes than config.json gives them, and the main
    model's weights of their names: one alone tells nothing, unless it is every norm's.

    wanted: the module's weights by the names of `as_weight`. every: all tensors, mtp: the module's.
    width: that of the hidden state. wrong: tensors of main layers that config.json says otherwise
    too, by their names in these: of those it may be what is wrong.
    """
    names = {as_weight(name): name for name in mtp if as_weight(name) in wanted}
    unlike = {name: own for name, own in names.items() if _is_unlike(mtp[own], wanted[name])}
    main: dict[str, list[TensorInfo]] = {}
    for name, one in every.items():
        if name not in mtp:
            main.setdefault(in_layer(as_weight(name))[1], []).append(one)
    told = [n for n in unlike if any(holds(one, wanted[n]) for one in main.get(in_layer(n)[1], ()))]
    told = [name for name in told if in_layer(name)[1] not in wrong]
    norms = {
        own: mtp[own].shape[0] for name, own in names.items() if [*wanted[name].shape] == [width]
    }
    is_main = told or (len(norms) > 1 and any([*one.shape] == [width] for one in every.values()))
    widths = {*norms.values()}
    if is_main and width is not None and len(widths) == 1 and width not in widths:
        first = next((own for own in norms if own in unlike.values()), "")
        words = causes.of_another_width(first, widths.pop(), width)
        subjects = dict.fromkeys((first, *unlike.values())) if first else ()
        return [Problem(own, words) for own in subjects]
    if len(told) > 1:
        shapes = {name: ([*mtp[unlike[name]].shape], [*wanted[name].shape]) for name in told}
        words = causes.of_other_shapes(len(unlike), shapes)
        if parts := parts_of_ranks(unlike, wanted, mtp):
            words = causes.of_one_rank(len(unlike), parts, next(iter(shapes.items())))
        if len(told) == len(unlike) and (counts := _fewer_experts(shapes.values())):
            words = causes.fewer_experts([*unlike.values()], *counts)
    else:
        return []
    return [Problem(own, words) for own in unlike.values()]


def _is_unlike(tensor: TensorInfo, wanted: TensorSpec) -> bool:
    """Return whether a tensor holds another weight, and neither that transposed or in another shape
    nor nothing. Of embeddings and heads engines take the main model's, and routers go with the
    experts, whose number tells."""
    size = prod(tensor.shape)
    is_whole = tensor.dtype in _STORED_WHOLE and size == prod(wanted.shape)
    return (
        wanted.role not in (*COPIED, Role.ROUTER)
        and size > 0
        and not is_whole
        and not holds(tensor, wanted)
    )


def parts_of_ranks(
    unlike: Mapping[str, str], wanted: Mapping[str, TensorSpec], mtp: Mapping[str, TensorInfo]
) -> int:
    """Return of how many parts each matrix is one, by rows or by columns, of attention and of other
    linears alike; 0 where that is not so of all, or one holds codes or nothing."""
    found = set[int]()
    tensors = [mtp[own] for own in unlike.values()]
    if not {one.dtype for one in tensors} <= {*FLOATS} or any(0 in one.shape for one in tensors):
        return 0
    for name, own in unlike.items():
        sizes = zip(mtp[own].shape, wanted[name].shape, strict=False)
        axes = [divmod(whole, part) for part, whole in sizes if part != whole]
        found.add(axes[0][0] if len(axes) == 1 and axes[0][1] == 0 else 0)
    roles = {wanted[name].role for name in unlike}
    is_of_all = Role.ATTENTION in roles and len(roles) > 1
    parts = found.pop() if len(found) == 1 and is_of_all else 0
    return parts if parts > 1 else 0


def _fewer_experts(shapes: Iterable[tuple[list[int], list[int]]]) -> tuple[int, int] | None:
    """Return how many experts tensors of all experts hold, and are to hold; None where that is not
    all that is other in their shapes."""
    pairs = {(own[0], wanted[0]) for own, wanted in shapes}
    are_of_all = all(len(wanted) == _OF_ALL and own[1:] == wanted[1:] for own, wanted in shapes)
    ((found, count),) = pairs if len(pairs) == 1 else [(0, 0)]
    return (found, count) if are_of_all and found < count else None


def exchanged(wanted: Mapping[str, TensorSpec], mtp: Mapping[str, TensorInfo]) -> list[Problem]:
    """The matrices of a module of linears that are in each other's place by their shapes, where all
    others of it are as they should be. wanted and mtp: as of of_other_shapes."""
    by_parent: dict[str, list[str]] = {}
    for own, tensor in mtp.items():
        name = as_weight(own)
        if name in wanted and is_matrix(tensor) and tensor.shape != tuple(wanted[name].shape):
            by_parent.setdefault(name.rsplit(".", 2)[0], []).append(own)
    pairs = [
        own
        for own in by_parent.values()
        if len(own) == _PAIR
        and all(
            tuple(mtp[one].shape) == tuple(wanted[as_weight(other)].shape)
            for one, other in zip(own, reversed(own), strict=True)
        )
    ]
    if not pairs:
        return []
    words = causes.in_each_others_place(pairs[0][0], pairs[0][1], len(pairs))
    return [Problem(own, words) for pair in pairs for own in pair]
