"""The names by which vLLM's own classes of drafts ask a quantization config for the linears of a
family: those that `verify` goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_runs import process
from family_drafts import VLLM
from test_sglang_names import names_of

from cases import export
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from runtime.checkpoints import EXAMPLES, changed

READERS = {name: reader for name, reader in VLLM.items() if not reader.needs_gpu}
OF_SGLANG = "fused_qkv_a_proj_with_mqa"
UNASKED = "model.mtp.layers.0.self_attn.o_proj"  # of MiMo-V2, which its class builds unquantized


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder, job = tmp_path_factory.mktemp("families"), dict[str, object]()
    for model_type, reader in READERS.items():
        config = changed(family_config(model_type), **reader.fields)
        source = write_dense(folder / model_type, config=config | dict(EXAMPLES[model_type].whole))
        bundle = folder / f"{model_type}-bundle"
        made = export(source, bundle, "--target", "vllm", "--quiet")
        assert made.code == 0, made.err
        job[model_type] = {"main": str(bundle / "main"), "draft": str(bundle / "mtp")}
    script = Path(__file__).with_name("vllm_names.py")
    status, log, result = process(script, job, tmp_path_factory.mktemp("job"))
    assert status == 0, log[-3000:]
    found: dict[str, list[str]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", READERS)
def test_names_are_those_of_vllm(model_type: str, answers: dict[str, list[str]]) -> None:
    family = family_of(changed(family_config(model_type), **READERS[model_type].fields))
    layers = [module.layer.prefix for module in family.mtp]
    gates = {
        family.vllm.name_of(layers, spec.module)
        for spec in family.mtp_tensors.values()
        if spec.role is Role.DELTA_GATES
    }
    wanted = names_of(family, family.vllm, OF_SGLANG) - {UNASKED} | gates
    assert answers[model_type] == sorted(wanted)
