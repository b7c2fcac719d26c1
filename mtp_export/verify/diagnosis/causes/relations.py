"""Causes of a weight that is its source's in another order, with other factors, or in part."""

from __future__ import annotations

from mtp_export.progress import counted

# --- Orders: of is their subject, such as "its rows" ----------------------------------------------


def reverse_order(of: str) -> str:
    return f"{of} are in reverse order"


def halves_swapped(of: str) -> str:
    return f"the two halves of {of} are swapped"


def rolled(of: str, by: int, head: int | None) -> str:
    """head: the number of rows of a head."""
    if head and by % head == 0:
        return f"{of} are rolled by {by}, {counted(abs(by) // head, 'head')}"
    return f"{of} are rolled by {by}"


def alternating(of: str, parts: int) -> str:
    """The first of each part, then the second of each."""
    if parts == 2:
        return f"{of} are interleaved: they come by turns from the source's two halves"
    return f"{of} are interleaved: they come by turns from {parts} equal parts of the source's"


def taken_apart(of: str, parts: int) -> str:
    """Every one of a residue, then every one of the next."""
    if parts == 2:
        return f"{of} are de-interleaved: the source's even ones come first, then the odd ones"
    return f"{of} are de-interleaved: every {parts}th of the source's, {parts} times over"


def two_exchanged(of: str, first: int, second: int) -> str:
    return f"{of} {first} and {second} are exchanged"


def reordered(of: str, moved: int, count: int) -> str:
    return f"{of} are in another order: {moved:,} of {count:,} are not at their places"


def its(noun: str) -> str:
    """noun: row, column or element."""
    return f"its {noun}s"


def from_to(of: str, noun: str, first: int, last: int) -> str:
    """Some of a subject."""
    if of == its(noun):
        return f"its {noun}s {first} to {last}"
    return f"{first} to {last} of {of}"


def within_each(noun: str, size: int, head: int | None) -> str:
    """head: the number of rows of a head."""
    return f"within each {size} {noun}s{', a head' if size == head else ''}, these"


def blocks(noun: str, size: int, head: int | None) -> str:
    """Blocks in an order of their own."""
    return f"its {'heads' if size == head else 'blocks'} of {size} {noun}s"


def block(noun: str, size: int, head: int | None) -> str:
    """Blocks that two numbers follow."""
    return f"in blocks of {size} {noun}s{', a head each' if size == head else ''}, its blocks"


def transposed_and(clause: str) -> str:
    return f"it is transposed, and then {clause}"


def codes_alone(clause: str) -> str:
    return f"{clause}; its scales are not: the codes alone were moved"


ORDER_OF_COLUMNS = (
    "its elements are in the order of the source's columns: it was transposed and kept its shape"
)


def blocks_transposed(size: int) -> str:
    return f"its blocks of {size} × {size} are transposed, each in its place"


# --- Values ---------------------------------------------------------------------------------------


def multiple(factor: str) -> str:
    return f"it is {factor} times the source's"


def plus(offset: str) -> str:
    """offset: with its sign."""
    words = f"it is the source's {offset[0]} {offset[1:]}"
    if offset in ("+1", "-1"):
        what = "added to" if offset == "+1" else "taken from"
        return f"{words}: 1 was {what} it, as for a norm that multiplies by 1 + w"
    return words


def multiple_plus(factor: str, offset: str) -> str:
    return f"it is {factor} times the source's {offset[0]} {offset[1:]}"


def constant_of_constant(found: str, wanted: str) -> str:
    return (
        f"it is {found} in every element, and the source's {wanted}: another multiple and another"
        " offset explain it equally"
    )


def _in_places(noun: str, places: str) -> str:
    """places: a number, or a range of them."""
    return f"its {noun}{'s' if ' ' in places else ''} {places}"


def signs_flipped(noun: str, places: str, count: int, total: int) -> str:
    """places: the range of one run, else ""."""
    if places:
        return f"the sign of {_in_places(noun, places)} is flipped"
    return f"the sign of {counted(count, noun)} of {total:,} is flipped"


def some_multiplied(noun: str, places: str, count: int, total: int, factor: str) -> str:
    """places: the range of one run, else ""."""
    if places:
        verb = "are" if " " in places else "is"
        return f"{_in_places(noun, places)} {verb} {factor} times the source's"
    return f"{count:,} of its {total:,} {noun}s are {factor} times the source's"


def some_zero(noun: str, places: str, count: int, total: int) -> str:
    if places:
        is_zero = "are zero, and the source's are not"
        if " " not in places:
            is_zero = "is zero, and the source's is not"
        return f"{_in_places(noun, places)} {is_zero}"
    return f"{count:,} of its {total:,} {noun}s are zero, and the source's are not"


def each_multiplied(noun: str, low: str, high: str, other: str) -> str:
    """other: name of the vector whose elements the factors are, "" for none."""
    words = f"each of its {noun}s is another multiple of the source's, by {low} to {high}"
    return f"{words}: {other} was multiplied into it" if other else words


def each_offset(noun: str, low: str, high: str) -> str:
    return f"each of its {noun}s is the source's plus an offset of its own, {low} to {high}"


def of_a_function(function: str) -> str:
    return f"it is {function} of the source's, element by element"


def clipped(count: int, total: int, low: str, high: str) -> str:
    return f"{count:,} of its {total:,} elements that were looked at are clipped to {low} to {high}"


READ_AS_FP16 = "its bits are bf16's, read as fp16"
READ_AS_BF16 = "its bits are fp16's, read as bf16"
BYTES_SWAPPED = "the two bytes of each of its elements are swapped"


def elements_zero(count: int, total: int) -> str:
    return (
        f"{count:,} of its {total:,} elements that were looked at are zero, and the source's are"
        " not; all others are the source's"
    )


def rounded_to_mantissa(bits: int) -> str:
    name = {2: " (e5m2)", 3: " (e4m3)"}.get(bits, "")
    return (
        f"its mantissas have {counted(bits, 'bit')}: it was rounded, as to fp8{name}, before it was"
        " stored unquantized"
    )


def rounded_to_four_bits(group: int) -> str:
    return (
        f"each {group} of its columns hold 16 values at most: it was rounded to 4 bits before it"
        " was stored unquantized"
    )


def of_low_rank(rank: int) -> str:
    return (
        f"its difference from the source's has rank {rank}, as of an adapter (LoRA) that was merged"
        " into it"
    )


# --- Parts ----------------------------------------------------------------------------------------


def part_of_another(noun: str, first: int, last: int, other: str) -> str:
    if first == last:
        return f"its {noun} {first} is that of {other}"
    return f"its {noun}s {first} to {last} are those of {other}"


def part_written_twice(noun: str, first: int, last: int, start: int) -> str:
    if first == last:
        return f"its {noun} {first} holds the source's {noun} {start}"
    end = start + last - first
    return f"its {noun}s {first} to {last} hold the source's {noun}s {start} to {end}"


def part_differs(noun: str, first: int, last: int, total: int) -> str:
    what = f"{noun}s {first} to {last} are"
    if first == last:
        what = f"{noun} {first} is"
    return (
        f"its {what} not the source's, and all others of {total:,} are: that part was overwritten"
        " or damaged"
    )


def some_differ(noun: str, count: int, total: int) -> str:
    return f"{counted(count, noun)} of {total:,} are not the source's, and all others are"


def both(first: str, second: str) -> str:
    return f"{first}, and {second}"


def reciprocal_of(tensor: str) -> str:
    return f"the reciprocal of {tensor}"


def at_an_offset(by: int) -> str:
    return (
        f"its elements lie {abs(by)} places {'after' if by > 0 else 'before'} the source's, across"
        " the ends of rows: it was read or written at a wrong offset"
    )


def shifted(noun: str, by: int, lost: int) -> str:
    lost_ones = f"{lost} are" if lost > 1 else f"{noun} is"
    where = f"{'first' if by > 0 else 'last'} {lost_ones}"
    return f"its {noun}s are shifted by {by}, and not rolled: its {where} not the source's"


def some_of_the_sources(noun: str, count: int, different: int, total: int) -> str:
    """different: of the count."""
    words = f"{count:,} of its {total:,} {noun}s are the source's, some at other places"
    if different < count:
        return f"{words} and more than once: {different:,} of the source's are there"
    return f"{words}; the others are not"


def explained_equally(first: str, second: str) -> str:
    return f"{first}, or {second}: both explain it equally"


def not_scaled(tensor: str) -> str:
    return (
        f"{tensor} is as the source has it, and the norm before it is not: that was divided by"
        " scales, with which its columns were to be multiplied as those of other weights are"
    )


ROTATED = (
    "most weights are unlike the source's, and the rows of the embedding are as long as there: the"
    " tool rotated the stream, and nothing is compared"
)
