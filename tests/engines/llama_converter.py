"""Run llama.cpp's own converter on a checkpoint, to bf16: its sources, the checkpoint, the file to
write, and mtp (the module and what it shares) or no-mtp.

Its table of pre-tokenizers does not know the fixtures' tokenizer, nor have they GLM's own tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES, CHECKPOINT, OUTPUT, KIND = sys.argv[1:5]
sys.path[:0] = [SOURCES, f"{SOURCES}/gguf-py"]

import gguf  # noqa: E402  of these sources
from conversion import get_model_class  # type: ignore[import-not-found]  # noqa: E402
from conversion.base import TextModel  # type: ignore[import-not-found]  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_glm = TextModel._set_vocab_gpt2


def main() -> None:
    hparams = TextModel.load_hparams(Path(CHECKPOINT), is_mistral_format=False)
    model_class = get_model_class(hparams["architectures"][0])
    model_class.mtp_only, model_class.no_mtp = KIND == "mtp", KIND == "no-mtp"
    model_class(Path(CHECKPOINT), gguf.LlamaFileType.MOSTLY_BF16, Path(OUTPUT)).write()


main()
