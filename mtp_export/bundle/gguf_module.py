"""An MTP module for a main model in GGUF files: llama.cpp loads it from a file of its own, which is
exported by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.quantization.native import is_gguf, quantization_of
from mtp_checkpoints.sources.byte_source import Place


def gguf_module_command(original: str, output: str) -> str:
    """Return the command that writes the file of the original's module, as `llama-server -md` takes
    it beside any main model of the same original."""
    return (
        f"mtp-export quantize --input-dir {original} --output-dir {output} --target llama.cpp"
        " --part mtp --base-quant q8_0"
    )


def refuse_gguf_main(place: Place, config: Mapping[str, Any], donor: Place, output: Place) -> None:
    """Refuse a main model in GGUF files, with the command for its module (UnsupportedError)."""
    if is_gguf(quantization_of(config)):
        raise UnsupportedError(
            "A main model in GGUF files gets its MTP module as another file, which is no graft",
            where=place,
            expected="a main model in safetensors files",
            found="GGUF files",
            todo="Write the module, and serve both with llama-server -m MAIN -md MODULE",
            command=gguf_module_command(str(donor), str(output)),
        )
