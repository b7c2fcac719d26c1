"""Attention of EXAONE's decoders: most layers attend to the last tokens alone, and the others have
no positions.

Source: transformers' exaone4 and exaone_moe; vLLM's exaone_moe, whose MTP layer has positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.sliding_gqa import SlidingGqa, sliding

_PERIOD = 4  # of layers without a window


def exaone_attention(fields: Fields, layers: int) -> tuple[Sequence[Gqa], Gqa]:
    """Return the attention of each main layer, and that of the MTP layer, which is the first one's
    unless config.json says otherwise (InvalidInputError for a missing or unusable field)."""
    whole = Gqa.of(fields)
    if not fields.has("sliding_window"):
        return [whole] * layers, whole
    window, unplaced = SlidingGqa.of(fields), whole.without_positions()
    usual: Sequence[bool] = ()
    if not fields.has("layer_types"):
        period = fields.without_nulls().whole("sliding_window_pattern", _PERIOD)
        usual = [(index + 1) % period != 0 for index in range(layers)]
    kinds = sliding(fields, layers, usual)
    (of_mtp,) = sliding(fields, 1, kinds[:1], key="mtp_layer_types")
    return [window if slides else unplaced for slides in kinds], window if of_mtp else whole
