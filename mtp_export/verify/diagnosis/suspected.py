"""The changes that are suspected of a bundle whose source is not at hand: the one table of what is
undone to find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mtp_export.verify.diagnosis.scaled_variants import (
    half_variants,
    layer_norm_variants,
    output_variants,
    single_norm_variants,
)
from mtp_export.verify.diagnosis.variants import Variant, contract_variants, layout_variants
from mtp_runtime.models.model import Model, MtpModule

# Of an MTP module, by what is changed; acceptance judges the variants of each. Those of its experts
# and router, which share what each expert computes, are in experts.py.
OF_MODULE: dict[str, Callable[[Model, MtpModule], Iterable[Variant]]] = {
    "tensors mixed up": layout_variants,
    "contract": lambda model, module: contract_variants(module),
    "norms of the layer exchanged": layer_norm_variants,
    "1 + w of one norm": single_norm_variants,
    "sign and scale of the halves of eh_proj": half_variants,
    "sign of the attention's output": output_variants,
}


def module_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """Every variant of a module but those of its experts."""
    for variants in OF_MODULE.values():
        yield from variants(model, module)
