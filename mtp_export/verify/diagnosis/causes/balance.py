"""Causes of failures of weights whose norms do not go together as training makes them, or whose
values are cut off."""

from __future__ import annotations

REVERSED = "has its {} in reverse order"
INTERLEAVED = "has its {} interleaved: they come by turns from two halves"
APART = "has its {} de-interleaved: the even ones come first, then the odd ones"
HALVES = "has the halves of its {} exchanged"
# The order of experts that one of their router's rows stands for, by what is wrong with these.
EXPERTS_COME = {
    REVERSED.format("rows"): "in reverse order",
    HALVES.format("rows"): "with their halves exchanged",
    INTERLEAVED.format("rows"): "with the even ones first, then the odd ones",
    APART.format("rows"): "by turns from two halves",
}


def stacked_apart(part: str, whose: str) -> str:
    """part: a matrix of every expert. whose: that of another one, by its place."""
    return (
        f"{part} of every routed expert of the MTP layer is of {whose}: experts were stacked in two"
        " orders"
    )


def moved(axis: str, by: int) -> str:
    """axis: rows, columns or elements. by: places."""
    return f"has its {axis} moved {'on' if by > 0 else 'back'} by {abs(by)}"


def exchanged(one: str, other: str) -> str:
    return f"{one} and {other} are exchanged"


def does_not_go_together(tensor: str, axis: str) -> str:
    """axis: rows or columns."""
    return (
        f"the norms of the {axis} of {tensor} do not go with the rest of its MLP, as those of its"
        " like do: its weights are damaged, in another order, or of another expert or layer"
    )


def norms_apart(query: str, key: str, factor: float) -> str:
    """factor: the mean one of the elements of both over each other, 1 or more."""
    return (
        f"the elements of {query} and {key} are a factor of {factor:.2g} apart and were trained to"
        " be alike: one of the two is damaged, in another order, or of another layer"
    )


def norm_of_another_size(norm: str, factor: float, among: str) -> str:
    """among: which of the main model's it is compared with, such as "largest of the norms"."""
    return (
        f"{norm} is {factor:.3g} times as large as the {among}: it was multiplied by a number or by"
        " a tool's scales, or is another tensor"
    )


def linear_of_another_size(tensor: str, factor: float, among: str) -> str:
    """among: which of the model's other linears it is compared with, the largest or smallest."""
    return (
        f"{tensor} is {factor:.3g} times as large as the {among} of all other linears by its root"
        " mean square: it was multiplied by a number, or its scales are inverted, left out or"
        " another tensor's"
    )


def mislabelled(tensor: str, label: str, held: str) -> str:
    """label: its type by the header. held: that of its bits."""
    return (
        f"{tensor} is labelled {label} and holds the bits of {held}, by which its values are as is"
        " usual: it was cast or written under the wrong type"
    )


def cut_off(tensor: str, share: float) -> str:
    return (
        f"{share:.0%} of the elements of {tensor} are as large as the largest one: they were cut"
        " off (clipped) at that size"
    )


def run_scaled(tensor: str, axis: str, first: int, last: int, factor: float) -> str:
    """axis: rows, columns or elements."""
    return (
        f"{axis} {first} to {last} of {tensor} are {factor:.2g} times as large as the others: that"
        " part of it was multiplied"
    )
