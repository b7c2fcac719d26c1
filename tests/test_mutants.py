"""Inputs of `make mutants`: files and tests that exist, all of every room, pinned versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
ROOMS: dict[str, Any] = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())
GROUPS = [group for groups in ROOMS.values() for group in groups]
# A new file in one of these has no tests, and fails here, until an entry names it.
WHOLE = (
    "mtp_export/bundle/**/*.py",
    "mtp_export/busy_machine.py",
    "mtp_export/kept_states.py",
    "mtp_export/plan.py",
    "kernels/mtp_kernels/decoder/compiled_cpu/expert_cache.py",
    "kernels/mtp_kernels/decoder/compiled_cpu/expert_slots.py",
    "kernels/mtp_kernels/decoder/compiled_cpu/offloaded.py",
    "kernels/mtp_kernels/quantize/awq.py",
    "kernels/mtp_kernels/quantize/ggml_rows.py",
    "checkpoints/mtp_checkpoints/containers/**/*.py",
    "checkpoints/mtp_checkpoints/dtypes.py",
    "checkpoints/mtp_checkpoints/families/engine_draft.py",
    "checkpoints/mtp_checkpoints/families/folds.py",
    "checkpoints/mtp_checkpoints/families/released.py",
    "checkpoints/mtp_checkpoints/formats/**/*.py",
    "checkpoints/mtp_checkpoints/quantization/**/*.py",
    "checkpoints/mtp_checkpoints/sources/**/*.py",
    "checkpoints/mtp_checkpoints/free_memory.py",
    "checkpoints/mtp_checkpoints/suggestions.py",
    "checkpoints/mtp_checkpoints/tensors/**/*.py",
    "checkpoints/mtp_checkpoints/weights/**/*.py",
    "mtp_export/cluster/**/*.py",
    "mtp_export/commands/decoding_figures.py",
    "mtp_export/commands/memory_plan.py",
    "mtp_export/commands/names.py",
    "mtp_export/commands/next_steps.py",
    "mtp_export/commands/plain_comparison.py",
    "mtp_export/commands/retries.py",
    "mtp_export/commands/typed_option.py",
    "mtp_export/commands/unfinished.py",
    "mtp_export/options.py",
    "mtp_export/paragraphs.py",
    "mtp_export/serve/activity.py",
    "mtp_export/serve/address.py",
    "mtp_export/verify/decoding/likelihood.py",
    "mtp_export/verify/diagnosis/by_torch.py",
    "mtp_export/verify/diagnosis/changed_weight.py",
    "mtp_export/verify/diagnosis/experts.py",
    "mtp_export/verify/diagnosis/halves.py",
    "mtp_export/verify/diagnosis/layer_variants.py",
    "mtp_export/verify/diagnosis/leanings.py",
    "mtp_export/verify/diagnosis/scaled_variants.py",
    "mtp_export/verify/diagnosis/suspected.py",
    "mtp_export/verify/diagnosis/tensor_variants.py",
    "mtp_export/verify/diagnosis/combined.py",
    "mtp_export/verify/diagnosis/compared.py",
    "mtp_export/verify/diagnosis/differences.py",
    "mtp_export/verify/diagnosis/expert_places.py",
    "mtp_export/verify/diagnosis/factors.py",
    "mtp_export/verify/diagnosis/functions.py",
    "mtp_export/verify/diagnosis/neurons.py",
    "mtp_export/verify/diagnosis/norm_places.py",
    "mtp_export/verify/diagnosis/orders.py",
    "mtp_export/verify/diagnosis/parts.py",
    "mtp_export/verify/diagnosis/relations.py",
    "mtp_export/verify/diagnosis/reorderings.py",
    "mtp_export/verify/diagnosis/sketches.py",
    "mtp_export/verify/diagnosis/undone.py",
    "mtp_export/verify/files/listed_files.py",
    "mtp_export/verify/evidence/as_named.py",
    "mtp_export/verify/evidence/likelihood.py",
    "mtp_export/verify/evidence/memory_room.py",
    "mtp_export/verify/evidence/mlp_notes.py",
    "mtp_export/verify/evidence/plain_text.py",
    "mtp_export/verify/evidence/side_by_side.py",
    "mtp_export/verify/files/main_shapes.py",
    "mtp_export/verify/files/pairing.py",
    "mtp_export/verify/files/released_values.py",
    "mtp_export/verify/files/repair.py",
    "mtp_export/verify/pairing_proof.py",
    "mtp_export/verify/weights/labels.py",
    "mtp_export/verify/weights/main_layer_copies.py",
    "mtp_export/verify/weights/mtp_halves.py",
    "mtp_export/verify/weights/neurons.py",
    "mtp_export/verify/weights/norm_places.py",
    "mtp_export/verify/weights/query_and_key_norms.py",
    "mtp_export/verify/weights/shifted_norms.py",
    "mtp_export/verify/weights/unnamed_values.py",
    "mtp_export/verify/report/failures.py",
    "mtp_export/verify/report/golden.py",
    "mtp_export/verify/report/report_json.py",
    "mtp_export/verify/report/summary.py",
    "mtp_export/verify/report/undone.py",
    "mtp_export/verify/report/verdict.py",
    "mtp_export/schemes/**/*.py",
    "runtime/mtp_runtime/acceptance/*.py",
    "runtime/mtp_runtime/drafters/*.py",
    "runtime/mtp_runtime/sampling.py",
    "runtime/mtp_runtime/stop_texts.py",
    "runtime/mtp_runtime/logprobs.py",
    "runtime/mtp_runtime/*cache.py",
    "runtime/mtp_runtime/draft_length.py",
    "runtime/mtp_runtime/loading/draft_folder.py",
    "runtime/mtp_runtime/loading/progress.py",
    "runtime/mtp_runtime/loading/read_speed.py",
    "runtime/mtp_runtime/models/draft_cost.py",
    "runtime/mtp_runtime/models/eagle3.py",
    "runtime/mtp_runtime/models/expert_memory.py",
    "runtime/mtp_runtime/models/offloaded.py",
    "runtime/mtp_runtime/models/parallel_heads.py",
    "runtime/mtp_runtime/run_plan.py",
    "kernels/mtp_kernels/**/reference.py",
    "kernels/mtp_kernels/cpu/torch_threads.py",
    "kernels/mtp_kernels/gated_delta/state.py",
    "kernels/mtp_kernels/quantize/block_floats.py",
    "kernels/mtp_kernels/quantize/gptq.py",
    "kernels/mtp_kernels/state_space.py",
    "kernels/mtp_kernels/stored_linear/weights.py",
    "kernels/mtp_kernels/weight_statistics/figures.py",
)


def files_of(patterns: Any) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


def test_rooms_are_whole() -> None:
    """Every file is named once and by its whole path: no pattern gives a new one its tests."""
    named = [file for group in GROUPS for file in group["files"]]
    assert sorted(named) == sorted(files_of(WHOLE))


def test_every_test_is_there() -> None:
    for group in GROUPS:
        assert group["tests"]
        for argument in group["tests"]:
            path, _, name = argument.partition("::")
            if path.startswith("tests/"):
                assert (ROOT / path).exists(), path
                assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), argument


def test_all_mutants_run_every_week() -> None:
    recipe = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    job = recipe["jobs"]["mutants"]
    assert job["steps"][-1]["run"] == "make mutants ONLY=${{ matrix.only }}"
    starts = tuple(job["strategy"]["matrix"]["only"])
    assert all(file.startswith(starts) for file in files_of(WHOLE))
    assert all(any(file.startswith(start) for file in files_of(WHOLE)) for start in starts)


def test_what_the_target_installs_is_pinned() -> None:
    (installed,) = re.findall(r"--target build/mutmut (.+)", (ROOT / "Makefile").read_text())
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(installed.split()) == {"mutmut", "libcst"} <= pinned
