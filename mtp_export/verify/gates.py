"""The bounds that a bundle is held against; a report shows them beside its figures."""

from __future__ import annotations

from mtp_export.schemes.storage import Storage

# The least signal-to-quantization-noise ratio of a weight matrix (dB) by the form it was brought
# into, whatever it came from. fp8, int8 and int4 carry their own rounding noise alone: on Gaussian
# weights 31, 42 and 19 dB. Damage (a scale of another block, codes in another order) leaves less
# than 10. Heavy tails cost a few dB, so each bound leaves room.
SQNR_DB: dict[Storage, float] = {
    Storage.BF16: 45.0,
    Storage.FP8_BLOCK: 24.0,
    Storage.INT8_CHANNEL: 28.0,
    Storage.INT4_GROUP: 12.0,
    Storage.W4AFP8: 12.0,
}
# A matrix's root mean square: absolute, and as a ratio to the median of its kind over all layers.
# Trained layers differ by up to 33 in the trained fixture; a scale that is inverted or left out
# makes a factor of 1e3 or more.
RMS_RANGE = (1e-6, 1e2)
RMS_RATIO = 200.0
# The most of a weight's codes that may lie in the outer halves of their range. Weights gather
# around zero; codes whose offset was dropped lie at both ends.
OUTER_CODES = 0.6
# The most fp8 blocks whose largest code may be the largest there is, where scales are powers of
# two: rounding a scale up before quantizing leaves room in most blocks.
FULL_BLOCKS = 0.5
