"""Drafts that are trained, by the name that --draft takes. A new one is one file and one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtp_export.tune.draft import TrainedDraft
from mtp_export.tune.mtp import MtpDraft
from mtp_runtime.training.weights import WeightOptions

# Opens the draft of a bundle, on a device.
DRAFTS: dict[str, Callable[[Path, str, WeightOptions], TrainedDraft]] = {"mtp": MtpDraft.open}
