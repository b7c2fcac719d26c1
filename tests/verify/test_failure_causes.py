"""Failures of one cause are told once, with the words of the check that knows most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cases import read_json
from mtp_checkpoints.errors import VerificationError
from mtp_checkpoints.families import family_of
from mtp_export.verify.check import (
    ENGINE,
    EQUAL,
    GAIN,
    UNDONE,
    CheckResult,
    Item,
    Problem,
    failed,
    passed,
    verdict,
)
from mtp_export.verify.evidence.names_here import with_module_names
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.failures import Cause, causes_of, repairs
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.verdict import raise_if_failed
from verify.foreign import FIXTURES

GATE, UP = "model.layers.8.mlp.gate.weight", "model.layers.8.mlp.up.weight"
PARTS = ("main", "mtp")
PAIRS = (("main", UP), ("mtp", GATE))
SHARD = "mtp/model-00001-of-00002.safetensors"


def report_of(**checks: list[Item]) -> Report:
    """A report by the items of its checks."""
    results = tuple(CheckResult(name, name, tuple(items), 1.0) for name, items in checks.items())
    return Report(VerifyOptions(Path("out/bundle")), {"kind": "bundle"}, results, 1.0)


def message_of(report: Report) -> str:
    """The message of the error that a report ends a command with."""
    with pytest.raises(VerificationError) as failure:
        raise_if_failed(report)
    return str(failure.value)


def wrong(name: str, words: str, *subjects: str) -> Item:
    return verdict(name, [Problem(subject, f"{subject} {words}") for subject in subjects])


def of_engine(name: str, *subjects: str) -> Item:
    item = wrong(name, "is read otherwise", *subjects)
    return failed(name, item.cause, subject=subjects[0], data={**item.data, ENGINE: "sglang"})


def causes(**checks: list[Item]) -> list[Cause]:
    return causes_of(report_of(**checks))


def test_the_comparison_with_the_source_tells_it_for_checks_without_one() -> None:
    """And checksums tell it for both."""
    guess, known = wrong("sizes", "is large", GATE), wrong("copies", "is inverted", GATE)
    (one,) = causes(ledger=[guess, passed("other")], weights=[known])
    assert one.words == [f"{GATE} is inverted"]
    assert one.title == "ledger, sizes; weights, copies"
    changed = wrong("checksums", "was changed", GATE, UP)
    (one,) = causes(files=[changed], ledger=[guess], weights=[known])
    assert one.words == [f"{GATE} was changed; likewise {UP}"] and len(one.items) == 3


def test_another_tensor_is_another_cause() -> None:
    found = causes(ledger=[wrong("sizes", "is large", GATE)], weights=[wrong("c", "x", UP)])
    assert [cause.title for cause in found] == ["ledger, sizes", "weights, c"]
    found = causes(files=[wrong("a", "is gone", GATE), wrong("b", "is short", UP)])
    assert len(found) == 2
    found = causes(files=[wrong("a", "is gone", GATE)], weights=[wrong("b", "is late", GATE, UP)])
    assert len(found) == 2, "the source explains what weights show, not files"
    found = causes(
        greedy=[failed("a", "one", subject=GATE)], paths=[failed("b", "2", subject=GATE)]
    )
    assert len(found) == 2, "what decoding shows has causes of its own"


def test_of_a_config_every_check_says_what_it_found() -> None:
    """Whatever the place that it is named by."""
    main = failed("config", "config.json is odd", subject="out/bundle/main/config.json")
    mtp = failed("draft", "config.json is odd", subject="out/bundle/mtp/config.json")
    both = wrong("config is the source's", "has 3", "main/config.json", "mtp/config.json")
    (one,) = causes(files=[main, mtp], weights=[both])
    odd = "out/bundle/main/config.json: config.json is odd"
    assert one.words == [odd, "main/config.json has 3; likewise mtp/config.json"]


def test_several_causes_explain_an_item_together() -> None:
    main, mtp = (
        wrong("yarn", "lacks yarn", "main/a.json"),
        wrong("sizes", "has other sizes", "mtp/a.json"),
    )
    both = wrong("config", "differs", "main/a.json", "mtp/a.json")
    assert [len(cause.items) for cause in causes(files=[main, mtp], weights=[both])] == [2, 1]


def test_shards_that_two_checks_name_are_one_cause() -> None:
    other = SHARD.replace("1-of", "2-of")
    opened, sizes = wrong("headers", "is cut", SHARD), wrong("shards", "is short", SHARD, other)
    (one,) = causes(files=[opened, sizes])
    assert one.words == [f"{SHARD} is cut"]


@pytest.mark.parametrize(
    ("words", "count"), [(f"Tensor {GATE}_scale: missing", 1), ("No space left", 2)]
)
def test_a_model_that_does_not_load_follows_from_what_it_names(words: str, count: int) -> None:
    load = failed("runtime loads it", words, subject="out/bundle/mtp")
    assert len(causes(files=[wrong("mtp: tensors", "is missing", GATE)], ledger=[load])) == count


def test_an_engine_has_its_own_names_for_the_tensors_of_a_part() -> None:
    own = GATE.replace("layers.8", "decoder")
    main = wrong("main: precision", "is bf16", GATE.replace("8", "2"))
    mtp, engine = wrong("mtp: precision", "is int8", GATE), of_engine("mtp: as SGLang reads", own)
    first, second = causes(files=[main, mtp, engine])
    assert first.title == "files, main: precision"
    assert second.title == "files, mtp: precision; files, mtp: as SGLang reads"
    assert second.words == [f"{GATE} is int8"]
    assert len(causes(files=[main, engine])) == 2


def test_what_users_fill_in_is_explained_with_the_command() -> None:
    command = "mtp-export --input-dir SOURCE --output-dir out/bundle --overwrite"
    report = report_of(files=[failed("a", "b", repair=command), failed("c", "d", repair="cp x y")])
    title = "To repair (SOURCE: the checkpoint that it was made from):"
    assert repairs(report) == {command: title, "cp x y": "To repair:"}
    lines = message_of(report).splitlines()[1:]
    assert lines == [
        "- files: a: b",
        title,
        f"  {command}",
        "- files: c: d",
        "To repair:",
        "  cp x y",
    ]
    alone = message_of(report_of(files=[failed("a", "b", repair=command)]))
    assert alone.endswith(f"run {command} (SOURCE: the checkpoint that it was made from).")


def test_what_is_wrong_in_both_parts_alike_is_one_cause() -> None:
    """The place of a second one is told, with its figures left out."""
    lacks = "no tokenizer: {0}/ has none of tokenizer.json, *.model"
    parts = [failed(f"{p}: tokenizer", lacks.format(p), subject=f"out/bundle/{p}") for p in PARTS]
    (one,) = causes(files=parts)
    assert one.words == [f"out/bundle/main: {lacks.format('main')}", "likewise mtp"]
    other = failed("mtp: tokenizer", "has 3 ids", subject="out/bundle/mtp")
    assert len(causes(files=[parts[0], other])) == 2


def test_of_many_tensors_the_same_is_said_once() -> None:
    late = [Problem(f"a.{n}.w", f"a.{n}.w is not it (4{n} dB): rounded late") for n in range(3)]
    rest = [Problem(f"b.{n}.w", f"b.{n}.w is not it (31.5 dB)") for n in range(40)]
    (one,) = causes(weights=[verdict("c", [*late, *rest, Problem("d.w", "d.w is gone")])])
    said = "a.0.w is not it (40 dB): rounded late; likewise a.1.w, a.2.w; d.w is gone; and 40 more"
    assert one.text == said


def test_names_that_the_same_is_said_of_are_counted_each_once() -> None:
    """Those of experts by one name, of each sentence apart; a tensor that is named twice, once."""
    norms = [Problem(f"{n}.norm", f"{n}.norm is w") for n in "abcdefb"]
    experts = [Problem(f"m.experts.{n}.up", f"m.experts.{n}.up is zero") for n in range(4)]
    (one,) = causes(ledger=[verdict("c", [*norms, *experts])])
    assert one.text == (
        "a.norm is w; likewise b.norm, c.norm, d.norm and 2 more; m.experts.0.up is zero;"
        " likewise m.experts.1-3.up"
    )


def test_of_several_layers_in_the_place_of_others_each_is_named() -> None:
    twins = [(f"m.3.{part}", f"m.{n}.{part}") for n, part in ((1, "attn"), (2, "mlp"))]
    problems = [
        Problem(f"{own}.{name}", f"{own} holds the same as {other} (2 linears)")
        for own, other in twins
        for name in ("a", "b")
    ]
    (one,) = causes(ledger=[verdict("c", problems)])
    assert one.text == "; ".join(
        f"{own} holds the same as {other} (2 linears)" for own, other in twins
    )


def test_what_one_more_item_says_the_same_of_is_named_by_what_is_new() -> None:
    def zero(*names: str) -> Item:
        return verdict("c", [Problem(name, f"{name} is zero") for name in names])

    (one,) = causes(ledger=[zero("a.w", "b.w"), zero("a.w", "b.w", "c.w", "d.w")])
    assert one.text == "a.w is zero; likewise b.w; likewise c.w, d.w"


@pytest.mark.parametrize(
    ("source", "here"),
    [
        ("qwen3-5-tiny", " (here eh_proj is mtp.fc, enorm is mtp.pre_fc_norm_embedding)"),
        ("glm4-moe-tiny", ""),
    ],
)
def test_a_modules_parts_are_told_by_the_names_that_its_family_has(source: str, here: str) -> None:
    words = "the embedding half of eh_proj, or enorm, is about 4 times what it should be"
    family = family_of(read_json(FIXTURES / source / "config.json"))
    (one,) = causes(acceptance=[with_module_names(family, failed("m", words))])
    assert one.text == words + here


def test_experts_that_lie_apart_are_told_by_runs_and_many_by_their_number() -> None:
    def told(*numbers: int) -> str:
        names = [f"m.experts.{n}.up" for n in numbers]
        (one,) = causes(ledger=[verdict("c", [Problem(n, f"{n} is zero") for n in names])])
        return one.text.removeprefix("m.experts.0.up is zero; likewise ")

    assert told(0, 3, 4, 5, 9) == "m.experts.3-5,9.up"
    assert told(0, 2, 4, 6, 8, 10) == "m.experts.*.up (5)"


def test_the_source_explains_what_weights_alone_show() -> None:
    """Though the comparison finds more than was seen without it."""
    seen = [wrong(f"{part}: codes", "is full", name) for part, name in PAIRS]
    compared = [wrong(f"{part}: copies", "is late", name, f"{name}.o") for part, name in PAIRS]
    (one,) = causes(ledger=seen, weights=compared)
    assert one.title == "ledger, main: codes; ledger, mtp: codes; weights, main: copies; and 1 more"
    assert one.text == (
        f"{UP} is full; likewise {GATE}; {UP} is late; likewise {UP}.o; likewise {GATE}, {GATE}.o"
    )


def test_the_message_has_a_line_per_cause_and_each_command_once() -> None:
    """Below the last of those in a row that it mends; of an item alone it is one paragraph."""
    places = [(part, f"{part}/a.json") for part in PARTS]
    gone = [
        failed(f"{part}: files", f"{file} is gone", subject=file, repair="mend all")
        for part, file in places
    ]
    report = report_of(files=gone, paths=[failed("chunks", "differ", figure="3", bound="2")])
    first, *lines = message_of(report).splitlines()
    what = "Verification failed in 3 of 3 items (out/bundle). Found 2 causes."
    assert first == f"{what} Do not ship this bundle."
    assert lines == [
        "- files, main: files; files, mtp: files: main/a.json is gone; likewise mtp/a.json",
        "To repair:",
        "  mend all",
        "- paths: chunks 3 against 2: differ",
    ]
    alone = message_of(report_of(files=[failed("a", "b", subject="c", figure="1", bound="2")]))
    found = "Verification failed in 1 of 1 items (out/bundle). Found files: a (c) 1 against 2: b."
    assert alone == f"{found} Do not ship this bundle; export it again from a checked source."


def test_a_command_for_all_is_the_last_line() -> None:
    names = "abcdefg"
    report = report_of(paths=[failed(name, f"{name} {name}", repair="mend it") for name in names])
    lines = message_of(report).splitlines()[1:]
    assert lines[:5] == [f"- paths: {name}: {name} {name}" for name in names[:5]]
    assert lines[5:] == [
        "To repair:",
        "  mend it",
        "and 2 more causes: --html FILE.html shows each",
    ]
    without = report_of(paths=[failed(name, name * 2) for name in names[:2]])
    assert message_of(without).splitlines()[0].endswith("export it again from a checked source.")


def test_a_graft_is_no_repair_of_what_the_main_model_shares() -> None:
    """Both layers hold each other's weights: the MTP layer's part alone is not offered."""
    graft = "mtp-export graft --main a --mtp b --output-dir c --replace"
    main = wrong("main: weights", "holds another's", UP)
    mtp = replace(wrong("mtp: copied weights", "holds another's", GATE), repair=graft)
    assert repairs(report_of(weights=[main, mtp])) == {}
    assert [*repairs(report_of(weights=[mtp]))] == [graft]


@pytest.mark.parametrize("equal", [1, 2])
def test_what_drafts_show_explains_what_several_explain_of_the_module(equal: int) -> None:
    several = failed("no part of the MTP module gains", "a; or b; or c", data={EQUAL: 3})
    main = failed("no part of the main model gains", "d; or e", data={EQUAL: 2})
    drafts = failed("no other layout drafts better", "enorm is hnorm", data={EQUAL: equal})
    found = causes(likelihood=[several, main], acceptance=[drafts])
    if equal == 1:
        assert [cause.text for cause in found] == ["enorm is hnorm", "d; or e"]
    else:
        assert len(found) == 3


@pytest.mark.parametrize(("gain", "count"), [(0.1, 1), (0.5, 2)])
def test_what_drafts_show_explains_what_gives_back_some_of_it(gain: float, count: int) -> None:
    """Any part of a damaged module makes up for some of it, none for more than it costs."""
    trained = failed(
        "no part of the MTP module gains", "eh_proj does harm", data={EQUAL: 1, GAIN: gain}
    )
    undone = {UNDONE: [{"change": "gate and up", "gain": {"value": 0.3}}], EQUAL: 1}
    drafts = failed("no other layout drafts better", "gate is up", data=undone)
    found = causes(likelihood=[trained], acceptance=[drafts])
    assert len(found) == count and found[-1].text == "gate is up"


def test_thousands_of_failed_items_are_grouped_as_a_few_are() -> None:
    many, few = 3000, 30
    names = [f"model.layers.{n}.mlp.gate.weight" for n in range(many)]
    words = ["is " + "x" * min(n, few) for n in range(many)]
    seen = [failed(f"seen {n}", "q" * (n + 1), subject=names[n]) for n in range(few)]
    compared = [wrong(f"compared {n}", words[n], name) for n, name in enumerate(names)]
    found = causes(ledger=seen, weights=compared)
    assert [len(cause.items) for cause in found] == [2] * few + [many - few]
    assert found[0].text == f"{names[0]} {words[0]}"
    assert found[-1].text.startswith(f"{names[few]} {words[few]}; likewise {names[few + 1]}; ")
    assert found[-1].text.endswith("; and 2,965 more")


def test_what_one_explanation_tells_comes_before_what_several_explain() -> None:
    vague = failed("training", "several explain it equally", data={EQUAL: 4})
    sure = failed("layouts", "norms are swapped", data={EQUAL: 1})
    found = causes(likelihood=[vague], acceptance=[sure, failed("band", "too low")])
    assert [cause.title for cause in found] == [
        "acceptance, layouts",
        "acceptance, band",
        "likelihood, training",
    ]
    again = failed("layouts", "several explain it equally", data={EQUAL: 1})
    assert [cause.title for cause in causes(likelihood=[vague], acceptance=[again, sure])] == [
        "likelihood, training; acceptance, layouts",
        "acceptance, layouts",
    ]


def test_what_engines_find_of_one_list_is_told_once() -> None:
    def reading(engine: str, words: str) -> Item:
        item = wrong(f"mtp: precision as {engine} reads it", words, GATE)
        return replace(item, data={**item.data, ENGINE: engine})

    (one,) = causes(files=[reading("vLLM", "is odd"), reading("SGLang", "is bad")])
    assert one.text.endswith("is odd") and len(one.items) == 2
