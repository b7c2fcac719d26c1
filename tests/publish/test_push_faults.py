"""Pushes that meet faults, kills and other writers: all of a bundle is committed, or nothing, and
the same command goes on."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import nightly_but, tree
from hub_server import HubServer
from publish.pushing import NAME, content, facts, is_untouched, push, requests, sent_shards

SURVIVED = [
    ("too many requests", 3, 0),
    ("unavailable", 3, 0),
    ("upload unavailable", 2, 4),
    ("upload cut", 1, 3),
    ("commit unavailable", 2, 0),
    ("commit lost", 1, 0),
]
ENDED = [
    ("upload refused", 6, "storage takes no bytes"),
    ("upload unavailable", 6, "storage takes no bytes"),
    ("upload cut", 6, "broke off"),
    ("wrong upload", 6, "Hub answers with an error"),
    ("commit unavailable", 6, "HTTP 503"),
    ("commit conflict", 6, "Somebody else changed the repository"),
    ("preupload refused", 3, "may not write"),
    ("account full", 6, "the account's storage is used up"),
    ("odd answer", 6, "An upload failed"),
]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log of huggingface_hub: it would be printed, with signed addresses."""
    logger = logging.getLogger("huggingface_hub")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("fault", "times", "after"), nightly_but([SURVIVED[0], SURVIVED[3], SURVIVED[5]], SURVIVED)
)
def test_faults_that_pass_are_survived(
    fault: str, times: int, after: int, hub: HubServer, exported: Path
) -> None:
    hub.plant(fault, times, after=after)
    facts(exported)
    assert content(hub).items() >= tree(exported / "bundle").items()
    assert not hub.meets(fault)


@pytest.mark.parametrize(
    ("fault", "code", "words"), nightly_but([ENDED[0], *ENDED[3:4], *ENDED[5:]], ENDED)
)
def test_faults_that_stay_leave_nothing_and_the_same_command_goes_on(
    fault: str,
    code: int,
    words: str,
    hub: HubServer,
    exported: Path,
    said: pytest.LogCaptureFixture,
) -> None:
    in_uploads = fault.startswith(("upload", "wrong"))
    hub.plant(fault, after=5 if in_uploads else 0)
    outcome = push(exported)
    hub.settle()
    assert outcome.code == code, outcome.err
    assert words in outcome.err and outcome.err.count("\n\n") == 0
    assert "Traceback" not in outcome.err and "generation=" not in outcome.err
    assert hub.token not in outcome.err + said.text
    assert {record.name for record in said.records} <= {"mtp_checkpoints.sources.transfers"}
    assert not any(name.endswith((".safetensors", "config.json")) for name in content(hub))
    sent = sent_shards(hub) - (fault == "wrong upload")
    assert sent >= (5 if in_uploads else 0)
    hub.mend()
    facts(exported, *(["--overwrite"] if fault == "commit conflict" else []))
    hub.settle()
    assert content(hub).items() >= tree(exported / "bundle").items()
    shards = len(list((exported / "bundle").rglob("*.safetensors")))
    assert sent_shards(hub) == shards + 1 - sent  # one tokenizer, which both parts have


def test_what_the_hub_lists_is_compared_in_the_end(hub: HubServer, exported: Path) -> None:
    hub.plant("other listing", 1)
    outcome = push(exported)
    assert outcome.code == 7
    assert "does not hold what was pushed" in outcome.err and "1 of" in outcome.err


def test_a_bundle_that_changes_meanwhile_is_not_committed(
    hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    changed = folder / "bundle/main/model-00001-of-00004.safetensors"
    hub.during_upload = lambda: os.utime(changed)
    outcome = push(folder)
    assert outcome.code == 3
    assert "changed while it was uploaded" in outcome.err and str(changed) in outcome.err
    assert is_untouched(hub)


@pytest.mark.parametrize("end", nightly_but([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT]))
def test_ended_in_an_upload_it_goes_on(end: signal.Signals, hub: HubServer, exported: Path) -> None:
    hub.plant("upload stalled", after=4)
    arguments = ["push", exported / "bundle", NAME, "--report", exported / "report.json"]
    child = subprocess.Popen(
        [sys.executable, "-m", "mtp_export", *map(str, arguments), "--quiet"],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while len(requests(hub, "POST", "lfs/verify")) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(end)
    _, said = child.communicate()
    assert child.returncode == (130 if end is signal.SIGINT else -end)
    assert b"Traceback" not in said
    assert is_untouched(hub) and sent_shards(hub) == 4
    hub.mend()
    hub.released.set()
    facts(exported)
    assert content(hub).items() >= tree(exported / "bundle").items()
    shards = len(list((exported / "bundle").rglob("*.safetensors")))
    assert sent_shards(hub) - 4 <= shards + 1 - 4 <= sent_shards(hub)


def test_a_repository_that_appears_meanwhile_is_left_alone(hub: HubServer, exported: Path) -> None:
    push(exported, "--part", "mtp")
    theirs = content(hub)
    hub.plant("hidden", 1)
    outcome = push(exported)
    assert outcome.code == 6 and "Somebody else changed the repository" in outcome.err
    assert content(hub) == theirs


def test_offline_says_so(hub: HubServer, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    outcome = push(exported)
    assert outcome.code == 6 and "cannot be reached" in outcome.err
