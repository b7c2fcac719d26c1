"""Helpers of the engine tests: folders to serve, vLLM in a process of its own, our runtime on the
same prompts, and how the two are compared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common.vllm_peer import settings_of
from cases import edit_json, read_json, read_tensors
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_kernels.quantize import (
    Int4Group,
    Int8Channel,
    dequantize_int4_group,
    dequantize_int8_channel,
)
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.acceptance.base import Verdict
from mtp_runtime.acceptance.exact import accept_best
from mtp_runtime.judging import Group, Judge

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
GROUPED_FIXTURE = ROOT / "fixtures/glm4-moe-tiny"
DELTA_FIXTURE = ROOT / "fixtures/qwen3-5-tiny"
VLLM = ROOT / "benchmarks/common/vllm_run.py"
TOKENS = 64
BATCH = 16
_GLM = MtpContract(recycled_hidden=Hidden.BEFORE_NORM, zero_first_embedding=True)
# vLLM's choices, by model_type.
CONTRACTS = {
    "deepseek_v3": MtpContract(zero_first_embedding=True),
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "qwen3_5_text": MtpContract(),
}
Prompts = list[list[int]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outputs:
    """Output of vLLM: tokens by prompt; by prompt and token the log-probabilities of the best
    two (and of the token), by token id; and per draft position the share of all blocks in which
    the draft there was accepted."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    acceptance: list[float]
    blocks: int


@dataclass(frozen=True)
class Reading:
    """Our runtime on a text that vLLM wrote. acceptance: as in Outputs, a draft being accepted when
    it is the text's next token, with intervals clustered by prompt. logits: by prompt and position
    ours for the text's next token."""

    acceptance: list[Estimate]
    logits: list[list[torch.Tensor]]


@dataclass(frozen=True)
class Reader(Judge):
    """Accepts a given text by prompt, and records the logits that would have chosen."""

    texts: list[list[int]]
    logits: list[list[torch.Tensor]]

    def _reads_logits(self, group: Group) -> bool:
        return True

    def decide(self, group: Group, logits: torch.Tensor, best: list[int]) -> Verdict:
        number, written = group.request.request_id, len(group.request.output)
        text = self.texts[number][written : written + len(best)]
        verdict = accept_best(group.draft.tokens, text)
        self.logits[number] += logits[: verdict.accepted + 1].float()
        return verdict


def process(script: Path, job: dict[str, object], folder: Path) -> tuple[int, str, Path]:
    """Run a script on a job: its exit status, all it printed, its result file."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file, result = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job))
    run = subprocess.run(
        [sys.executable, script, job_file, result],
        env=os.environ | settings_of(Path(sys.prefix)) | {"PYTHONPATH": _with_images()},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "log").write_text(run.stdout)
    return run.returncode, run.stdout, result


def _with_images() -> str:
    """PYTHONPATH with torchvision, which vLLM imports for models that can see."""
    added = [Path(sys.prefix, "images"), Path(__file__).parent / "images"]
    return os.pathsep.join([*map(str, added), os.environ.get("PYTHONPATH", "")])


def sglang_wheel() -> Path:
    """SGLang as `make test-engines` has it: to be read, not installed."""
    (wheel,) = Path(sys.prefix, "wheels").glob("sglang-*.whl")
    return wheel


def vllm_job(bundle: Path, drafts: int, prompts: Prompts) -> dict[str, object]:
    return {
        "main": str(bundle / "main"),
        "mtp": str(bundle / "mtp"),
        "drafts": drafts,
        "prompts": prompts,
        "max_tokens": TOKENS,
        "max_model_len": 512,
        "batches": [min(BATCH, len(prompts))],
        "logprobs": 2,
    }


def run_vllm(job: dict[str, object], folder: Path) -> tuple[Outputs, str]:
    """Return the result of a vLLM job, and its log."""
    status, log, result = process(VLLM, job, folder)
    assert status == 0, log[-3000:]
    found = json.loads(result.read_text())
    blocks = found.get("drafts", 0)
    accepted = found.get("accepted_per_position", [])
    logprobs = [
        [{int(token): value for token, value in step.items()} for step in steps]
        for steps in found["logprobs"]
    ]
    acceptance = [count / blocks for count in accepted]
    return Outputs(found["tokens"], logprobs, acceptance, blocks), log


def read_with_ours(
    bundle: Path, drafts: int, prompts: Prompts, texts: list[list[int]], method: str = "mtp"
) -> Reading:
    """Our runtime, in bfloat16 too, on the text that an engine wrote after each prompt."""
    options = (
        {"speculate_method": method, "speculate_max_draft_token_num": drafts} if drafts else {}
    )
    contract = CONTRACTS[read_json(bundle / "main/config.json")["model_type"]]
    if method != "mtp":
        contract = MtpContract()
    llm = LLM(bundle, dtype="bfloat16", contract=contract, max_batch_size=BATCH, **options)
    judge, logits = llm.engine.judge, list[list[torch.Tensor]]([] for _ in prompts)
    llm.engine.judge = Reader(judge.head, judge.settings, texts=texts, logits=logits)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == texts
    metrics = [output.metrics for output in outputs]
    shares = [
        ratio([m.accepted[position] for m in metrics], [m.drafted[position] for m in metrics])
        for position in range(drafts)
    ]
    return Reading([share for share in shares if share is not None], logits)


def bundle_of(folder: Path, main: Path, mtp: Path) -> Path:
    """A folder with these two parts, for our runtime."""
    folder.mkdir()
    (folder / "main").symlink_to(main)
    (folder / "mtp").symlink_to(mtp)
    return folder


def quantized_draft(source: Path, folder: Path, scheme: str) -> Path:
    """The MTP part in a scheme of integers."""
    bundle = BundleOptions(source, folder, content=ContentOptions(part=Part.MTP))
    options = QuantizeOptions(bundle, scheme, scheme, group_size=32, allow_untested_pair=True)
    run_bundle(plan_quantize(options), lambda _: None)
    return folder / "mtp"


def dequantized_draft(quantized: Path, folder: Path) -> Path:
    """A draft in integers, dequantized to a bf16 draft."""
    shutil.copytree(quantized, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = read_tensors(quantized)
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    tensors = {name: tensor for name, tensor in stored.items() if not _is_packed(name)}
    for name in stored:
        module = name.removesuffix(".weight_packed")
        if module != name:
            tensors[f"{module}.weight"] = _unpacked(stored, module)
    write_shard(folder, tensors)
    return folder


def _is_packed(name: str) -> bool:
    return name.endswith((".weight_packed", ".weight_scale", ".weight_shape"))


def _unpacked(stored: Tensors, module: str) -> torch.Tensor:
    packed, scale = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
    columns = int(stored[f"{module}.weight_shape"][1])
    if packed.shape[1] * 8 == columns:
        return dequantize_int4_group(Int4Group(packed, scale))
    return dequantize_int8_channel(Int8Channel(packed, scale))


def renamed_model(bundle: Path, folder: Path, model_type: str, architecture: str) -> Path:
    """A bundle's checkpoint as that of another model whose layers are the same."""
    shutil.copytree(bundle / "main", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    names = {"model_type": model_type, "architectures": [architecture]}
    edit_json(folder / "config.json", lambda config: config.update(names))
    write_shard(folder, read_tensors(bundle / "main") | read_tensors(bundle / "mtp"))
    return folder


def write_shard(folder: Path, tensors: Tensors) -> None:
    """All tensors of a folder as one shard, with its index."""
    name = "model-00001-of-00001.safetensors"
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    total = sum(value.numel() * value.itemsize for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_prompts(path: Path, tokenizer: Path, count: int) -> Prompts:
    """Token ids of prompts spread over the file's kinds."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ids = [encode(line["prompt"]).ids[:200] for line in lines]
    return ids[:: len(ids) // count][:count]
