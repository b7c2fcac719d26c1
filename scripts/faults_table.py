"""Plant every fault, run verify on it, and write docs/faults.md: the checks that fail for each.

    python scripts/faults_table.py [static] [run] [missing]

Without arguments both tables are made anew; with one, the other table's marks stay. `run` takes a
quarter of an hour; `missing` runs the rows that have no marks yet, as after an interrupted run.
tests/verify/test_verify_faults.py plants the faults of the static table again and compares verify
with their rows; tests/verify/test_run_faults.py and test_runtime_faults.py do so for the check that
a row of the other table names.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "runtime", "checkpoints", "kernels", "tests")]
PAGE = ROOT / "docs/faults.md"
Cells = Mapping[str, Sequence[str]]

STATIC_HEADING, RUN_HEADING = "Files and weights", "What running shows"
DRAFTS_HEADING = "Drafts in folders of their own"
SUSPECTED_HEADING = "Without a source"
_HEAD = """# Planted faults

Written by `python scripts/faults_table.py` from its runs: each fault is planted, `mtp-export
verify` runs with `--source`, and the row shows which checks fail. `–`: the check could not run. Of
the checks, `weights` and `differential` alone look at the source. The report of the check in column
"named by" contains the words of the column after it; "seen as" lists issues of engines and tools
where the fault occurred.
"""
_STATIC = """## {heading}

Planted into a copy of a good bundle of a small model, with a manifest that agrees with the wrong
bytes where an exporter could have written them. A test plants each again and compares the result of
`verify` with its row. The good bundles of every row of the precision table, and of every target,
pass. `tests/verify/test_family_faults.py` plants {others} more, into the bundles of {families}
other families, and `test_damaged_formats.py` damages an MTP layer in {forms} forms.

{count} faults, named: {totals}.
"""
_RUN = """## {heading}

Planted into the trained fixture's bundle, or into the runtime that runs it: one of its functions is
replaced by a wrong one before anything runs, so that plain decoding is wrong too.
`--max-new-tokens {tokens} --k 2`, built-in prompts. The checks `speed` and `stream` have no bounds
of their own. [run_faults.md](run_faults.md) has the faults that `acceptance` names, over 20 seeds
of prompts and without a source. `tests/verify/test_run_faults.py` and `test_runtime_faults.py`
plant each again and compare the cause that the named check reports. A difference that rounding
explains is a near-tie and no fault: a test covers either side.

{count} faults, named: {totals}.
"""
_DRAFTS = """## {heading}

Planted into EAGLE-3 drafts and parallel heads that are fitted to the trained fixture, in a good
bundle. `tests/verify/test_extra_drafts.py` plants each again: the check must fail and say the
words.

{count} faults, named: {totals}.
"""
_SUSPECTED = """## {heading}

Weights and config values that look right, planted into bundles of the trained fixtures, which are
run without `--source`. `tests/verify/test_run_faults.py`, `test_qwen_module_faults.py`,
`test_likelihood.py`, `test_layer_variants.py`, `test_trained.py`, `test_balanced_norms.py`,
`test_cut_off.py` and `test_scaled_runs.py` plant each again: the check must fail and say the words.
`python -m faults.blind` (with tests/ on the path) draws others at random, over fixtures, schemes
and parts, exports each whole and judges it; `python -m faults.good_bundles` does so with good
bundles: of the 273 rows, targets and drafts of the three fixtures that it lists `export` and
`quantize` refuse 172, and the other 101 were judged by files and weights, on plain text, with
halves of layers and MTP modules trained, and on seeds of 16 prompts: each on one of 20 at least,
108 times in all, without a false alarm (66ef052a, on an AMD EPYC, Zen 5; 11 times the numbers were
those of another bundle, whose verdict was taken). Before that training, 342 of these bundles times
seeds had none either (6145a473). All 101 on all 20 seeds were not judged, nor were any by what came
after.

With `--count 30 --seed 52711`, which nobody had seen, 25 change tokens or acceptance by more than
1 %. Each was judged once, in batches of ten with what was missing mended between them: `quantize`
refused 1, a head that is not the main model's; of the other 24, 20 were caught, and 19 rightly
named. What passed is `dt_bias` of two gated delta nets exchanged or of one halved, the rows of a
convolution by turns, and gate and up of a dense MTP layer exchanged; the last three are named
since, in bf16. The columns of tied embeddings exchanged by halves were caught under another name.
With `--seed 4141`, before norms that training keeps alike were compared, 15 of 25 were caught, and
13 rightly named.

With `--seed 90817` 23 faults were drawn and judged once, all by one version, before anybody saw the
draw: 20 change tokens or acceptance by more than 1 %, 14 were caught, and 14 rightly named. What
passed is `dt_bias` of a gated delta net halved and the rows of `in_proj_b` of one in reverse order,
which were named then in bf16, before layers were judged on more text; the norms of two main layers
exchanged, twice, of which those before MLPs are named since; a norm of a main layer doubled, which
changes 6 % of the tokens; and the norm of hidden states of an MTP layer halved, which costs 0.022
of the acceptance.

With `--seed 640213` six faults were drawn before the time was up, and judged once by one version,
each until a check named it: four change tokens or acceptance by more than 1 %, all four were
caught, and three rightly named. Keys in the place of the gate of an expert were said to be its rows
moved back by 26, which they are not since.

Since then a fault has its parameters drawn too (`tests/faults/drawn_faults.py`): any factor, number
of places, part, rank or field, over three fixtures, and what names it is written down with its
kind. With `--seed 730461` 64 were drawn and judged once by one version (b53df25e), before anybody
saw the draw: `quantize` refused 3, embeddings that are not the main model's, and one changed no
value. With the source all other 60 were caught and named, 59 with the words of their kind alone; a
vector that was cut off to one value is called constant. Without it, of the 49 that change tokens or
acceptance by more than 1 %, 30 were caught (61 %: 18 of 22 in MTP layers, 12 of 27 in main layers),
and 22 named (45 %), 17 with the words of their kind alone. Two more were, by `in_proj_a` and its
like, which the words for their place had left out. Of what passed or had another name, five are
named since, tried in bf16: `num_experts_per_tok` doubled, the columns of a router by halves
exchanged, those of `down_proj` of a shared expert moved by two, `down_proj` of a dense layer times
a fifth, and columns of `o_proj` of an MTP layer moved, which does harm. With these, at b1033ac2,
`--seed 285517` drew 30: `quantize` refused 2, one changed no value, all other 27 were caught and
named with the source; without it, of 22 that change more than 1 %, 16 were caught (73 %), and 12
named (55 %). What passes are mostly adapters, noise and values cut off, norms in another order, and
changes of attention in main layers.

Since halves of main layers are trained, as [run_checks.md](run_checks.md) says, 13 faults of main
layers of these two seeds that had passed were planted again in bf16: 7 are caught, and 5 of these
were seen to be named, routers, noise, adapters and values cut off among them. With `--seed 914027`
26 were drawn before the time was up (numbers 0 to 6, 22 to 29 and 37 to 47) and judged once
(bab2d683, the first seven before two halves were looked into), before anybody saw the draw:
`quantize` refused 2; with the source all other 24 were caught and named; without it, of 19 that
change more than 1 %, 13 were caught (68 %; 5 of 9 in main layers), and 11 named (58 %). One of
them, values in the place of a shared expert's `up_proj`, training alone found. 21 good bundles, of
two fixtures in 12 pairs, were judged by training alone without alarm: no half gained more than
0.013 nats. All on an AMD EPYC (Zen 5).

Since the first MTP module is trained too, and all in steps of two fifths of the size, `--seed
660417` drew 16 before the time was up (numbers 0 to 6 and 20 to 28), judged once at 9cc94391:
with the source all 16 were caught and named; without it, of 12 that change more than 1 %, 10 were
caught (83 %: 5 of 5 in MTP layers, 5 of 7 in main layers), and 7 named (58 %: 5 and 2). Training
alone found a norm before a feed-forward and a `k_norm` that are another layer's; of a module
whose `gate_proj` was exchanged, which the ledger named, it blamed `eh_proj`. What passed are
`gate_proj` of one expert transposed and an adapter in `down_proj` of a shared expert, which
change 6 and 5 % of the tokens. Caught under another name were changes of `out_proj` of a gated
delta net, twice, for which a change of another tensor of that half makes up in part, and
`up_proj` of two layers exchanged. On an AMD EPYC (Zen 5).

Since what is cut off or lost in part is named by its values, the embedding and the head are trained
too, and parts of models that know no text are named, `--seed 503217` drew 44 before the time was
up, judged once (124a6848, before it was put on later commits), before anybody saw the draw:
`quantize` refused 2; with the source all other 42 were caught and named; without it, of 33 that
change more than 1 %, 27 were caught (82 %: 15 of 15 in MTP layers, 12 of 18 in main layers), and 26
named (79 %: 15 and 11), 20 with the words of their kind alone. One of them, the columns of the
embedding in reverse order, is what another seed had drawn before, and had been mended. What passed
are `topk_group` halved and doubled in deepseek-v3-tiny, noise in a router, which changes 11 % of
the tokens, and three of attention that change 1 to 3 %: `k_norm` in the place of `q_norm`, columns
of `k_proj` times a fifth, a bias of queries without signs. Rows of a shared expert's `gate_proj` by
turns were caught as a feed-forward of another layer. Of good bundles of two fixtures 26 were judged
by their values, 24 by training the embedding and the head, and 6 by all of plain text, without
alarm: the embedding gained up to 0.010 nats, and the head nothing. On an AMD EPYC (Zen 5), beside
other work. Since other numbers of groups are tried, the half of `topk_group` is caught and named.
So are the columns of `k_proj` since runs of another size are looked for.

Since the slope of the loss points to changes that are undone, `--seed 950399` drew 26 before the
time was up (numbers 0 to 14 and 24 to 34), judged once at 0ee3744f, before anybody saw the draw:
one changed no value, with the source all other 25 were caught and named; without it, of 23 that
change more than 1 %, 18 were caught (78 %: 8 of 10 in MTP layers, 10 of 13 in main layers), and
named, 15 with the words of their kind alone. Since layers are trained together too, `--seed 919123`
drew 48, judged once at 139f7940, none seen before: `quantize` refused 3, one changed no value; with
the source all other 44 were caught and 43 named; without it, of 35 that change more than 1 %, 33
were caught (94 %: 9 of 10 in MTP layers, 24 of 25 in main layers), and 25 named (71 %: 9 and 16),
23 with the words of their kind alone; none of the 35 is of deepseek-v3-tiny, whose 61 layers are
not trained. What passed are noise in the shared expert's `gate_proj`, which changes 9 % of the
tokens, and two blocks of rows of the `down_proj` of an MTP layer's exchanged. Named wrongly are
`dt_bias` of a gated delta net, three times (one cut off to one value is called constant), a bias of
queries less 1 and shuffled columns of `q_proj` (as `q_proj` times a factor and negated), a router
that is negated (as the embedding), a norm with noise (as one in another order), and a part of the
last norm twice its size (as columns of the head, which do the same). Of good bundles of two
fixtures, 14 were judged by what slopes point to, without alarm: none gained more than 0.004 nats.

Since the small tensors of the half that gains most are looked into as well, `--seed 37255` drew 48,
judged once at 14635ad3, none seen before: 45 were exported, all of them caught and named with the
source; without it, of 37 that change more than 1 %, 28 were caught (76 %: 12 of 15 in MTP layers,
16 of 22 in main layers), and 26 named (70 %), all with the words of their kind alone. What passed
are three changes of norms before a feed-forward or attention, shuffled columns of `q_proj`, two
numbers of a router of eight experts, and in MTP layers a transposed `q_proj`, blocks of a shared
expert's rows and a last norm plus 1, which change its drafts by 3 to 5 of 100. By the same gates
both seeds together have 61 of 72 caught (85 %). At 139f7940, 48 good bundles (30 of DeepSeek's
miniature, 18 of GLM-4.5's) were judged by plain text without alarm.
All on an AMD EPYC (Zen 5), beside other work.

Of the six faults of MTP layers that these three seeds let pass, five are named since slopes are
taken, and sizes judged, at the temperature that fits a module (b74a57ae): the four in GLM-4.5's
cost 0.02 to 0.07 nats, and slopes led to what makes drafts less certain, which gained 0.4 and more.
They were seen before, so this says nothing of others. Noise in `kv_b_proj` of the MTP layer of
deepseek-v3-tiny, which changes its drafts by 5 of 100, still passes: that module is not trained.

What 18 faults of main layers of GLM-4.5's and Qwen3.5's miniatures cost that seeds 771204, 950399,
919123 and 37255 let pass, in nats per token of 96 passages of plain code, beside the good bundle in
its row: six are within their interval of nothing, or better than what they damaged (they are in the
table below), three cost 0.004 to 0.006 (a row of a router, an adapter in `k_proj`, a norm of a
delta net in another's place), and nine 0.008 to 0.036. `blind` now writes down what a fault costs
in bf16. Since small tensors are trained together too, one of the nine, a norm before a feed-forward
that is another layer's, is caught and named; the router that is negated is named now. Small
tensors of 24 good bundles of two fixtures share up to 0.0032, and more than 0.007 is a failure.
All on an AMD EPYC (Zen 5), beside other work.

Since small tensors of all layers are trained together too, and modules are judged at the
temperature that fits them, `--seed 420631` drew 72 (numbers 0 to 71), judged once at 870e6925:
`quantize` refused 3, two changed no value; with the source all other 67 were caught and named;
without it, of 62 that change more than 1 %, 56 were caught (90 %: 25 of 27 in MTP layers, 31 of 35
in main layers), and 51 named (82 %: 25 and 26), 50 with the words of their kind alone. What passed
are shuffled columns of `q_proj` in GLM-4.5's MTP layer, twice, which change 3 to 4 of 100 drafts, a
reversed `A_log`, which costs 0.004 nats, and three that cost nothing that plain code could show: a
norm before attention by blocks, another layer's bias of queries, and another router's bias. Named
wrongly are `partial_rotary_factor`, twice, which is found since by more text, twice values of
`A_log` and `dt_bias` in each other's place, and `num_experts_per_tok`. At 870e6925 and before, 101
good bundles were judged by themselves and on 4 to 20 of 20 seeds of prompts, and at dfbd4e70 those
on the others: 2,020 in all, each bundle on every seed, without alarm. Since tensors that slopes say
to be in each other's place are tried so (until b1bebd4a one was tried as a copy of the other), and
values of routing by more text, the values of `A_log` and `dt_bias` that were exchanged, and not
copied, and the experts per token are named as what they are; by slopes alone none of 22 good
bundles, 11 of either small fixture, gains more than 0.0042 nats in a main model (18 at b1bebd4a,
four with that exchange alone). All on an AMD EPYC (Zen 5), beside other work.

Two more seeds, each judged once. `--seed 78988` at dfbd4e70: of 72, `quantize` refused 2 and three
changed no value; with the source the other 67 were caught and 66 named; without it, of 49 that
change more than 1 %, 44 were caught (90 %: all 17 in MTP layers, 27 of 32 in main layers) and 41
named (84 %). Then copies among matrices that are never quantized, changes of a last norm beside
what training betters, exchanged tensors that slopes point to, and training of an MTP module whose
drafts nothing undone mends were added, and `--seed 589083` was judged at 9d87d418: of 64, one was
refused and two changed no value; with the source the other 61 were caught and named; without it, of
48 that change more than 1 %, 44 were caught (92 %: all 18 in MTP layers, 26 of 30 in main layers)
and 41 named (85 %: 17 and 24), 40 with the words of their kind alone. What passed are the columns
of `in_proj_a` in reverse order (0.008 nats), `in_proj_a` and `in_proj_b` in each other's place
(0.006), blocks of a router's bias (nothing), and `q_proj` times 0.22 in int4 (0.017); named wrongly
are noise in an `up_proj` (the embedding), `eh_proj` times 5.8 (a norm), and, by its words, taps
moved by one, which are said to stand for a token later. There 101 good bundles by themselves, and
26 by plain text, every row of both small fixtures, gave no alarm. Level run and diagnosis together
of three of these faults take 113 s (the module of 61 layers trained), 82 and 57, of the good
DeepSeek-V3 miniature 41, at real-time priority. All on an AMD EPYC (Zen 5), beside other work.

Of the 16 experts of GLM-4.5's miniature with the rows of `down_proj` by turns 4 are named: without
one of the others plain text is likelier by less than the 0.03 nats that are asked for.

Of 40 damaged folders of others that were drawn at random and judged before anybody saw the draw,
one passed for a reason that stays: rotary rows of queries and keys in another order, in the MTP
layer of Qwen3.5's miniature, which drafts as well without them in order (0.745 of its drafts are
accepted, and 0.745 of the released layer's). With the source, check `weights` names it.

{count} faults, named: {totals}.
"""
# Changes of the trained fixture that nothing but its source shows to be faults, and why.
_UNDETECTABLE = (
    ("the MTP layer's two norms exchanged", "acceptance stays the same, 0.827 and 0.826"),
    (
        "the MTP router's bias negated",
        "it sends 9 % of the rows to other experts, and moves acceptance by 0.001",
    ),
    (
        "rms_norm_eps 1e-2 in glm4-moe-tiny",
        "reported; plain text is likelier by 0.002 nats with the release's, less than its interval",
    ),
    (
        "topk_group doubled in deepseek-v3-tiny",
        "3 % of the tokens change, and plain code is as likely under the good model: 0.002 nats"
        " more, and 0.004 less to 0.008 more by its interval",
    ),
    ("one expert of the MTP layer halved", "acceptance falls by 0.01, less than its interval"),
    (
        "dt_bias of two gated delta nets of qwen3-5-tiny exchanged",
        "1.5 % of the tokens change, and plain text is as likely under the good model: 0.001 nats"
        " less, and 0.004 less to 0.003 more by its interval",
    ),
    (
        "k_proj of the second layer of glm4-moe-tiny halved, whose bias is not",
        "1.4 % of the tokens change, and plain text is as likely under the good model: 0.001 nats"
        " less, and 0.007 less to 0.005 more by its interval",
    ),
    (
        "k_norm of the second layer of glm4-moe-tiny by turns from four parts, in int8",
        "1.9 % of the tokens change, and `ledger` and `likelihood` pass",
    ),
    (
        "v_proj.bias of the first layer of glm4-moe-tiny negated",
        "1.4 % of the tokens change, and plain text is as likely under the good model: "
        "0.0004 nats more, and 0.0012 less to 0.0020 more by its interval",
    ),
    (
        "post_attention_layernorm of the second layer of glm4-moe-tiny shuffled, in int8",
        "2.5 % of the tokens change, and plain text is as likely under the good model: "
        "0.0014 nats more, and 0.0013 less to 0.0040 more by its interval",
    ),
    (
        "input_layernorm of the first layer of glm4-moe-tiny cut off at 0.59, in int4",
        "2.6 % of the tokens change, and plain text is as likely under the good model: "
        "0.0032 nats less, and 0.0056 to 0.0007 less by its interval",
    ),
    (
        "the bias of a router of glm4-moe-tiny rolled by 7 of 8, in fp8",
        "1.4 % of the tokens change, and plain text is as likely under the good model: "
        "0.0005 nats less, and 0.0027 less to 0.0018 more by its interval",
    ),
    (
        "input_layernorm of the first layer of glm4-moe-tiny as its q_proj.bias, in int4",
        "4.9 % of the tokens change, and plain text is as likely under the good model: "
        "0.0023 nats more, and 0.0006 less to 0.0053 more by its interval",
    ),
    (
        "q_norm of the first layer of glm4-moe-tiny in the place of the second's, in int8",
        "4.1 % of the tokens change, and plain text is as likely under the good model: "
        "0.0001 nats more, and 0.0025 less to 0.0028 more by its interval",
    ),
    (
        "an adapter of rank 3 or 4 merged into one linear of deepseek-v3-tiny's MTP layer",
        "acceptance falls by 0.045 to 0.088, and nothing that is undone gives it back",
    ),
    (
        "at level `weights`, input_layernorm of the MTP layer exchanged with a main layer's",
        "both are sound norms, and the ranks of the elements of a good one and of the columns that"
        " read it are correlated by no more than 0.03 in glm4-moe-tiny",
    ),
)


def table(static: Cells, run: Cells) -> str:
    """The page, from the marks of each fault by name."""
    lines = (
        *(_HEAD, *_static_lines(static), "", *_run_lines(run), "", *_draft_lines()),
        *("", *_suspected_lines()),
    )
    return "\n".join(lines) + "\n"


def _static_lines(found: Cells) -> Iterator[str]:
    from faults.faults import FAULTS
    from faults.matrix import STATIC
    from verify.test_damaged_formats import FORMS
    from verify.test_family_faults import OTHERS, faults_of

    yield _STATIC.format(
        heading=STATIC_HEADING,
        others=sum(len(faults_of(model_type)) for model_type in OTHERS),
        families=len(OTHERS),
        forms=len(FORMS),
        count=len(FAULTS),
        totals=_totals([fault.caught_by for fault in FAULTS]),
    )
    yield from _header("fault", "bundle", *STATIC)
    for fault in FAULTS:
        yield _row(fault.name, (fault.needs, *found[fault.name]), fault)


def _run_lines(found: Cells) -> Iterator[str]:
    from faults.matrix import NOTHING, RUN, RUN_TOKENS
    from faults.run_faults import RUN_FAULTS
    from faults.runtime_faults import RUNTIME_FAULTS

    faults = (*RUN_FAULTS, *RUNTIME_FAULTS)
    totals = _totals([fault.caught_by for fault in faults])
    text = _RUN.format(heading=RUN_HEADING, count=len(faults), totals=totals, tokens=RUN_TOKENS)
    yield text
    yield from _header("fault", "planted into", *RUN)
    yield f"| {NOTHING} | – | {' | '.join(found[NOTHING])} | – | – | – |"
    for fault in faults:
        place = "bundle" if fault in RUN_FAULTS else "runtime"
        yield _row(fault.name, (place, *(found[fault.name] or [""] * len(RUN))), fault)


def _draft_lines() -> Iterator[str]:
    from faults.draft_faults import DRAFT_FAULTS

    totals = _totals([fault.caught_by for fault in DRAFT_FAULTS])
    yield _DRAFTS.format(heading=DRAFTS_HEADING, count=len(DRAFT_FAULTS), totals=totals)
    yield "| fault | draft | named by | which says |"
    yield "|---|---|---|---|"
    for fault in DRAFT_FAULTS:
        yield f"| {fault.name} | `{fault.method}` | `{fault.caught_by}` | {fault.cause} |"


def _suspected_lines() -> Iterator[str]:
    from faults.suspected_faults import (
        SCALED_RUN_FAULTS,
        SUSPECTED_FAULTS,
        SUSPECTED_LAYER_FAULTS,
        SUSPECTED_MAIN_FAULTS,
        SUSPECTED_NORM_FAULTS,
        SUSPECTED_QWEN_FAULTS,
        SUSPECTED_VALUE_FAULTS,
        TRAINED_LAYER_FAULTS,
    )

    of_modules = (*SUSPECTED_FAULTS, *SUSPECTED_QWEN_FAULTS)
    of_main = (*SUSPECTED_MAIN_FAULTS, *SUSPECTED_LAYER_FAULTS, *TRAINED_LAYER_FAULTS)
    of_values = (*SUSPECTED_NORM_FAULTS, *SUSPECTED_VALUE_FAULTS, *SCALED_RUN_FAULTS)
    faults = (*of_modules, *of_main, *of_values)
    totals = _totals([fault.caught_by for fault in faults])
    yield _SUSPECTED.format(heading=SUSPECTED_HEADING, count=len(faults), totals=totals)
    yield "| fault | named by | which says |"
    yield "|---|---|---|"
    for fault in faults:
        yield f"| {fault.name} | `{fault.caught_by}` | {fault.cause} |"
    yield "\nNot found, since what runs is as good as before, or values do not tell:\n"
    yield "| change | why |"
    yield "|---|---|"
    for change, why in _UNDETECTABLE:
        yield f"| {change} | {why} |"


def _totals(checks: Sequence[str]) -> str:
    return ", ".join(f"{count} by `{check}`" for check, count in Counter(checks).items())


def _header(*columns: str) -> Iterator[str]:
    names = (*columns, "named by", "which says", "seen as")
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)


def _row(name: str, first: Sequence[str], fault: object) -> str:
    caught_by, cause, seen_as = (getattr(fault, k) for k in ("caught_by", "cause", "seen_as"))
    return f"| {name} | {' | '.join(first)} | `{caught_by}` | {cause} | {seen_as or '–'} |"


def cells_of(page: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The marks on a page: of the static table, and of the one of runs."""
    from faults.faults import FAULTS
    from faults.matrix import NOTHING, RUN, STATIC, pages_cells
    from faults.run_faults import RUN_FAULTS
    from faults.runtime_faults import RUNTIME_FAULTS

    run_names = [NOTHING, *(fault.name for fault in (*RUN_FAULTS, *RUNTIME_FAULTS))]
    return (
        {
            f.name: pages_cells(page, heading=STATIC_HEADING, name=f.name, count=len(STATIC))
            for f in FAULTS
        },
        {
            name: pages_cells(page, heading=RUN_HEADING, name=name, count=len(RUN))
            for name in run_names
        },
    )


def main() -> None:
    from faults.faults import FAULTS
    from faults.matrix import Bundles, executed, run_rows

    chosen = sys.argv[1:] or ["static", "run"]
    static, run = cells_of(PAGE.read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundles = Bundles(folder / "small")
        for number, fault in enumerate(FAULTS):
            if "static" in chosen or ("missing" in chosen and not static[fault.name]):
                aside = folder / f"fault{number}"
                static[fault.name] = executed(fault, bundles, aside / "bundle")
                _tell(fault.name, static[fault.name])
        PAGE.write_text(table(static, run))
        done = [row for row, marks in run.items() if marks] if "missing" in chosen else []
        if "run" in chosen or "missing" in chosen:
            for row, marks in run_rows(folder, done):
                run[row] = marks
                _tell(row, marks)
                PAGE.write_text(table(static, run))


def _tell(name: str, marks: Sequence[str]) -> None:
    sys.stderr.write(f"{name}: {' '.join(marks)}\n")


if __name__ == "__main__":
    main()
