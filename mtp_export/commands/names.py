"""Names that can be typed: the commands, and by kind the values of options. Completion, help,
refusals with what was meant and docs/cli.md take them from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtp_export.options import Names

# Each is a function of the module of its name; help and docs/cli.md list them in this order, with
# these words.
COMMANDS: Mapping[str, str] = {
    "export": "Split a checkpoint into a bundle: main model and MTP module, a folder each.",
    "quantize": "Convert main model and MTP module, each to its own precision.",
    "graft": "Give a quantized model the MTP layer that it lost.",
    "tune": "Train the draft of a bundle for the target that the bundle holds.",
    "finish": "Finish a bundle that was made in shares.",
    "verify": "Check a bundle or a checkpoint: files, weights, decoding.",
    "generate": "Decode prompts with speculation; accepted drafts are green and underlined.",
    "serve": "Serve a bundle to clients of the OpenAI API, with a page to watch it.",
    "compile": "Compile the decode step of a bundle for this CPU, and time it.",
    "launch": "Print or run the command of an engine that serves a bundle.",
    "inspect": "Show what a checkpoint holds, from its headers alone.",
    "push": "Upload a verified bundle to the Hugging Face Hub, with a model card.",
    "env": "Show versions and the machine, for reports of defects.",
}
ALIASES = {"doctor": "env"}


def _schemes() -> Sequence[str]:
    from mtp_export.schemes import SCHEMES
    from mtp_export.schemes.scheme import KEEP

    return (*SCHEMES, KEEP)


def _mtp_schemes() -> Sequence[str]:
    """Return those of the MTP module: in GGUF files that of the precision table, elsewhere no int4
    under inputs in fp8."""
    from mtp_export.schemes import SCHEMES
    from mtp_export.schemes.table import GGUF_MTP, GGUF_SCHEMES

    mixed = {name for name, scheme in SCHEMES.items() if scheme.int4_activations_fp8}
    others = {*GGUF_SCHEMES, *mixed} - {GGUF_MTP}
    return [name for name in _schemes() if name not in others]


def _graft_schemes() -> Sequence[str]:
    """Return those that a grafted layer is written in, of the pairs of the precision table; its
    main model's has no scheme to keep."""
    from mtp_export.schemes.table import PAIRS

    known = {pair.mtp for pair in PAIRS}
    return [name for name in _mtp_schemes() if name in known]


def _group_sizes() -> Sequence[str]:
    from mtp_checkpoints.formats.base import GROUP_SIZES

    return [str(size) for size in GROUP_SIZES]


def _targets() -> Sequence[str]:
    from mtp_checkpoints.layouts import target_names

    return target_names()


def _engines() -> Sequence[str]:
    from mtp_checkpoints.layouts import names_that_serve

    return names_that_serve()


def _draft_engines() -> Sequence[str]:
    from mtp_checkpoints.layouts import names_that_read_drafts

    return names_that_read_drafts()


def _drafters() -> Sequence[str]:
    from mtp_runtime.config import AUTO_DRAFTS
    from mtp_runtime.drafters import DRAFTERS

    return (AUTO_DRAFTS, *DRAFTERS)


def _trained_drafts() -> Sequence[str]:
    from mtp_export.tune.drafts import DRAFTS

    return (*DRAFTS,)


def _levels() -> Sequence[str]:
    from mtp_export.verify.options import LEVELS

    return (*LEVELS,)


def _address_schemes() -> Sequence[str]:
    from mtp_checkpoints.sources.addresses import SOURCES

    return [f"{scheme}://" for scheme in SOURCES]


# Registries grow, and take time to import: each is asked when a name of its kind is.
_NAMES: Mapping[Names, Callable[[], Sequence[str]]] = {
    Names.COMMAND: lambda: (*COMMANDS, *ALIASES),
    Names.SHELL: lambda: ("bash", "zsh", "fish", "powershell", "pwsh"),
    Names.SCHEME: _schemes,
    Names.MTP_SCHEME: _mtp_schemes,
    Names.GRAFT_SCHEME: _graft_schemes,
    Names.GROUP_SIZE: _group_sizes,
    Names.TARGET: _targets,
    Names.ENGINE: _engines,
    Names.DRAFT_ENGINE: _draft_engines,
    Names.DRAFTER: _drafters,
    Names.TRAINED_DRAFT: _trained_drafts,
    Names.LEVEL: _levels,
    Names.DEVICE: lambda: ("cpu", "cuda", "npu"),
    Names.TORCH_DEVICE: lambda: ("cpu", "cuda"),
    Names.DTYPE: lambda: ("float32", "bfloat16"),
    Names.ACTIVATIONS: lambda: ("float32", "bfloat16", "int8"),
    Names.JOIN_MODE: lambda: ("gather", "reduce"),
    Names.ADDRESS: _address_schemes,
}


def names_of(kind: Names) -> Sequence[str]:
    """Return the names of a kind, as they are registered now."""
    return _NAMES[kind]()
