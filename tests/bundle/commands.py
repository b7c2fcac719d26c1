"""Commands that tests interrupt, and what must hold before their bundles are whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import Outcome, export, looks_finished, quantize, read_json, tree
from disk import watched_disk

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Command:
    """Options of an export or a quantization. before: what makes the bundle
    that it replaces, if it does."""

    program: Callable[..., Outcome]
    options: tuple[str, ...]
    before: tuple[str, ...] | None = None

    def run(self, source: Path, output: Path) -> Outcome:
        """The run, resumed or new; the machine's own disk is not waited for."""
        with watched_disk(lambda *_: None):
            return self.program(source, output, *self.options, "--quiet")

    def prepare(self, source: Path, output: Path) -> Files | None:
        """Make the bundle that is replaced, if there is one; return its files."""
        if self.before is None:
            return None
        assert export(source, output, *self.before, "--quiet").code == 0
        return tree(output)


# Of the fixture `unfinished`: small files, and --link copy has the main part written too.
UNFINISHED = ("--max-shard-size", "60kB", "--link", "copy", "--workers", "2", "--quiet")
_SMALL = ("--max-shard-size", "60kB", "--workers", "2")
_GGUF = (
    *("--target", "llama.cpp", "--pre-tokenizer", "none"),
    *("--base-quant", "q4_0", "--tensor-type", "ffn_down=q5_1"),
)
_INT8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
_NVFP4 = ("--base-quant", "a4w4_nvfp4", "--mtp-quant", "weight_only_nvfp4", "--allow-untested-pair")
COMMANDS = {
    "export": Command(export, (*_SMALL, "--link", "copy")),
    "export, linked": Command(export, (*_SMALL, "--link", "hardlink", "--checksums", "all")),
    "export over another": Command(
        export, (*_SMALL, "--link", "copy", "--overwrite"), before=("--target", "paddlenlp")
    ),
    "quantize": Command(quantize, (*_INT8, *_SMALL)),
    "quantize, nvfp4": Command(quantize, (*_NVFP4, "--scale", "mse", *_SMALL)),
    "quantize, GGUF": Command(quantize, (*_GGUF, "--max-shard-size", "300kB", "--workers", "2")),
}
# Behind this key llama.cpp's file of a module has the identity of its main model, in 64 digits.
_IDENTITY = re.compile(rb"(mtp_export\.main_identity.{12})[0-9a-f]{64}", re.S)


def check_nothing_looks_whole(output: Path, wholes: Sequence[Files]) -> None:
    """An output that looks finished, or a part of it that a loader would take, is one of these; a
    GGUF file, which is loaded alone, is whole but for the identity that is written at the end."""
    found = tree(output) if output.is_dir() else {}
    if looks_finished(output):
        assert found in wholes
    for name in (name for name in found if name.endswith(".gguf")):
        of_whole = [_IDENTITY.sub(rb"\1", whole.get(name, b"")) for whole in wholes]
        assert _IDENTITY.sub(rb"\1", found[name]) in of_whole
    for part in ("main", "mtp"):
        files = {name: content for name, content in found.items() if name.startswith(f"{part}/")}
        if not _is_loadable(output / part, files):
            continue
        assert any(
            all(
                files.get(name) == content
                for name, content in whole.items()
                if name.startswith(f"{part}/")
            )
            for whole in wholes
        )


def _is_loadable(folder: Path, files: Files) -> bool:
    index = folder / "model.safetensors.index.json"
    if f"{folder.name}/config.json" not in files or not index.exists():
        return False
    shards = set(read_json(index)["weight_map"].values())
    return all(f"{folder.name}/{shard}" in files for shard in shards)


def finish(command: Command, source: Path, output: Path, whole: Files) -> None:
    """The same command again ends with the whole bundle."""
    if not looks_finished(output) or tree(output) != whole:
        outcome = command.run(source, output)
        assert outcome.code == 0, outcome.err
    assert tree(output) == whole
