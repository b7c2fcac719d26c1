"""The printed commands that serve a bundle: a shell must hand the engine exactly these words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cases import WHOLE_TILES, export, make_checkpoint, quantize

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
