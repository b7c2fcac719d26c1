"""llama.cpp runs our GGUF files: its texts are ours up to ties, drafts change none, and as many of
them are accepted as by our runtime on the same files."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
from engine_runs import DELTA_FIXTURE, FIXTURE, GROUPED_FIXTURE, Prompts
from llama_server import Text, first_file, server, texts_of

from bundle.test_gguf_bundles import keys_of
from bundle.test_gguf_qwen import config_of
from cases import edit_json, export, quantize, run_program
from mtp_checkpoints.containers.gguf_architectures.base import ARCHITECTURE
from mtp_runtime import LLM, SamplingParams
from runtime.checkpoints import write_checkpoint

TOKENS = 48
TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "gpt-2", "--quiet")
# Log-probabilities that two tokens may differ by where rounding decides between them. One row of a
# batch is multiplied by other code than several, and beside blocks activations are rounded to int8:
# without any draft that moved those of DeepSeek-V3 by up to 0.31 in q8_0 (docs/engines.md).
TIES = {"bf16": 0.05, "q8_0": 0.35, "q4_0": 0.35}
# Acceptance may differ by so much; in Q4_0 llama.cpp's texts are others than ours.
POINTS = {"bf16": 0.02, "q8_0": 0.02, "q4_0": 0.04}
FIXTURES = {"deepseek2": FIXTURE, "glm4moe": GROUPED_FIXTURE, "qwen35": DELTA_FIXTURE}
# Architectures without a trained miniature, with model types of small configs.
UNTRAINED = {"qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next"}
TIE_IN_FLOAT32 = 0.005
CASES = [
    ("deepseek2", "bf16", (1, 2, 3)),
    ("glm4moe", "bf16", (1, 2, 3)),
    ("qwen35", "bf16", (1, 2, 3)),
    ("deepseek2", "q8_0", (2,)),
    ("deepseek2", "q4_0", (2,)),
    ("glm4moe", "q8_0", (2,)),
    ("qwen35", "q8_0", (2,)),
]

pytestmark = pytest.mark.skipif(not server().exists(), reason="llama.cpp was not built")


class Ours(NamedTuple):
    """Our runtime's texts, and its drafts."""

    tokens: list[list[int]]
    drafted: int
    accepted: int


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Bundles of the trained fixtures by architecture and scheme, each made once."""

    @cache
    def bundle(architecture: str, scheme: str) -> Path:
        output = tmp_path_factory.mktemp("gguf") / "bundle"
        source = FIXTURES[architecture]
        if scheme == "bf16":
            outcome = export(source, output, *TARGET)
        else:
            outcome = quantize(source, output, *TARGET, "--base-quant", scheme)
        assert outcome.code == 0, outcome.err
        return output

    return bundle


@pytest.fixture(scope="module")
def plain(
    bundles: Callable[[str, str], Path], prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[Text]]:
    """llama.cpp's texts without drafts, each bundle run once."""

    @cache
    def run(architecture: str, scheme: str) -> list[Text]:
        log = tmp_path_factory.mktemp("log") / "server"
        return texts_of(bundles(architecture, scheme), 0, prompts, TOKENS, log)

    return run


def ours(bundle: Path, drafts: int, prompts: Prompts) -> Ours:
    """Our runtime on the same files."""
    llm = LLM(bundle, speculate_method="mtp", speculate_max_draft_token_num=drafts)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    drafted, accepted = (
        sum(sum(getattr(one.metrics, name)) for one in outputs) for name in ("drafted", "accepted")
    )
    return Ours([list(one.token_ids) for one in outputs], drafted, accepted)


def faults(plain: list[Text], others: list[list[int]], tie: float) -> list[str]:
    """Texts that differ from plain ones where the two tokens' log-probabilities do by more."""
    found = []
    for number, (text, other) in enumerate(zip(plain, others, strict=True)):
        pairs = enumerate(zip(text.tokens, other, strict=True))
        at = next((at for at, (one, two) in pairs if one != two), None)
        if at is None:
            continue
        best, second = (text.best[at].get(one, math.nan) for one in (text.tokens[at], other[at]))
        if not best - second <= tie:
            found.append(f"prompt {number}, token {at}: {best:.3f} against {second:.3f}")
    return found


@pytest.mark.parametrize(
    ("architecture", "scheme", "drafts"),
    [(name, scheme, k) for name, scheme, counts in CASES for k in counts],
)
def test_drafts_are_accepted_as_ours_and_change_no_text(
    architecture: str,
    scheme: str,
    drafts: int,
    bundles: Callable[[str, str], Path],
    plain: Callable[[str, str], list[Text]],
    prompts: Prompts,
    tmp_path: Path,
    figures: dict[str, Any],
) -> None:
    bundle = bundles(architecture, scheme)
    theirs = texts_of(bundle, drafts, prompts, TOKENS, tmp_path / "log")
    undrafted = plain(architecture, scheme)
    own = ours(bundle, drafts, prompts)
    drafted, accepted = (sum(getattr(t, name) for t in theirs) for name in ("drafted", "accepted"))
    equal = sum(one.tokens == two for one, two in zip(undrafted, own.tokens, strict=True))
    figures[f"llama.cpp, {architecture} {scheme}, {drafts} drafts"] = {
        "drafted": drafted,
        "accepted": accepted,
        "ours": {"drafted": own.drafted, "accepted": own.accepted, "texts_equal": equal},
        "texts_equal": sum(
            one.tokens == two.tokens for one, two in zip(undrafted, theirs, strict=True)
        ),
    }
    assert faults(undrafted, [text.tokens for text in theirs], TIES[scheme]) == []
    if scheme == "bf16":  # beside blocks its activations are in int8, which ours are not
        assert faults(undrafted, own.tokens, TIES[scheme]) == []
    assert accepted / drafted == pytest.approx(own.accepted / own.drafted, abs=POINTS[scheme])
    assert accepted / drafted > 0.5


def test_a_module_grafted_beside_a_main_model(
    bundles: Callable[[str, str], Path],
    plain: Callable[[str, str], list[Text]],
    prompts: Prompts,
    tmp_path: Path,
    figures: dict[str, Any],
) -> None:
    """A main file in Q4_0 whose module is elsewhere, and the original's in Q8_0 beside it."""
    main = first_file(bundles("deepseek2", "q4_0") / "main")
    named = ("--target", "llama.cpp", "--mtp-quant", "q8_0", "--quiet")
    made = run_program("graft", main, FIXTURE, "--output-dir", tmp_path / "out", *named)
    assert made.code == 0, made.err
    undrafted = plain("deepseek2", "q4_0")
    theirs = texts_of(tmp_path / "out", 2, prompts, TOKENS, tmp_path / "log")
    assert faults(undrafted, [text.tokens for text in theirs], TIES["q4_0"]) == []
    drafted, accepted = (sum(getattr(t, name) for t in theirs) for name in ("drafted", "accepted"))
    figures["llama.cpp, deepseek2 q4_0 with a graft"] = {"drafted": drafted, "accepted": accepted}
    assert accepted / drafted > 0.5


@pytest.mark.parametrize("architecture", FIXTURES)
def test_a_module_inside_the_main_model_s_file(
    architecture: str,
    bundles: Callable[[str, str], Path],
    plain: Callable[[str, str], list[Text]],
    prompts: Prompts,
    tmp_path: Path,
) -> None:
    """Drafted with as that of a file beside it: the texts are the same, and the counts near."""
    one = ("--base-quant", "q8_0", "--part", "one")
    made = quantize(FIXTURES[architecture], tmp_path / "out", *TARGET, *one)
    assert made.code == 0, made.err
    found = texts_of(tmp_path / "out", 2, prompts, TOKENS, tmp_path / "log")
    apart = texts_of(bundles(architecture, "q8_0"), 2, prompts, TOKENS, tmp_path / "log")
    tokens = [text.tokens for text in found]
    assert faults(plain(architecture, "q8_0"), tokens, TIES["q8_0"]) == []
    rates = [
        sum(t.accepted for t in all_) / sum(t.drafted for t in all_) for all_ in (found, apart)
    ]
    assert rates[0] == pytest.approx(rates[1], abs=0.02) and rates[0] > 0.5
    own = ours(tmp_path / "out", 2, prompts)
    assert rates[0] == pytest.approx(own.accepted / own.drafted, abs=0.02)


@pytest.mark.parametrize(("architecture", "model_type"), UNTRAINED.items())
def test_texts_of_models_that_nobody_trained(
    architecture: str, model_type: str, prompts: Prompts, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """In float32, in which next to nothing is a tie: ours, with drafts and without."""
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    write_checkpoint(source, config_of(model_type))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DELTA_FIXTURE / name, source)
    outcome = export(source, bundle, *TARGET)
    assert outcome.code == 0, outcome.err
    assert keys_of(gguf.GGUFReader(first_file(bundle / "main")))[ARCHITECTURE] == architecture
    undrafted = texts_of(bundle, 0, prompts, TOKENS, tmp_path / "log")
    theirs, own = texts_of(bundle, 2, prompts, TOKENS, tmp_path / "log"), ours(bundle, 2, prompts)
    texts = {"llama.cpp with drafts": [text.tokens for text in theirs], "ours": own.tokens}
    figures[f"llama.cpp, {architecture}, untrained"] = {
        name: sum(one.tokens == two for one, two in zip(undrafted, others, strict=True))
        for name, others in texts.items()
    } | {"drafted": sum(text.drafted for text in theirs)}
    for others in texts.values():
        assert faults(undrafted, others, TIE_IN_FLOAT32) == []
    assert sum(text.drafted for text in theirs) > 0


def contents(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    """Keys and tensors of a GGUF file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        one.name: (one.tensor_type.name, [int(n) for n in one.shape], one.data.tobytes())
        for one in reader.tensors
    }
    return keys, tensors


# Keys that say nothing of the model's arithmetic: names, and how many entries there are.
OF_NAMES = {"general.name", "general.size_label", "GGUF.kv_count", "GGUF.tensor_count"}
OF_NAMES |= {"mtp_export.main_identity"}  # which is ours alone
# Its class for GLM-4.7-Flash is that for DeepSeek-V3, but for keeping the module.
KEEPS_THE_MODULE = {"DeepseekV3ForCausalLM": "Glm4MoeLiteForCausalLM"}


@pytest.mark.parametrize("part", ["main", "mtp"])
@pytest.mark.parametrize("architecture", FIXTURES)
def test_files_are_those_of_the_converter(
    architecture: str, part: str, bundles: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Byte for byte, but for copies of embedding and head: the converter writes both twice."""
    source = Path(shutil.copytree(FIXTURES[architecture], tmp_path / "source"))

    def rename(config: dict[str, Any]) -> None:
        config["architectures"] = [KEEPS_THE_MODULE.get(n, n) for n in config["architectures"]]

    edit_json(source / "config.json", rename)
    kind, converted = "mtp" if part == "mtp" else "no-mtp", tmp_path / "converted.gguf"
    script = Path(__file__).with_name("llama_converter.py")
    words = [sys.executable, script, server().parents[2], source, converted, kind]
    run = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    keys, tensors = contents(first_file(bundles(architecture, "bf16") / part))
    their_keys, their_tensors = contents(converted)
    copies = {n for n in their_tensors if n.endswith((".embed_tokens.weight", "_head_head.weight"))}
    assert tensors == {n: one for n, one in their_tensors.items() if n not in copies}
    for one in (keys, their_keys):
        for name in OF_NAMES | {f"{architecture}.vocab_size"}:
            one.pop(name, None)
    assert keys == their_keys
