"""Causes of failures of stored weights, and of configs and tokenizers beside a source's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtp_export.progress import shortened

_LAYERS = 4  # that are named

# --- Seen without a source ------------------------------------------------------------------------


def unsound(tensor: str, problem: str) -> str:
    return f"{tensor}: {problem}"


NOT_COMPARED = "one of both is of a type that is not decoded here: their values are not compared"


def not_decoded(kinds: Sequence[str]) -> str:
    return f"{', '.join(kinds)}: types that are not decoded here, of which only the bytes are known"


def not_decodable(first_row: int, last_row: int, error: ValueError) -> str:
    rows = f"row {first_row}" if first_row == last_row else f"rows {first_row} to {last_row}"
    return f"{rows}: {error}"


def never_written(tensor: str, value: str) -> str:
    return f"{tensor} is constant ({value}): it was never written, or dropped and filled in"


def router_bias_dropped(tensor: str, value: str) -> str:
    return (
        f"{tensor} is constant ({value}), and a trained router's bias differs between experts: it"
        " was dropped and filled in, so that tokens go to other experts"
    )


def offset_dropped_from(tensor: str, outer_share: float, offset: int) -> str:
    return (
        f"{tensor}: {outer_share:.0%} of its codes lie at the ends of their range: the offset"
        f" {offset} was dropped (or added) when they were packed"
    )


def scales_rounded_late(tensor: str, full_share: float) -> str:
    return (
        f"scales are powers of two (ue8m0), yet {full_share:.0%} of the blocks reach the largest"
        f" code, as in {tensor}: the scales were rounded after the weights were quantized, which"
        " puts weights off by up to a factor of two"
    )


def out_of_proportion(tensor: str, rms: float, median: float) -> str:
    return (
        f"{tensor} has a root mean square of {rms:.3g}, others of its kind {median:.3g}: its scale"
        " is inverted, left out or another tensor's, or it holds memory that was never written"
    )


def of_no_matrix(tensor: str, rms: float) -> str:
    return (
        f"{tensor} has a root mean square of {rms:.3g}, as no trained matrix has: its scale is"
        " inverted, left out or another tensor's, or it holds memory that was never written"
    )


def part_out_of_proportion(ratio: float, dtype: str) -> str:
    """dtype: that of unquantized linears, "" for quantized ones."""
    words = f"the MTP module's linears are {ratio:.3g} times as large as the main layers'"
    if dtype:
        return (
            f"{words}: they are labelled {dtype} and are perhaps of another dtype (bf16 that is"
            " labelled fp16, or codes without their scales), or they are of another model"
        )
    return f"{words}: their scales are off by one factor, as where amax was stored for amax / 127"


def taken_for_another(tensor: str, twin: str, linears: int = 1) -> str:
    """linears: how many of them two layers, or parts of both, share."""
    count = f" ({linears} linears)" if linears > 1 else ""
    return f"{tensor} holds the same as {twin}{count}: one was taken for the other"


def last_norm_shared(norms: str, last: str) -> str:
    return (
        f"{norms} holds the same as {last}: right of a module that was trained with the main"
        " model's last norm, and else what a converter wrote that had none of its own."
        " Acceptance at level run tells what it costs, or --source"
    )


def overwritten_by_main(layer: str, main: str, linears: int) -> str:
    """layer, main: the names of two layers."""
    number = layer.rpartition(".")[2]
    return (
        f"{layer}, whose eh_proj is an MTP module's, holds {linears} linears of {main}: a merge"
        " wrote a main layer over the module, which is lost. Remove what is left of it and"
        f" set num_nextn_predict_layers to 0, or take the merge back (num_hidden_layers {number})"
        " and graft the original's layer"
    )


def implausible_size(rms: float) -> str:
    return f"its root mean square is {rms:.3g}"


CONSTANT_VALUES = "its values are all the same"
NOT_FINITE = "it has values that are not finite"


def norm_centred_at_zero(tensor: str, negative: float) -> str:
    where = ": its sign is flipped, or it holds" if negative > 0.9 else ", around zero: it holds"
    return (
        f"{negative:.0%} of {tensor} is negative{where} the w of a norm that multiplies by 1 + w,"
        " and this model's norms multiply by w"
    )


def norm_unlike_main(tensor: str, *, centred: bool) -> str:
    """centred: it lies around zero."""
    own, main = ("w of 1 + w", "w") if centred else ("w", "w of 1 + w")
    return (
        f"{tensor} lies around {0 if centred else 1} and the main layers' norms around"
        f" {1 if centred else 0}: it holds the {own}, and engines take it for the {main}"
    )


def norm_off_by_one(tensor: str, median: float, *, lower: bool, of_mlx: str = "") -> str:
    """Of a model whose engines add 1 to norms. lower: to this one 1 is to be added besides. of_mlx:
    the file whose metadata have it taken for one of MLX's."""
    size, why = ("large", "it holds 1 + w, and engines take it for the w of 1 + w. Take 1 from it")
    if lower:
        why = f"the metadata of {of_mlx} say that it is in MLX's format, of 1 + w, and it holds w"
        size, why = "small", f"{why if of_mlx else '1 was taken from it twice'}. Add 1 to it"
    return (
        f"{tensor} is 1 too {size}: its median is {median:.2f}, engines of this model add 1, and"
        f" the main layers' norms suit that: {why}"
    )


def norm_had_one_added(tensor: str, median: float) -> str:
    """Of a model whose engines multiply by norms as they are."""
    return (
        f"{tensor} is 1 too large: its median is {median:.2f}, engines of this model multiply by it"
        " as it is, and the main layers' norms suit that: 1 was added to it when it was converted."
        " Take 1 from it"
    )


def main_norms_hold_w(negative: float) -> str:
    """negative: the largest share in a norm of the MTP module."""
    return (
        "all of the main layers' norms lie around 1 and none has a negative weight, and"
        f" {negative:.0%} of one of the MTP module is negative: the main model's hold 1 + w, as a"
        " converter for engines that multiply by w writes them, and engines of this model add 1"
        " again. Take 1 from them"
    )


def no_family(codes: int, tensors: int) -> str:
    """codes: tensors of integers, whose numbers depend on their format."""
    return (
        f"there is no family for this model here: {codes:,} of {tensors:,} tensors that hold codes"
        " or one number, scales that fit them, proportions, main layers stored in the module's"
        " place and copies of embedding and head"
    )


def halves_alike(tensor: str) -> str:
    return (
        f"both halves of {tensor}'s columns hold the same: one was written for both, and drafts see"
        " one of embedding and hidden state alone"
    )


def block_of_one_code(tensor: str, place: str, share: str) -> str:
    """place: rows, columns or both. share: of the tensor, such as "half"."""
    values = f"the values in {place} of {tensor}, {share} of it,"
    if share == "100%":
        values = f"all values of {tensor}"
    why = "they, or their codes or scales, were never written, or dropped and filled in"
    return f"{values} are alike: {why}"


def every_code_at_an_end(tensor: str) -> str:
    return (
        f"every code of {tensor} lies at an end of its range: it was never written, or dropped and"
        " filled in"
    )


def scale_out_of_proportion(tensor: str, ratio: float) -> str:
    return (
        f"a scale of {tensor} is {ratio:.3g} times as large as three quarters of its others: it is"
        " damaged, or holds memory that was never written"
    )


def zero_points_mislabelled(tensor: str, label: str, less_one: bool) -> str:
    """label: field and value of quantization_config, by which zero points are stored less one, or
    as they are."""
    read, held = ("less one", "as they are") if less_one else ("as they are", "less one")
    return (
        f"by {label} the zero points are stored {read}, and {tensor}, as the others of its part,"
        f" has them {held}: readers of qzeros take every weight for one step more or less (kernels"
        " for symmetric weights alone, such as Marlin, do not read them)"
    )


def label_to_set(field: str, value: str) -> str:
    return f"set {field} to {value}"


def no_label_for_both(field: str) -> str:
    return (
        f"those of the other part are as labelled, so that no {field} is right for both; quantize"
        " the layer again, or graft the original's"
    )


def channels_in_one_group(tensors: str) -> str:
    return (
        f"{tensors} puts every input channel into group 0: it was never written. By desc_act true"
        " engines read it, and scale every channel by the first group's scale"
    )


def groups_of_other_sizes(tensors: str) -> str:
    return (
        f"{tensors} puts more input channels into some groups than these have, and fewer into"
        " others: it is damaged, and by desc_act true engines read it"
    )


def permutation_passed_over(tensors: str) -> str:
    return (
        f"{tensors} permutes the input channels, and by desc_act false engines pass over it and"
        " scale channels by other groups' scales: set desc_act to true"
    )


def joined_numbers_apart(joined: str, ratio: float) -> str:
    return (
        f"{joined} have unlike numbers of the whole matrix: engines join these linears and take one"
        f" number for all, so some decode {ratio:.4g} times too large or small"
    )


def joined_inputs_apart(joined: str, ratio: float) -> str:
    return (
        f"{joined} have unlike scales of their inputs, {ratio:.4g} times apart: engines quantize"
        " the inputs once for all of them, by one scale"
    )


def reciprocal_number(tensor: str, value: float) -> str:
    return (
        f"{tensor} is {value:.4g}, the reciprocal of what its layout has for any usual weights:"
        " every weight of the matrix decodes as another power of its size"
    )


def words_in_plain_order(tensor: str) -> str:
    return (
        f"{tensor}, as the others of its part, is packed in plain nibble order: its codes go with"
        " the scales of other columns where a word is read in AWQ's order (columns 0, 2, 4, 6, 1,"
        " 3, 5, 7), and with those of its own in order. Pack it again in AWQ's"
    )


# --- Compared with the source ---------------------------------------------------------------------

CONSTANT = "it is constant: never written, or dropped and filled in"
COLUMN_HALVES_SWAPPED = (
    "its two halves of columns are swapped: the order of embedding and hidden state, or of two"
    " fused matrices"
)
ROW_HALVES_SWAPPED = "its two halves of rows are swapped"
TRANSPOSED = "it is transposed"
SIGN_FLIPPED = "its sign is flipped"
ROPE_ROWS_REORDERED = (
    "its rotary rows are stored as two halves instead of interleaved pairs, or the reverse"
)
ROWS_OF_HEADS_REORDERED = (
    "its rows are sorted by what they give, such as all queries and then all gates, where the model"
    " has each head's side by side, or the reverse"
)
LAST_AXIS_REVERSED = "its last axis is reversed, as of a convolution whose taps run the other way"
SCALES_INVERTED = (
    "its scales are inverted: the reciprocal was stored, so every weight is off by scale²"
)
SCALES_ALONG_ROWS = "its scales lie along the other axis: the groups were taken over rows"
SCALES_LEFT_OUT = "its scales are all one: they were left out, or never written"
SCALES_PERMUTED = "its scales are permuted: the right ones for other blocks or groups"
COLUMNS_OF_OTHER_GROUPS = (
    "its columns lie under the scales of other groups than their own, as of GPTQ's desc_act without"
    " its g_idx"
)
SCALES_ROUNDED_LATE = (
    "its scales were rounded to powers of two (ue8m0) after the weights were quantized with the"
    " unrounded ones"
)
SCALES_OF_ANOTHER_TENSOR = "its scales are not those of its codes: another tensor's, or damaged"
YARN_SCALE_CHANGED = "yarn's attention scale was dropped or changed"
NOTHING_IN_COMMON = "it has nothing in common with the source's: another model's, or never written"


def not_the_sources(tensor: str, level: str | None, cause: str | None) -> str:
    """level: the SQNR, if it is one of values; cause: None beyond the first few."""
    words = f"{tensor} is not the source's"
    if level is not None:
        words += f" ({level})"
    return words if cause is None else f"{words}: {cause}"


def calibrated_for_others(tensor: str, lost_db: float) -> str:
    return (
        f"{tensor} was calibrated for something else: its outputs are {lost_db:.1f} dB worse along"
        " these texts than with the nearest codes under its scales. Its Hessian was that of another"
        " layer, or of other texts"
    )


def scales_off_by(factor: float) -> str:
    return f"every scale is {factor:.4g} times what it must be"


def latent_halves_exchanged(keys: str, values: str) -> str:
    """keys and values: what the file calls the halves."""
    return f"its keys' and its values' half are exchanged: {values} lies in {keys}'s place"


def latent_keys_not_transposed(keys: str) -> str:
    """keys: as above."""
    return f"its keys' half is not transposed, as {keys} has to be"


def holds_another(tensor: str) -> str:
    return f"it holds {tensor}"


def layers_moved(from_layer: Mapping[str, str], counts: Mapping[str, tuple[int, int]]) -> str:
    """from_layer: by the name of a layer, that of the source's whose weights it holds. counts: how
    many of its weights are not the source's, of how many."""
    told = [
        f"{layer} holds the source's {other} ({wrong} of its {count} weights are not its own)"
        for layer, other in from_layer.items()
        for wrong, count in [counts[layer]]
    ]
    words = shortened(told, _LAYERS, "; ")
    if len(from_layer) == 2 and from_layer == {b: a for a, b in from_layer.items()}:
        words += ": the two are exchanged"
    return f"{words}. Give the weights of each the names that they have in the source"


def holds_codes_of(tensor: str) -> str:
    return f"it holds the codes of {tensor}, and its own scales or another's"


def elements_damaged(count: int, total: int) -> str:
    return f"{count} of its {total} elements differ: damaged"


def another_version(sqnr_db: float) -> str:
    return (
        f"it is close to the source's ({sqnr_db:.1f} dB) but not it: another version of the model"
    )


def not_in_source(tensor: str) -> str:
    return f"{tensor} has no counterpart in the source: another model's"


TOWER_APART = "llama.cpp reads a vision tower from a file of its own, which nothing here writes"


def carried_lost(tensor: str) -> str:
    return f"{tensor} of the source is not there: what it belongs to is no longer whole"


def carried_changed(tensor: str) -> str:
    return (
        f"{tensor} is not the source's, and no step of an export changes it: it is another model's,"
        " or damaged"
    )


def another_tokenizer(file: str) -> str:
    return f"{file} is not the source's: another model's tokenizer"


def config_differs(key: str, found: object, wanted: object, file: str) -> str:
    """A value of a config.json that is not the source's."""
    words = f"{key} is {found!r} in {file}, {wanted!r} by the source"
    return f"{words}: {YARN_SCALE_CHANGED}" if key == "rope_scaling" else words
