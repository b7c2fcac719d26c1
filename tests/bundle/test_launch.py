"""The printed commands that serve a bundle: a shell must hand the engine exactly these words."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cases import WHOLE_TILES, edit_json, export, make_checkpoint, quantize, run_program
from forked import completed, program
from mtp_checkpoints.layouts import TARGETS
from runtime.drafts import ffn_layout, write_eagle3, write_heads

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
AWKWARD = 'it\'s a "bundle" $(of) ; them'  # a folder name that a shell would take apart
XLLM_FLAGS = [
    *("--num_speculative_tokens", "1", "--max_memory_utilization=0.90"),
    *("--max_tokens_per_batch=10000", "--max_seqs_per_batch=256", "--enable_mla=true"),
    *("--block_size=128", "--ep_size=1", "--dp_size=1", "--enable_prefix_cache=false"),
    "--enable_chunked_prefill=false",
]


def launch_facts(source: Path, output: Path, *options: object) -> dict[str, str]:
    command = quantize if "--base-quant" in options else export
    outcome = command(source, output, "--json", *options)
    assert outcome.code == 0, outcome.err
    lines: dict[str, str] = json.loads(outcome.out)["launch"]
    return lines


def run_stubbed(line: str, program: str, folder: Path) -> list[list[str]]:
    """Run a line in a shell, and return the arguments of each call of a program, in any order."""
    stubs, log = folder / "stubs", folder / "calls"
    stubs.mkdir()
    log.mkdir()
    stub = stubs / program
    stub.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" > calls/$$\n")
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}"}
    script = f"{line}\nwait"
    subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, check=True, timeout=60)
    return [path.read_text().split("\0")[:-1] for path in log.iterdir()]


def expected_calls(target: str, main: str, mtp: str) -> tuple[str, list[list[str]]]:
    """A target's program, and the words it must be called with."""
    if target == "vllm":
        speculation = {"method": "mtp", "model": mtp, "num_speculative_tokens": 1}
        return "vllm", [["serve", main, "--speculative-config", json.dumps(speculation)]]
    if target == "sglang":
        words = ["-m", "sglang.launch_server", "--model-path", main]
        words += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", mtp]
        words += ["--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]
        return "python", [[*words, "--speculative-num-draft-tokens", "2"]]
    if target == "lightllm":
        words = ["-m", "lightllm.server.api_server", "--model_dir", main]
        words += ["--mtp_mode", "eagle_with_att", "--mtp_draft_model_dir", mtp, "--mtp_step", "1"]
        return "python", [words]
    calls = []
    for i in range(16):
        words = ["--model", main, f"--devices=npu:{i}", "--port", str(13222 + i)]
        words += ["--master_node_addr=127.0.0.1:42123", "--nnodes=16"]
        words += ["--draft_model", mtp, f"--draft_devices=npu:{i}", *XLLM_FLAGS]
        calls.append([*words, f"--node_rank={i}"])
    return "xllm", calls


@pytest.mark.parametrize("target", ["vllm", "sglang", "lightllm", "xllm"])
def test_a_shell_hands_the_engine_these_words(target: str, pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / AWKWARD
    lines = launch_facts(pristine, output, "--target", target)
    assert lines.keys() == {target}
    program, calls = expected_calls(target, str(output / "main"), str(output / "mtp"))
    assert sorted(run_stubbed(lines[target], program, tmp_path)) == sorted(calls)


@pytest.mark.parametrize(("unquantized", "quant_type"), [(False, "a8w8_fp8"), (True, "bf16")])
def test_paddlenlp_gets_its_variables(
    unquantized: bool, quant_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {k: v for k, v in WHOLE_TILES.items() if k != "quantization_config" or not unquantized}
    source = make_checkpoint(tmp_path / "source", config)
    monkeypatch.chdir(tmp_path)
    lines = launch_facts(source, Path(AWKWARD), "--target", "paddlenlp")  # docker wants it absolute
    (call,) = run_stubbed(lines["paddlenlp"], "docker", tmp_path)
    image, shell, dash_c, dash_e, script = call[-5:]
    assert image.endswith("llm-serving-cuda124-cudnn9-v2.1")
    assert (shell, dash_c, dash_e) == ("/bin/bash", "-c", "-ex")
    volumes = [call[i + 1] for i, word in enumerate(call) if word == "-v"]
    assert volumes == [
        f"{tmp_path / AWKWARD / 'main'}:/models",
        f"{tmp_path / AWKWARD / 'mtp'}:/models-mtp",
    ]
    at_load = {"bf16": "weight_only_int8"}.get(quant_type, quant_type)
    assert f"model_name=deepseek-ai/DeepSeek-R1-MTP-2nodes/{at_load}" in call
    for variable in (
        f"SPECULATE_MODEL_QUANT_TYPE={at_load}",
        "SPECULATE_METHOD=mtp",
        "SPECULATE_MODEL_PATH=/models-mtp",
        "SPECULATE_MAX_DRAFT_TOKEN_NUM=1",
    ):
        assert f"export {variable} " in script


WINT4 = ("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8")
INT4 = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        ((), ["vllm", "sglang"]),
        (("--target", "tensorrt-llm"), []),
        (("--part", "mtp"), []),
        (INT4, ["vllm", "sglang"]),
        (WINT4, ["vllm"]),
        ((*WINT4, "--target", "sglang"), ["sglang"]),
        ((*WINT4, "--format", "w4afp8"), ["sglang"]),
        ((*WINT4, "--group-size", "64"), []),
        ((*WINT4, "--group-size", "64", "--target", "sglang"), []),
    ],
    ids=" ".join,
)
def test_only_engines_that_read_the_layout_are_named(
    options: tuple[str, ...], engines: list[str], tmp_path: Path
) -> None:
    """SGLang must not fuse shared experts with routed ones in int4."""
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    lines = launch_facts(source, tmp_path / "out", *options)
    assert [*lines] == engines
    separate = lines.get("sglang", "").endswith(" --disable-shared-experts-fusion")
    assert separate == ("sglang" in engines and "--base-quant" in options)


def test_people_see_the_lines_whole_and_a_dry_run_has_none(pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / "a folder whose name is longer than a terminal is wide" / "bundle"
    output.parent.mkdir()
    shown = export(pristine, output, "--target", "vllm").out.splitlines()
    (line,) = [line for line in shown if line.startswith("vllm serve ")]
    assert line.endswith("'") and str(output / "mtp") in line
    facts: dict[str, Any] = json.loads(export(pristine, tmp_path / "o", "--json", "--dry-run").out)
    assert "launch" not in facts


PLACED = ("--nodes", "2", "--tp", "16", "--head", "10.0.0.1")
NODE_WORDS = {
    "vllm": [
        "--tensor-parallel-size 16 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
        "--tensor-parallel-size 16 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless",
    ],
    "sglang": [
        f"--tp 16 --nnodes 2 --node-rank {node} --dist-init-addr 10.0.0.1:20000"
        for node in range(2)
    ],
    "lightllm": [f"--tp 16 --nccl_host 10.0.0.1 --nnodes 2 --node_rank {n}" for n in range(2)],
}


@pytest.mark.parametrize("engine", NODE_WORDS)
def test_each_machine_has_its_command(engine: str, pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / AWKWARD
    alone = launch_facts(pristine, output, "--target", engine)[engine]
    (plain,) = commands_of(output, engine)
    assert plain == alone
    placed = commands_of(output, engine, *PLACED)
    assert placed == [f"{alone} {words}" for words in NODE_WORDS[engine]]
    (one,) = commands_of(output, engine, "--tp", "4")
    assert one.removeprefix(alone).split()[-1] == "4"


def commands_of(bundle: Path, engine: str, *options: str) -> list[str]:
    outcome = run_program("launch", bundle, "--engine", engine, *options, "--json")
    assert outcome.code == 0, outcome.err
    lines: list[str] = json.loads(outcome.out)["commands"]
    return lines


def test_the_loop_of_xllm_is_divided(pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    alone = launch_facts(pristine, output, "--target", "xllm")["xllm"]
    assert commands_of(output, "xllm") == [alone]
    lines = commands_of(output, "xllm", "--nodes", "2", "--tp", "4", "--head", "10.0.0.1")
    ranks, devices = [], []
    for node, line in enumerate(lines):
        place = tmp_path / str(node)
        place.mkdir()
        for call in run_stubbed(line, "xllm", place):
            assert "--nnodes=4" in call and "--master_node_addr=10.0.0.1:42123" in call
            ranks.append(int(call[-1].removeprefix("--node_rank=")))
            devices.append(next(word for word in call if word.startswith("--devices=")))
    assert sorted(ranks) == [0, 1, 2, 3]
    assert sorted(devices) == ["--devices=npu:0", "--devices=npu:0", "--devices=npu:1"] + [
        "--devices=npu:1"
    ]


def test_paddlenlp_is_placed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    output = tmp_path / "bundle"
    alone = launch_facts(source, output, "--target", "paddlenlp")["paddlenlp"]
    assert commands_of(output, "paddlenlp", "--nodes", "2", "--tp", "16") == [alone, alone]
    (one,) = commands_of(output, "paddlenlp", "--tp", "4")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 &&" in one and "MP_NUM=4 && export MP_NNODE=1 &&" in one


def test_people_see_every_machine(pristine: Path, tmp_path: Path) -> None:
    export(pristine, tmp_path / "bundle")
    shown = run_program("launch", tmp_path / "bundle", "--engine", "vllm", *PLACED).out
    assert [line[:11] for line in shown.splitlines()] == ["# machine 0", "vllm serve "] + [
        "# machine 1",
        "vllm serve ",
    ]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--engine", "xllm"), 4, "--target xllm"),
        (("--engine", "oracle"), 2, "vllm, sglang"),
        (("--engine", "vllm", "--nodes", "3", "--tp", "16"), 2, "multiple of 3"),
        (("--engine", "vllm", "--nodes", "2"), 2, "--tp"),
        (("--engine", "vllm", "--node", "1"), 2, "--node below 1"),
        (("--engine", "vllm", "--run"), 4, "not installed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_launched(
    options: tuple[str, ...], code: int, words: str, pristine: Path, tmp_path: Path
) -> None:
    export(pristine, tmp_path / "bundle")
    outcome = run_program("launch", tmp_path / "bundle", *options)
    assert outcome.code == code and words in outcome.err


def test_every_engine_with_a_command_can_be_looked_for() -> None:
    engines = [engine for target in TARGETS.values() for engine in target.engines]
    assert all(engine.probe for engine in engines if engine.launch is not None)


def test_a_bundle_without_both_parts_is_not_launched(pristine: Path, tmp_path: Path) -> None:
    export(pristine, tmp_path / "main", "--part", "main")
    outcome = run_program("launch", tmp_path / "main", "--engine", "vllm")
    assert outcome.code == 3 and "both parts" in outcome.err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_quant": "w5"}, "no base_quant"),
        ({"mtp_quant": "grafted"}, "no mtp_quant"),
        ({"mtp_quant": None}, "mtp_quant"),
        ({"base_quant": {}}, "base_quant"),
        ({"target": []}, "target"),
        ({"target": "nope"}, "no target that this version knows"),
    ],
)
def test_a_manifest_of_other_precisions_is_refused(
    changes: dict[str, Any], says: str, pristine: Path, tmp_path: Path
) -> None:
    export(pristine, tmp_path / "bundle")
    known = {"base_quant": "weight_only_int4", "mtp_quant": "weight_only_int8"}
    edit_json(
        tmp_path / "bundle/mtp_export.json",
        lambda manifest: manifest["options"].update(known | changes),
    )
    outcome = run_program("launch", tmp_path / "bundle", "--engine", "vllm")
    assert outcome.code == 3 and says in outcome.err, outcome.err


def test_a_manifest_without_the_options_of_a_precision_serves_nobody(
    pristine: Path, tmp_path: Path
) -> None:
    """Which dialect and groups its integers are in is not known then."""
    export(pristine, tmp_path / "bundle")
    pair = {"base_quant": "a8w8_fp8_wint4", "mtp_quant": "a8w8_fp8"}
    edit_json(
        tmp_path / "bundle/mtp_export.json", lambda manifest: manifest["options"].update(pair)
    )
    outcome = run_program("launch", tmp_path / "bundle", "--engine", "vllm")
    assert outcome.code == 4 and "no engine that is known" in outcome.err


def test_run_becomes_the_engine(pristine: Path, tmp_path: Path) -> None:
    """The engine has the arguments that are printed, and its exit code is the program's."""
    output, stubs = tmp_path / AWKWARD, tmp_path / "stubs"
    export(pristine, output)
    stubs.mkdir()
    stub = stubs / "vllm"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"; exit 21\n")
    stub.chmod(0o755)
    paths = {"PATH": f"{stubs}:{os.environ['PATH']}"}
    words = "launch", output, "--engine", "vllm", "--tp", 2, "--run"
    done = completed(program, *words, environment=os.environ | paths)
    assert done.returncode == 21, done.stderr
    assert done.stdout.splitlines()[:2] == ["serve", str(output / "main")]


@pytest.fixture
def drafted(pristine: Path, tmp_path: Path) -> Path:
    """A bundle with an EAGLE-3 draft, and heads beside it that only the runtime computes."""
    bundle = tmp_path / AWKWARD
    assert export(pristine, bundle, "--quiet").code == 0
    config = json.loads((bundle / "main/config.json").read_text())
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
    write_eagle3(bundle / "eagle3", config)
    write_heads(bundle / "parallel_heads", ffn_layout(**sizes))
    return bundle


def draft_commands(bundle: Path, engine: str, *options: str) -> dict[str, Any]:
    outcome = run_program("launch", bundle, "--engine", engine, *options, "--json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)["draft_commands"]
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_drafts_in_folders_of_their_own_have_their_commands(
    engine: str, drafted: Path, tmp_path: Path
) -> None:
    found = draft_commands(drafted, engine)
    assert found["parallel_heads"] is None
    program, ((*words,),) = expected_calls(engine, str(drafted / "main"), str(drafted / "eagle3"))
    method, own = ("mtp", "eagle3") if engine == "vllm" else ("EAGLE", "EAGLE3")
    words = [word.replace(f'"{method}"', f'"{own}"') for word in words]
    expected = [own if word == method else word for word in words]
    assert run_stubbed(found["eagle3"][0], program, tmp_path) == [expected]
    (mtp,) = commands_of(drafted, engine)
    placed = draft_commands(drafted, engine, *PLACED)["eagle3"]
    assert placed == [f"{found['eagle3'][0]} {words}" for words in NODE_WORDS[engine]]
    shown = run_program("launch", drafted, "--engine", engine).out.splitlines()
    assert shown[:4] == ["# draft mtp", mtp, "# draft eagle3", found["eagle3"][0]]
    assert shown[4:] == [
        f"# draft parallel_heads: {engine} has no command for it; mtp-export serve runs it"
    ]
    shown = run_program("launch", drafted, "--engine", engine, *PLACED).out.splitlines()
    assert shown[::2] == [
        *("# draft mtp, machine 0", "# draft mtp, machine 1"),
        *("# draft eagle3, machine 0", "# draft eagle3, machine 1"),
        f"# draft parallel_heads: {engine} has no command for it; mtp-export serve runs it",
    ]


def test_a_bundle_that_keeps_drafts_ends_with_their_commands(drafted: Path, tmp_path: Path) -> None:
    """Beside those of its MTP module, which come first."""
    output = tmp_path / "kept"
    outcome = export(drafted, output, "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    own = {name: draft_commands(output, name)["eagle3"] for name in ("vllm", "sglang")}
    told = facts["draft_launch"]
    served = {
        method: {"mtp-export": f"mtp-export serve {output} --speculate-method {method}"}
        for method in ("eagle3", "parallel_heads")
    }
    engines = {name: line for name, (line,) in own.items()}
    assert told == served | {"eagle3": engines | served["eagle3"]}
    assert facts["next"]["serve"] == f"mtp-export serve {output}"
    shown = export(drafted, output, "--overwrite").out
    own_lines = [line for line in shown.splitlines() if "mtp-export serve" in line]
    assert own_lines[0] == f"Serve it:  mtp-export serve {output}"
    assert f"To serve it with vllm, drafts by eagle3:\n{told['eagle3']['vllm']}\n" in shown
    assert "drafts by" not in export(drafted, tmp_path / "mtp", "--part", "mtp").out


def test_a_bundle_is_served_with_the_drafts_of_its_mtp_module(tmp_path: Path) -> None:
    """And no line names drafts that it does not have, or that need no bundle."""
    output = tmp_path / "bundle"
    shown = export(FIXTURE, output).out
    own_lines = [line for line in shown.splitlines() if "mtp-export serve" in line]
    assert own_lines == [f"Serve it:  mtp-export serve {output}"]
    assert "drafts by" not in shown and "--speculate-method" not in shown


def test_heads_of_medusa_are_vllms_alone(drafted: Path) -> None:
    config = json.loads((drafted / "main/config.json").read_text())
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
    write_heads(drafted / "parallel_heads", ffn_layout(**sizes, own_projections=True))
    (line,) = draft_commands(drafted, "vllm")["parallel_heads"]
    speculation = json.loads(shlex.split(line)[-1])
    assert speculation["method"] == "medusa"
    assert speculation["model"] == str(drafted / "parallel_heads")
    assert draft_commands(drafted, "sglang")["parallel_heads"] is None


@pytest.mark.parametrize("target", ["vllm", "sglang", "lightllm", "xllm", "paddlenlp"])
def test_k_is_the_number_of_drafts(target: str, tmp_path: Path) -> None:
    """Of the one engine that reads the bundle, where none is named."""
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    assert export(source, tmp_path / "bundle", "--target", target).code == 0
    words = {
        "vllm": '"num_speculative_tokens": 3}',
        "sglang": "--speculative-num-steps 3 --speculative-eagle-topk 1"
        " --speculative-num-draft-tokens 4",
        "lightllm": "--mtp_step 3",
        "xllm": "--num_speculative_tokens 3",
        "paddlenlp": "SPECULATE_MAX_DRAFT_TOKEN_NUM=3",
    }
    outcome = run_program("launch", tmp_path / "bundle", "--k", "3")
    assert outcome.code == 0 and words[target] in outcome.out, outcome


def test_every_engine_that_reads_the_bundle_has_its_command(pristine: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export(pristine, bundle)
    each = {
        name: json.loads(run_program("launch", bundle, "--engine", name, "--json").out)
        for name in ("vllm", "sglang")
    }
    facts = json.loads(run_program("launch", bundle, "--json").out)
    assert facts["draft_tokens"] == 1 and [*facts["engines"]] == ["vllm", "sglang"]
    for name, own in facts["engines"].items():
        assert own | {"engine": name, "draft_tokens": 1} == each[name]
    shown = run_program("launch", bundle).out.splitlines()
    (vllm,), (sglang,) = each["vllm"]["commands"], each["sglang"]["commands"]
    assert shown == ["# vllm", vllm, "# sglang", sglang]


def test_an_engine_to_run_is_named_where_there_is_a_choice(pristine: Path, tmp_path: Path) -> None:
    export(pristine, tmp_path / "bundle")
    outcome = run_program("launch", tmp_path / "bundle", "--run")
    assert outcome.code == 2 and "--engine vllm or --engine sglang" in outcome.err


@pytest.mark.parametrize(
    ("recommended", "options", "k"),
    [
        ({"1": {"k": 3}, "4": {"k": 2}, "16": {"k": 4}}, (), 4),
        ({"1": {"k": 3}}, ("--k", "2"), 2),
        ({"1": {"k": 0}}, (), None),
        (None, (), None),
    ],
)
def test_a_report_recommends_k(
    recommended: dict[str, Any] | None,
    options: tuple[str, ...],
    k: int | None,
    pristine: Path,
    tmp_path: Path,
) -> None:
    bundle, report = tmp_path / "bundle", tmp_path / "report.json"
    export(pristine, bundle)
    given = ("--level", "files", "--report", report)
    assert run_program("verify", bundle, *given).code == 0
    item = {"name": "recommended k", "status": "pass", "data": {"recommended": recommended}}
    if recommended is not None:
        edit_json(report, lambda facts: facts["checks"][0]["items"].append(item))
    words = ("launch", bundle, "--engine", "vllm", "--json", "--report", report)
    outcome = run_program(*words, *options)
    if k is None:
        assert outcome.code == 2 and "recommends no number of drafts" in outcome.err
    else:
        facts = json.loads(outcome.out)
        assert facts["draft_tokens"] == k
        assert f'"num_speculative_tokens": {k}' in facts["commands"][0]


def test_a_bundle_ends_with_the_commands_that_check_and_try_it(
    pristine: Path, source: Path, tmp_path: Path
) -> None:
    """They run as they are printed, in a folder whose name a shell would take apart."""
    output = tmp_path / AWKWARD
    shown = export(pristine, output).out.splitlines()
    (check,) = (line for line in shown if line.startswith("Check it:  "))
    program, *words = shlex.split(check.removeprefix("Check it:  "))
    assert words == ["verify", str(output), "--source", str(pristine), "--level", "weights"]
    assert program == "mtp-export" and run_program(*words).code == 0
    (source / "tokenizer.json").unlink()
    facts = json.loads(export(source, tmp_path / "o", "--json").out)
    assert facts["next"].keys() == {"check"}  # a prompt needs the tokenizer


def test_a_bundle_with_a_tokenizer_can_be_tried(tmp_path: Path) -> None:
    outcome = export(FIXTURE, tmp_path / "b", "--json")
    bundle = tmp_path / "b"
    tried = json.loads(outcome.out)["next"]["try"]
    assert shlex.split(tried) == ["mtp-export", "generate", str(bundle), "--prompt", "def read("]
    alone = json.loads(export(FIXTURE, tmp_path / "m", "--part", "mtp", "--json").out)
    assert alone["next"].keys() == {"check"}
    assert run_program(*shlex.split(alone["next"]["check"])[1:]).code == 0
