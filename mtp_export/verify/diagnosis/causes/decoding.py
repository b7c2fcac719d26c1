"""Causes of failures of the module, the drafter and the engine, seen when the model runs."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_export.verify.diagnosis.causes import balance

_MOST_EQUAL = 3
# The layer of a module, where sentences on layers of both parts have {layer}.
MTP_LAYER = "the MTP layer"
MTP_BLOCK = "the MTP layer's block"
# --- The MTP module: tensors that an export mixed up ----------------------------------------------

CONCATENATION_REVERSED = (
    "the concatenation is reversed: eh_proj must read [enorm(embedding); hnorm(hidden)]"
)
NORMS_SWAPPED = "enorm and hnorm are swapped"
NORMS_OF_ONE_PLUS_W = (
    "the norms hold the w of 1 + w, and the engine multiplies by w: 1 must be added when they are"
    " converted"
)
NORMS_SHIFTED = (
    "the norms hold 1 + w, to which the engine adds 1 again, or 1 was added by mistake when they"
    " were converted"
)
LAYER_NORMS_SWAPPED = "input_layernorm and post_attention_layernorm of {layer} are swapped"
ROUTER_BIAS_NEGATED = (
    "e_score_correction_bias of {layer}'s router has the wrong sign: experts that it should"
    " favour are picked less"
)
ROUTER_BIAS_REVERSED = "e_score_correction_bias of {layer}'s router is in reverse order"
ROUTER_NEGATED = "{layer}'s router has the wrong sign: the worst experts are picked"
ROUTER_APART = (
    "{layer}'s router does not go with its experts, as those of all other layers do: the experts,"
    " or its columns, are in another order, it is damaged, or of another layer"
)
# Of one tensor, behind its name.
WRONG_SIGN = "has the wrong sign"
DOES_HARM = "does harm: its weights are damaged, in another order or of another layer"
ROWS_REVERSED, COLUMNS_REVERSED = map(balance.REVERSED.format, ("rows", "columns"))
ROW_HALVES, COLUMN_HALVES = map(balance.HALVES.format, ("rows", "columns"))
ROWS_BY_TURNS = balance.INTERLEAVED.format("rows")
ROWS_APART = balance.APART.format("rows")
LAST_NORM = "the last norm (model.norm)"
LACKS_ONE = "lacks the 1 of 1 + w, or 1 was taken from it when it was converted"
ONE_TOO_MUCH = "has 1 too much: 1 was added to it when it was converted"
ELEMENTS_REVERSED = "is in reverse order"
ELEMENT_HALVES = "has its halves exchanged"
ELEMENTS_ELSEWHERE = "is worse than a flat one: it is damaged, in another order or of another layer"
ROPE_IN_HALVES = (
    "the rotary rows of q_b_proj and kv_a_proj_with_mqa of {layer} are stored in halves instead of"
    " interleaved pairs"
)
ROPE_INTERLEAVED = (
    "the rotary rows of q_proj and k_proj of {layer} are stored as interleaved pairs instead of in"
    " halves"
)
QUERY_HALVES_SWAPPED = (
    "the halves of q_proj's rows are swapped: parts of tensor-parallel ranks were joined in another"
    " order"
)
KEYS_AND_VALUES_SWAPPED = "k_proj and v_proj of {layer} are swapped"
QUERY_AND_KEY_NORMS_SWAPPED = "q_norm and k_norm of {layer} are swapped"
GATES_BEHIND_ALL_QUERIES = (
    "q_proj of {layer} has the gates of all heads behind their queries, where each head's gate must"
    " follow its own query"
)
QUERIES_AND_GATES_SWAPPED = "queries and gates of q_proj of {layer} are swapped"
QUERIES_AND_KEYS_SWAPPED = "queries and keys of in_proj_qkv of {layer} are swapped"
VALUES_AND_GATES_SWAPPED = "values of in_proj_qkv and in_proj_z of {layer} are swapped"
DECAYS_AND_BETAS_SWAPPED = "in_proj_a and in_proj_b of {layer} are swapped"
TAPS_EARLY = "the taps of conv1d of {layer} stand for a token earlier each"
TAPS_LATE = "the taps of conv1d of {layer} stand for a token later each"
YARN_SCALE_DROPPED = "yarn's attention scale was dropped: rope_scaling lacks mscale_all_dim"
EMBEDDING_OF_ANOTHER_CHECKPOINT = "the draft's embedding is of another checkpoint"
HEAD_OF_ANOTHER_CHECKPOINT = "the draft's head is of another checkpoint"
NO_KNOWN_BUG = (
    "no known layout bug explains it: the draft belongs to another main model, its weights are"
    " damaged, or they were never trained"
)

EVERY_LAYER = "every layer of its kind"


def main_layer(number: int) -> str:
    return f"layer {number}"


def of_tensor(name: str, layer: str, wrong: str) -> str:
    """name: of a tensor, or of what it is the last matrix of. layer: "" for a module's own."""
    return f"{name}{f' of {layer}' if layer else ''} {wrong}"


def swapped(one: str, other: str) -> str:
    """one, other: tensors of the module."""
    return f"{one} and {other} of the module are swapped"


def exchanged(both: str) -> str:
    """both: tensors of two layers, in words."""
    return f"{both} are in each other's place"


def likewise(names: Sequence[str]) -> str:
    return f"likewise {', '.join(names)}"


def times(factor: float) -> str:
    """factor: that of the stored weights over the right ones."""
    return f"is about {factor:.2g} times what it should be"


def half_scaled(half: str, factor: float) -> str:
    """half: "embedding" or "hidden". factor: that of the stored weights over the right ones."""
    norm = "enorm" if half == "embedding" else "hnorm"
    if factor < 0:
        return f"the {half} half of eh_proj, or {norm}, has the wrong sign"
    return f"the {half} half of eh_proj, or {norm}, is about {factor:g} times what it should be"


def linears_scaled(factor: float) -> str:
    """factor: that of the stored weights over the right ones."""
    return (
        f"every linear of the MTP module is about {factor:g} times what it should be: their scales"
        " are off by one factor, as where codes of fp8 were taken for those of its fnuz form"
    )


def router_reordered(wrong: str) -> str:
    """wrong: with the rows of a matrix."""
    return f"{{layer}}'s router {wrong}; or its experts come {balance.EXPERTS_COME[wrong]}"


def router_rolled(by: int) -> str:
    """by: how many places on."""
    way = f"{'on' if by > 0 else 'back'} by {'one' if abs(by) == 1 else abs(by)}"
    return f"the rows of {{layer}}'s router are moved {way}; or its experts are in another order"


def expert_negated(expert: str) -> str:
    return f"down_proj of {expert} has the wrong sign"


def expert_scaled(expert: str, factor: float) -> str:
    """factor: that of the stored weights over the right ones."""
    return f"{expert} adds about {factor:g} times what it should: its scale is off"


def more_is_wrong(least: float) -> str:
    """least: the acceptance of a working module."""
    return f". Below {least} all the same: more is wrong, or it is another main model's module"


# Where no single part of a module explains all.
OR_ANOTHER_LAYER = "; or the layer was taken from another main model"


def one_of(explained: Sequence[str]) -> str:
    """explained: sentences on causes that explain a fault equally, best first."""
    if len(explained) == 1:
        return explained[0]
    return f"several explain it equally: {first_of(explained)}"


def first_of(explained: Sequence[str]) -> str:
    more = len(explained) - _MOST_EQUAL
    shown = "; or ".join(explained[:_MOST_EQUAL])
    return shown + (f"; or {more} more" if more > 0 else "")


def damaged(damage: str) -> str:
    """damage: the check and item that found it."""
    return f"the module's weights are damaged, as {damage} says"


def main_damaged(damage: str) -> str:
    """damage: the check and item that found it."""
    return f"the main model, which feeds the drafts and judges them, is damaged, as {damage} says"


def loaded_wrongly(item: str) -> str:
    """item: the one that says how."""
    return f"the module is loaded wrongly, as item '{item}' says"


def gate_and_up_swapped(expert: str) -> str:
    """expert: or the feed-forward of a layer."""
    return f"gate_proj and up_proj of {expert} are swapped"


def experts_swapped(one: int, other: int) -> str:
    return f"experts {one} and {other} are swapped"


# --- The MTP module: hidden states and embeddings that it is fed ----------------------------------

RECYCLED_BEFORE_NORM = "the recycled hidden state is not normalised: pre-norm hidden recycled"
RECYCLED_AFTER_NORM = "the recycled hidden state is normalised and should not be"
STALE_HIDDEN_STATE = (
    "stale hidden state: drafts after the first are fed the target's hidden state again, not the"
    " module's own output"
)
NO_HIDDEN_STATE = "drafts after the first are fed a zero hidden state"
WRONG_RECURSION = "the recursion is not fed with what the module was trained on"


def target_hidden_taken(side: str) -> str:
    """side: "before the norm" or "after the norm"."""
    return f"the target's hidden state is taken {side}"


def first_embedding(treated: str) -> str:
    """treated: "zeroed" or "kept"."""
    return f"first-token handling: the embedding of position 0 is {treated}"


def first_embedding_must_be(treated: str) -> str:
    """treated: "zeroed" or "kept"."""
    return f"first-token handling: the embedding of position 0 must be {treated} for this module"


def acceptance_collapses(position: int, cause: str | None) -> str:
    return (
        f"acceptance at draft {position} collapses although the one before is accepted:"
        f" {cause or WRONG_RECURSION}"
    )


def contract_unproven(cause: str, field: str, own: object, usual: object) -> str:
    return (
        f"{cause}. mtp_contract records {field} {own!s}, the family's value is {usual!s}, and this"
        " module does not draft better with the recorded one"
    )


# --- The drafter: differs from its module at run time ---------------------------------------------

DRAFTER_TARGET_HIDDEN = (
    "the drafter is fed the target's hidden state from the other side of the norm than the contract"
    " says"
)
DRAFTER_RECYCLES_AFTER_NORM = (
    "the recycled hidden state is normalised although the contract says it is not"
)
DRAFTER_FIRST_TOKEN = (
    "first-token handling: the drafter does not treat position 0's embedding as the contract says"
)
DRAFTER_UNEXPLAINED = (
    "the engine's proposals are not its module's, and no known drafter bug explains them"
)


def drafter_explained(cause: str, share: float) -> str:
    return f"{cause} ({share:.1%} of the proposals agree with this bug)"


# --- Negative controls ----------------------------------------------------------------------------

HIDDEN_STATE_UNUSED = "the module does not use the target's hidden state"
HIDDEN_STATE_UNUSED_OR_SHIFTED = (
    "the module does not use the target's hidden state, or is already fed a shifted one"
)
EH_PROJ_REVERSED_OR_UNTRAINED = (
    "the concatenation is reversed in the bundle, or eh_proj was never trained"
)
MASK_LEAKS = "a later token changes earlier logits: the mask lets rows see what comes after them"


def contract_wrong(cause: str) -> str:
    return f"the contract is wrong: {cause}"


def acceptance_not_lower(cause: str) -> str:
    return f"acceptance is not lower: {cause}"


# --- Greedy decoding: speculation changes a token -------------------------------------------------

LIMIT_PASSED = "the request ended at another token: a limit inside a block is not respected"
WRONG_DRAFT_ACCEPTED = (
    "a draft was accepted that is not the target's best token: the acceptance rule is wrong"
)
LOGITS_DEPEND_ON_DRAFTS = (
    "the target's own token after a block differs: its logits depend on the drafts, so that"
    " rejected drafts stay in the cache or in a state, or a row sees tokens after it"
)
ROWS_DEPEND_ON_BATCH = (
    "a row's result depends on what else is in the batch: requests' caches are mixed up"
)


def limit_inside_block(limit: str) -> str:
    """limit: "max_tokens" or "the end token"."""
    return f"{limit} inside a block is not respected: accepted drafts after it are output"


def no_near_tie(margin: float) -> str:
    return (
        f"the target prefers its token by {margin:.3g}, far above what rounding can change: a draft"
        " was accepted wrongly, or the cache holds what it should not"
    )


# --- Sampling: speculation changes the distribution -----------------------------------------------

PAIRS_OFF = (
    "wrong proposal distribution: sampled pairs of tokens do not follow the target's distribution;"
    " drafts are not drawn from the reported distribution, or acceptance is not exact"
)
NUCLEUS_WRONG = "with top_p 0 another token than the best is output: the nucleus is cut wrongly"


def reported_sum(total: float) -> str:
    return (
        "wrong proposal distribution: the output does not follow the target's distribution; the"
        f" drafter reports probabilities that sum to {total:.3f}: it kept the drawn token's"
        " probability alone, and the residual needs the draft's full distribution"
    )


# --- Path equivalence -----------------------------------------------------------------------------

CHUNKS_DIFFER = "chunks see each other wrongly: positions or cache of a later chunk are off"
BATCHES_DIFFER = "a request's logits depend on what else is in the batch: caches are mixed up"
RANKS_DIFFER = (
    "the parts of several processes do not make the whole: a rank has wrong rows of a weight"
)
BACKEND_DIFFERS = "the attention backend does not compute what its float64 reference does"
MOST_TEXTS_DIFFER = "most texts differ with speculation: see check greedy for the first difference"

# --- The main model, by the likelihood of plain text ----------------------------------------------


def temperature_off(least: float, most: float) -> str:
    """least, most: the temperatures at which the kinds of plain text are likeliest."""
    about = f"{least:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f"{least:.2g} to {most:.2g}"
    how = "flat" if most < 1 else "sharp"
    return (
        f"the main model's probabilities are too {how}: {LAST_NORM} or the head is"
        f" about {about} times what it should be"
    )


def unlikely_value(field: str, value: object) -> str:
    """value: a release's."""
    return f"{field} of config.json is no release's, and the model was trained with {value}"


def likelier_value(field: str, found: object, other: object) -> str:
    """other: a value beside the one that was found."""
    return f"{field} of config.json is {found}, and the model was trained with about {other}"


def expert_leans_away(expert: str, cosine: float, usual: float) -> str:
    """cosine, usual: of what it adds with what the others add, and the median of its like."""
    return (
        f"{expert_negated(expert)}: what it adds points away from what the others add (mean cosine"
        f" {cosine:.2f}, where {usual:.2f} is usual)"
    )


def likelier(cause: str, gain: float, change: str) -> str:
    """change: in words that follow "when"."""
    return f"plain text is likelier by {gain:.3f} nats per token when {change}: {cause}"


# --- The export against its source, when both run -------------------------------------------------

ANOTHER_VOCABULARY = "the source has another vocabulary: it is another model"
ANOTHER_EMBEDDING = "the embedding is of another checkpoint"
ANOTHER_ARITHMETIC = "config.json requests other arithmetic than the source's: see above"


def field_differs(field: str, found: object, wanted: object) -> str:
    return f"{field} is {found!r}, the source's {wanted!r}"


def layer_goes_wrong(layer: int, before: float, after: float) -> str:
    return (
        f"layer {layer} is the first to go wrong (error {before:.3f} before it, {after:.3f} after);"
        " check weights names its tensors"
    )


def quantization_noise(error: float) -> str:
    return f"the error grows evenly over the layers to {error:.3f}: quantization noise"


def mtp_part_loses(own: float, source: float) -> str:
    """own, source: acceptance of the drafts of the module and of the source's, on this main."""
    return (
        f"precision: the MTP part loses it, {own:.2f} against the {source:.2f} of the source's"
        " module on this main; check weights names the tensors"
    )


def main_part_loses(cause: str) -> str:
    return f"the main part: {cause}"
