"""python -m fuzz.guided TARGET: inputs grown by the branches that they reach, with atheris.

Arguments after the target are libFuzzer's, such as -seed=1 and -max_total_time=60.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import atheris
from safetensors import deserialize

with atheris.instrument_imports(
    include=["json", "mtp_export", "mtp_checkpoints", "mtp_runtime.prompts"]
):
    from mtp_checkpoints.containers import safetensors_header as header
    from mtp_checkpoints.errors import MtpExportError
    from mtp_checkpoints.sources import strict_json
    from mtp_runtime.prompts import read_texts

_FOLDER = Path(tempfile.mkdtemp(prefix="mtp-guided-"))


@dataclass(frozen=True)
class _InMemory:
    """A file whose bytes are at hand."""

    raw: bytes
    path: Path = Path("input.safetensors")
    version: int = 0
    sha256: None = None

    @property
    def size_bytes(self) -> int:
        return len(self.raw)

    def open(self, once: range | None = None) -> _InMemory:
        return self

    def read(self, start: int, end: int) -> bytes:
        return self.raw[start:end]

    def close(self) -> None:
        """There is nothing to close."""


def _header(raw: bytes) -> None:
    """Compare what is read as a header with what safetensors' own reader finds in it."""
    shard = len(raw).to_bytes(8, "little") + raw + bytes(len(raw) % 64)
    with suppress(MtpExportError):
        found = header.read_header(_InMemory(shard)).tensors
        theirs = {name: (t["dtype"], tuple(t["shape"])) for name, t in deserialize(shard)}
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in found} == theirs


def _json(raw: bytes) -> None:
    """Compare what is read as JSON with what Python's own parser makes of it."""
    with suppress(ValueError, RecursionError):
        assert repr(strict_json.parse(raw)) == repr(json.loads(raw))


def _prompts(raw: bytes) -> None:
    """Check that what is read as prompts is texts and token ids."""
    path = _FOLDER / "prompts.jsonl"
    path.write_bytes(raw)
    with suppress(MtpExportError):
        for prompt, _ in read_texts(path):
            assert isinstance(prompt, str) or all(type(token) is int for token in prompt)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": _header,
    "json": _json,
    "prompts": _prompts,
}
_SEEDS: tuple[bytes, ...] = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[2,1],"data_offsets":[0,2]}}',
    b'{"model_type":"deepseek_v3","rope_scaling":{"factor":1.5},"x":[null,true,-1e3,"\\u00e9"]}',
    b'{"prompt": "a"}\n{"prompt_token_ids": [1, 2], "completion": "b"}\n',
)


def main() -> None:
    """Fuzz one target until libFuzzer's limit; an error ends the process with its input."""
    target = TARGETS[sys.argv[1]]
    corpus = _FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(_SEEDS):
        (corpus / str(number)).write_bytes(seed)
    limits = ("-max_len=4096", "-timeout=5", "-rss_limit_mb=1000")
    options = [*limits, f"-artifact_prefix={_FOLDER}/", *sys.argv[2:], str(corpus)]
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
