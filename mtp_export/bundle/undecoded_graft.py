"""Main model of a graft whose numbers are not decoded here: its tensors are copied as they are."""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.formats.ggml_blocks import OpaqueBlocks
from mtp_checkpoints.quantization.native import with_quantization
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.quantization.undecoded import Undecoded
from mtp_export.bundle.graft_sources import GraftSources


def undecoded_main(sources: GraftSources, known: Undecoded) -> StoredModel:
    """Return the weights of a main model of a quantization, as far as plans ask for them: in their
    released shapes, tables that are quantized as ones that nothing can compare.

    Raises InvalidInputError for one that lacks a weight, where they have their released names.
    """
    tensors = sources.donor.tensors if known.renames else sources.main_tensors
    main = stored_model(with_quantization(sources.config, None), tensors).main
    if not known.renames:
        missing = [one for one in main.differences(tensors) if one.problem == "missing"]
        if missing:
            missing[0].raise_as_error(sources.host.path, len(missing) - 1)
    kinds = [
        kind
        if (own := sources.host.tensors.get(kind.specs[0].name)) is None or own.dtype in FLOATS
        else kind._replace(format=OpaqueBlocks())
        for kind in main.kinds
    ]
    return replace(main, kinds=kinds)
