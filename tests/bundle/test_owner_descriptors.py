"""Claims on a folder leave no file open, whoever made the one that is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtp_checkpoints.errors import OutputExistsError
from mtp_export.bundle import owner
from mtp_export.bundle.owner import OWNER_NAME, Owner


def test_no_descriptor_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.05)
    path = tmp_path / OWNER_NAME
    elsewhere = dict.fromkeys(("host", "process", "began", "machine", "started"), "elsewhere")
    path.write_text(json.dumps(elsewhere))
    before = len(os.listdir("/proc/self/fd"))
    own = Owner(path)
    own.check()
    with pytest.raises(OutputExistsError):
        Owner(path)
    own.release()
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before
