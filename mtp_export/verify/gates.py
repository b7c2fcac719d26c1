"""Bounds that a bundle is compared with; the report shows them beside its figures.

What quantization may cost depends on the format of the weights alone, which has its own bounds: a
new scheme or format needs no line here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.verification import RunGate
from mtp_checkpoints.layouts import TARGETS
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import BF16, GRAFTED, KEEP

# Weights as the source stores them give the same numbers but for rounding.
UNCHANGED = RunGate(kl_nats=1e-6, top1=0.999, acceptance_points=0.5)

# A matrix's root mean square: absolute, and as a ratio to the median of its kind over all layers.
# Trained layers differ by up to 33 in the trained fixture; a scale that is inverted or left out
# makes a factor of 1e3 or more.
RMS_RANGE = (1e-6, 1e2)
RMS_RATIO = 200.0
# The largest value that any weight has; memory that was never written has larger ones.
LARGEST_VALUE = 1e9
# How far the root mean square of one matrix may be from the nearest of the others of its kind, as a
# ratio, and as the square of that of the largest to the smallest of those: 15 in the trained
# fixtures, in one o_proj of six.
GAP_RATIO = 40.0
# The first of both, of one linear or projection beside all others of a model, which are more: up to
# 1.3 in the trained fixtures.
LINEAR_RATIO = 20.0
# The root mean square of the MTP module's linears over that of the main layers', in the middle of
# their kinds: 0.7 to 1.6 in the trained fixtures. Bf16 that is labelled fp16 makes more than 10.
PART_RATIO = 8.0
# The largest share of a weight's codes that may lie in the outer halves of their range. Weights
# gather around zero: 0.20 of the int4 codes of normal ones lie there, 0.45 of uniform ones. Codes
# whose offset was dropped lie at both ends; so do those of made weights that keep away from zero,
# as benchmarks/make_checkpoint.py's, of which no signs tell the two apart.
OUTER_CODES = 0.6
# The largest share of fp8 blocks whose largest code may be the largest there is, where scales are
# powers of two: rounding a scale up before quantizing leaves room in most blocks.
FULL_BLOCKS = 0.5

# The largest share of a norm's weights that may be negative. A norm that multiplies by w has few;
# the w of 1 + w lies around zero.
NEGATIVE_NORM = 0.25
# The same where no norm of the main model has more than SOME_NEGATIVE: 0 in the trained fixtures.
MANY_NEGATIVE = 0.05
# The smallest median of a norm that multiplies by w, in a model whose others hold the w of 1 + w:
# training moves those too, so that few of a norm's are negative.
MEDIAN_NORM = 0.5
# How far the root mean square of an MTP module's norm may lie outside those of the main layers'
# norms of its name. 1.1 in the trained fixtures.
NORM_RATIO = 10.0
# How many times larger one weight of a norm may be than another, the smallest and the largest tenth
# left out. Normal ones around zero make 13; bits of no meaning 1e7 in fp16 and 1e61 in bf16.
NORM_SPREAD = 2.0**16
# The share of a norm's weights that is negative in an MTP module of 1 + w, where none of any of the
# main layers' is: those hold 1 + w. In the trained miniature it is 0.5 at most in either.
SOME_NEGATIVE = 0.02
# The largest share of zeros in a block of a matrix. Int4 in groups rounds a sixth of a matrix to
# zero, in one scale per row a third; a block that is small beside what shares its scale, all of it.
ZERO_SHARE = 0.75
# How many times larger one half of a projection's columns may be than the other, by their root mean
# squares. Released ones differ 20 to 30 times.
HALF_RATIO = 300.0
# The largest share of a weight that may be as large as its largest element, of one with so many
# between that and zero. Of what is cut off at its median it is half; of ternary ones nothing lies
# between.
MOST_AT_ENDS, LEAST_BETWEEN = 0.3, 0.02
# The largest run of zero rows or columns, in their share. Engines and tools pad by less.
MOST_ZERO_RUN = 0.1
# The same of rows of an embedding or a head: whole ranges may be of tokens that no text has.
MOST_ZERO_TOKENS = 0.25
# The same of elements of a norm that are one value, and not zero.
MOST_FILLED_RUN = 0.25
# How far the sizes of a run of rows or columns in whose order nothing lies are from the others', as
# logarithms, and in standard errors: up to 0.22 and 5.3 in the trained fixtures. And the number of
# weights in which that is damage and not the way a model was made.
LEAST_STEP, LEAST_STEP_ERRORS, MOST_STEPS = 0.3, 8.0, 4
# How large a scale may be beside the upper quartile of those of its matrix. Single weights that are
# far larger than others, as some trained models have, make it tens of times as large.
SCALE_RATIO = 300.0
# How near to a whole number the mean 4-bit code of the middle weight, its zero point taken off,
# must be to tell zero points that are off by it. 0.001 and less in the trained fixtures.
ZERO_POINT_SLACK = 0.25

# How far the correlation of codes and scales may lie above that in plain order: AWQ's words are at
# -0.7, in another order at -0.2.
ORDER_MARGIN = 0.25

# The largest share of a table's squares by which one that was trained on from it differs: in
# another order it is 1 and more. Two released models of one base may be nearer.
TUNED_SHARE = 0.1

# The acceptance of the first draft. A sanity check and no baseline: every known layout bug but the
# mildest falls below it. DeepSeek reports 0.85 to 0.90 for V3 and R1.
LEAST_ACCEPTANCE = 0.5
# What undoing one exchange of experts must give back of a module below that: of the many one is
# better by chance.
LEAST_RISE = 0.05

# The acceptance that spoilt input costs a working module at least, as a share of its drafts: 0.17
# and more in the trained fixture. Modules that are fed wrong in the first place lost at most 0.01
# there, by intervals that end below 0.04 with 368 drafts.
LEAST_LOSS = 0.05

# Temperatures at which plain text may be likeliest. 1.0 and 1.3 in the trained fixtures, on text
# like what they were trained on and unlike it; halving a last norm halves them.
TEMPERATURES = (0.8, 1.8)
# What a model must know of plain text beside chance, in nats per token, to be judged by it.
LEAST_KNOWN_NATS = 1.0
# The most that outputs may lose by calibrated codes beside the nearest ones, along other texts than
# those of the calibration. Sound ones of random models lose up to 0.4, those of a Hessian of
# something else about 5.
MOST_LOST_BY_CALIBRATION_DB = 1.5
# The least gain of a variant under which plain text is likelier, in nats per token.
LEAST_LIKELIER_NATS = 0.001
# The same of one with a value of config.json that is a guess: 0.071 where deepseek-v3-tiny picks
# among half its groups of experts, 0.004 and less in its good bundles.
LEAST_GUESSED_NATS = 0.02
# The same of a model without half of a layer, or with a change in it undone. On the texts that
# judge models of few layers up to 0.012 in the trained fixtures, and 0.050 and more where norms of
# two layers are exchanged.
LEAST_HARM_NATS = 0.03

# The same of a half of a layer in half or twice its size, or with a mix-up undone, where nothing
# else makes it suspected: sizes gain up to 0.041 in good bundles of the trained fixtures, and 0.986
# where a norm of it is another layer's.
LEAST_RESIZED_NATS = 0.1
# The least gain of other texts by training the embedding, the head or half an MTP module on code:
# up to 0.014 in good bundles of the trained fixtures.
LEAST_TRAINED_NATS = 0.02
# The same of half a layer beside all others that are trained: up to 0.001 there.
LEAST_SHARE_NATS = 0.002
# The same of a small tensor, as a norm or a router, beside all small ones: up to 0.0032 there.
LEAST_SMALL_SHARE_NATS = 0.007
# The same of a change undone that the slope points to: up to 0.004 in good bundles.
LEAST_POINTED_NATS = 0.01


def gate_of(manifest_options: Mapping[str, object]) -> tuple[str, RunGate]:
    """The names of a bundle's schemes and its gate, by the options that its manifest records.

    Divergence and agreement are those of main's scheme; acceptance has the looser bound of both
    parts. Raises InvalidInputError for a scheme that is not in SCHEMES.
    """
    base, mtp = (str(manifest_options.get(f"{part}_quant") or KEEP) for part in ("base", "mtp"))
    target = TARGETS.get(str(manifest_options.get("target")))
    if target is not None and target.dequantizes and base == KEEP:
        base = mtp = BF16
    main = _grafted_gate(manifest_options) if base == GRAFTED else _scheme_gate(base)
    draft = _scheme_gate(mtp)
    points = max(main.acceptance_points, draft.acceptance_points)
    return f"{base} + {mtp}", RunGate(main.kl_nats, main.top1, points)


def gate_of_storages(
    main: Collection[str], mtp: Collection[str], source: Collection[str]
) -> tuple[str, RunGate]:
    """The names of the forms that a checkpoint's parts are stored in and its gate: that of main's
    for divergence and agreement, the looser of both for acceptance. Forms that its source has too
    cost nothing."""
    gates = [_loosest(set(part) - set(source)) for part in (main, mtp)]
    points = max(gate.acceptance_points for gate in gates)
    names = " + ".join(", ".join(sorted(part)) for part in (main, mtp))
    return names, RunGate(gates[0].kl_nats, gates[0].top1, points)


def _loosest(storages: Collection[str]) -> RunGate:
    gate = UNCHANGED
    for storage in storages:
        gate = gate.or_looser(FORMATS[storage].gate.run)
    return gate


def _grafted_gate(manifest_options: Mapping[str, object]) -> RunGate:
    """The loosest gate of the forms that a main model quantized by others is stored in."""
    recorded = manifest_options.get("main_storages")
    known = recorded if isinstance(recorded, list) else []
    return _loosest([storage for storage in known if storage in FORMATS])


def _scheme_gate(name: str) -> RunGate:
    """The loosest gate of the forms that a scheme stores weights in."""
    if name == KEEP:
        return UNCHANGED
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise InvalidInputError(
            f"The manifest names the precision scheme {name}, which has no gate",
            expected=f"one of {', '.join(SCHEMES)}, or {KEEP}",
            found=name,
            todo="Verify with the version that made the bundle",
        )
    gate = UNCHANGED
    for storages in scheme.all_storages:
        for storage in storages.values():
            gate = gate.or_looser(FORMATS[storage].gate.run)
    return gate
