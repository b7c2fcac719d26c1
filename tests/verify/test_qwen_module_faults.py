"""Faults of the trained Qwen3.5's MTP module are named by its drafts, without a source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cases import export
from faults.fault import Fault
from faults.suspected_faults import SUSPECTED_QWEN_FAULTS
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.models.load import LoadOptions, load_model
from verify.test_run_faults import TOKENS, Good, causes, diagnosis, held_out

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/qwen3-5-tiny"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    bundle = tmp_path_factory.mktemp("good") / "bundle"
    assert export(FIXTURE, bundle, "--link", "copy", "--quiet").code == 0
    model = load_model(bundle, LoadOptions()).model
    corpus = Corpus(model, tuple(held_out(16, FIXTURE)), TOKENS)
    return Good(bundle, corpus, few=corpus)


def test_no_false_alarm(good: Good) -> None:
    assert causes(diagnosis(good, good.bundle)) == ""


@pytest.mark.parametrize("fault", SUSPECTED_QWEN_FAULTS, ids=lambda fault: fault.name)
def test_fault_is_named(fault: Fault, good: Good, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(good.bundle, tmp_path / "bundle"))
    fault.plant(bundle)
    assert fault.cause in causes(diagnosis(good, bundle))
