"""Write the table of families in docs/models.md from the registry and the tests that hold it.

    python scripts/models_table.py

It stands between `<!-- families -->` and `<!-- end -->`. A family's models are the beginning of its
file's docstring. tests/checkpoints/families/test_models_page.py holds the page to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "runtime", "checkpoints", "kernels", "tests")]
PAGE = ROOT / "docs/models.md"
_PART = re.compile(r"(?<=^<!-- families -->\n).*?(?=^<!-- end -->$)", re.M | re.S)
_COLUMNS = ("models", "`model_type`", "MTP layers", "run", "main model as in", "MTP layers as in")

# Oracles of models without MTP layers, and of their drafts, in tests/runtime.
_APART = {
    "a draft apart": ("transformers' class", ""),
    "a draft of its own": ("", "transformers' class and its candidate generator, run"),
}


def page_of(text: str) -> str:
    """Return the page with its table made anew."""
    head = f"| {' | '.join([*_COLUMNS, 'engines'])} |\n|{'---|' * (len(_COLUMNS) + 1)}"
    return _PART.sub("\n".join([head, *_rows()]) + "\n", text)


def _rows() -> Iterator[str]:
    from mtp_checkpoints.families import DRAFTED_APART, FAMILIES, SEPARATE_DRAFTS, family_of
    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_checkpoints.families.without_mtp import WITHOUT_MTP
    from mtp_checkpoints.layouts import engine_of
    from mtp_runtime.models.layer_types import why_not_computed
    from runtime.checkpoints import SMALL_CONFIGS

    for model_type, spec in FAMILIES.items():
        family = family_of(SMALL_CONFIGS[model_type])
        models = _models(sys.modules[spec.__module__].__doc__)
        engines = ", ".join(engine_of(name).title for name in family.engines) or "none known"
        run = "no" if why_not_computed(family) else "yes"
        main, mtp = _oracles(model_type)
        cells = (models, f"`{model_type}`", str(len(family.mtp)), run, main, mtp, engines)
        yield f"| {' | '.join(cells)} |"
    engines = ", ".join(engine_of(name).title for name in ModelSpec.engines)
    for kind, what in ((DRAFTED_APART, "a draft apart"), (SEPARATE_DRAFTS, "a draft of its own")):
        for model_type, spec in kind.items():
            models = _models(sys.modules[spec.__module__].__doc__)
            cells = (models, f"`{model_type}`", what, "yes", *_APART[what], engines)
            yield f"| {' | '.join(cells)} |"
    for model_type, words in WITHOUT_MTP.items():
        cells = (words.partition(":")[0], f"`{model_type}`", "none released", "", "", "", "")
        yield f"| {' | '.join(cells)} |"


def _models(docstring: str | None) -> str:
    """Return the names that a family's file begins with."""
    models, colon, _ = (docstring or "").partition(":")
    assert colon, "a family's file begins with its models and a colon"
    return " ".join(models.split())


def _oracles(model_type: str) -> tuple[str, str]:
    """Return what the tests compare a family's main model and MTP layers with."""
    from checkpoints.families import test_names as names
    from engines import family_drafts
    from runtime import test_family_oracles as runs
    from runtime import test_nemotron_module as modules
    from runtime.checkpoints import EXAMPLES
    from runtime.oracles import MTP_MODEL

    main = "not confirmed" if model_type in names.UNCONFIRMED else "transformers' class"
    if model_type in family_drafts.VLLM_MAINS:
        main = "vLLM's class"
    if model_type in family_drafts.SGLANG_MAINS:
        main = "SGLang's class"
    if model_type in names.OTHER_CLASS or EXAMPLES[model_type].like:
        main = "transformers' class of the same layers"
    readers = {"vLLM's": family_drafts.VLLM, "SGLang's": family_drafts.SGLANG}
    loaders = [whose for whose, drafts in readers.items() if model_type in drafts]
    mtp = f"{' and '.join(loaders)} loader{'s' * (len(loaders) > 1)}"
    if not loaders:
        mtp = "no class loads them"
    if model_type in family_drafts.RUN:
        mtp = "vLLM's module, run"
    if model_type in MTP_MODEL:
        mtp = "transformers' `MtpModel`"
    if model_type in modules.OF_LAYERS:
        mtp = "transformers' layers, put together as vLLM's, run"
    if model_type in runs.ORACLES or model_type == "deepseek_v3":
        mtp = "transformers' `use_mtp`, run"
    return main, mtp


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text()))
