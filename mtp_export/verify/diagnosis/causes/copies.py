"""Causes of copies of embedding and head that are not the main model's, and of layers that are."""

from __future__ import annotations


def another_checkpoint(tensor: str, original: str) -> str:
    return (
        f"{tensor} differs from {original}: the draft is of another checkpoint than the main model"
        " (a V3 draft with an R1 main?)"
    )


def spare_head_differs(head: str, embedding: str) -> str:
    """Of a tied model. Source: the loaders of vLLM 0.32.0 and SGLang 0.5.23, executed: the former
    skips the head, and of the latter's Qwen3.5 both tensors are loaded into one parameter."""
    return (
        f"config.json ties head and embedding, and {head} differs from {embedding}: vLLM computes"
        " with the embedding for both, SGLang with the one of the two that it reads last. Remove"
        " the head, or set tie_word_embeddings to false if the model has a head of its own"
    )


# vLLM 0.32.0 and SGLang 0.5.23 give drafts of models that share the two the main model's.
TUNED_COPY = (
    "it is near and differs, and nothing else of the module is told to be of another model: it was"
    " trained on from the main model's. Engines draft with the main model's in its place; --level"
    " run tells what is accepted"
)

# Of a table that lies beside an MTP layer in its folder: of a base that was trained on, say.
NEAR_TABLE = (
    "it is near the main model's and differs: one of the two models was trained on from the other,"
    " or both from one, or the table was quantized. --level run tells what is accepted"
)


def one_copy_damaged(tensor: str, original: str, count: int, total: int) -> str:
    return (
        f"{count:,} of the {total:,} elements of {tensor} are not those of {original}, and all"
        " others are: one of the two is damaged"
    )


def scales_of_a_copy(tensor: str, original: str) -> str:
    return (
        f"{tensor} has the codes of {original} and other scales: those of one of the two are"
        " damaged"
    )


def copy_damaged(tensor: str, other: str, damage: str) -> str:
    return f"{tensor} is damaged ({damage}), and {other}, which holds the same, is not"


def part_repeated(tensor: str, again: str, first: str) -> str:
    """again, first: rows or columns."""
    return (
        f"{again} of {tensor} hold the same as its {first}: one part, as a rank's or a head's, was"
        " written for two"
    )


def scales_taken(tensor: str, twin: str, linears: int = 1) -> str:
    """linears: how many of them two layers, or parts of both, share."""
    count = f" ({linears} linears)" if linears > 1 else ""
    return f"the scales of {tensor} are those of {twin}{count}, whose codes are others"


def hardly_trained(layer: str, main: str) -> str:
    return (
        f"the linears of {layer} are those of the main layer {main} but for less than 2 % of their"
        " size: the module was begun from that layer and hardly trained since, or noise was added"
        " to a copy of it"
    )


def main_layer_in_its_place(layer: str, main: str, *, of_all: bool) -> str:
    """layer, main: the names of two layers, or of a part of both. of_all: not of linears alone."""
    if not of_all:
        return (
            f"the linears of {layer} are those of the main layer {main} in another format or other"
            " codes, within the error of the format, and norms or biases beside them are not: they"
            " were taken from the layer of the wrong number"
        )
    return (
        f"{layer} is the main layer {main} in another format or other codes: its norms, router and"
        " biases, if any, are that layer's, and so are its linears, within the error of the format."
        " A layer of the wrong number was taken from the original: the module is the one after its"
        " main layers"
    )
