"""Regular expressions of lists: matched as `re` matches them, and not for longer than a moment."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.quantization.entry_patterns import EntryPattern
from mtp_checkpoints.quantization.methods import quant_config_of

NAME = "model.layers.3.mlp.experts.12.gate_up_proj"
ENDLESS = r"(\w+\.?)+!"
QUICK = (r".*experts\.\d+\..*", r"model(\..*)?$", r"(model|layers|\d+|\.)+mlp", r".*a.*b.*c.*d.*")
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
OF_METHODS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "format": "pack-quantized",
        "ignore": [f"re:{ENDLESS}"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    },
    "gptq": {"bits": 4, "group_size": 32, "dynamic": {f"-:{ENDLESS}": {}}},
    "auto-round": {
        "bits": 4,
        "group_size": 32,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {ENDLESS: {"bits": 16}},
    },
    "quark": {"exclude": [f"re:{ENDLESS}"], "global_quant_config": {"weight": None}},
    "bitsandbytes": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": [ENDLESS],
    },
}


@pytest.mark.parametrize("text", QUICK)
def test_others_are_matched_as_they_are(text: str) -> None:
    pattern = EntryPattern(text)
    assert pattern.matches(NAME) == (text != QUICK[3])
    assert not pattern.matches(f"x{NAME}") or text == QUICK[0]
    assert EntryPattern(r"(\d+\.?)+gate").is_in(NAME)
    assert not EntryPattern(r"(\d+\.?)+gate").matches(NAME)


def test_one_that_is_endless_is_refused_once_and_for_all() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    pattern, started = EntryPattern(ENDLESS), time.process_time()
    for _ in range(20):
        for find in (pattern.matches, pattern.is_in):
            with pytest.raises(InvalidInputError, match="takes too long to match") as caught:
                find(NAME)
    assert time.process_time() - started < 10
    assert caught.value.found == f"{ENDLESS} for {NAME}"
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


@pytest.mark.parametrize("method", OF_METHODS)
def test_every_method_refuses_it(method: str) -> None:
    reading = quant_config_of({"quant_method": method, **OF_METHODS[method]})
    with pytest.raises(InvalidInputError, match="takes too long to match"):
        reading.format_of(NAME, Role.ROUTED_EXPERT)
