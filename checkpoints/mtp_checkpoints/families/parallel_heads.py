"""Parallel heads: drafts of several tokens from one hidden state, and their layouts on disk.

Head i (from 0) proposes the token i + 2 places after the row of its hidden state. Its body is of
residual feed-forward blocks (Blockwise Parallel Decoding, Medusa) or a decoder layer beside the
target's last one (Gloeckle et al.).

Source: arXiv 1811.03115; FasterDecoding/Medusa; vLLM's medusa; arXiv 2404.19737.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.fields import Fields

MODEL_TYPE = "parallel_heads"
ARCHITECTURE = "MedusaModel"  # vLLM's
ACTIVATIONS = ("silu", "relu")
MAX_HEADS = 32

# vLLM's names, which all others are read as; blocks of two matrices and layers are ours.
_NAMES = re.compile(
    r"blocks\.\d+\.layers\.\d+(\.(up|down))?\.(weight|bias)"
    r"|lm_heads\.\d+\.weight|lm_head\.weight|extra_heads\.\d+\..+"
)
_MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")
_EXTRA = re.compile(r"extra_heads\.(\d+)\.")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)(\.up)?\.weight")


class Body(StrEnum):
    """Kind of a head's body."""

    FFN = "ffn"
    LAYER = "layer"


@dataclass(frozen=True)
class HeadsLayout:
    """Tensors that parallel heads are stored in.

    blocks: residual blocks per head, 0 for layers. inner: rows of a block's first matrix where it
    has two, else 0. own_projections: every head has its own to the vocabulary, else all share one,
    which is stored (stored_projection) or the target's.
    """

    heads: int
    body: Body
    hidden: int
    vocab: int
    blocks: int = 1
    inner: int = 0
    biases: bool = True
    activation: str = "silu"
    own_projections: bool = False
    stored_projection: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor but those of layers, which are the target's."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for block in range(self.blocks):
                for name, shape in self._matrices(f"blocks.{head}.layers.{block}").items():
                    shapes[f"{name}.weight"] = shape
                    if self.biases:
                        shapes[f"{name}.bias"] = shape[:1]
            if self.own_projections:
                shapes[f"lm_heads.{head}.weight"] = (self.vocab, self.hidden)
        if self.stored_projection:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def _matrices(self, block: str) -> dict[str, tuple[int, int]]:
        if not self.inner:
            return {block: (self.hidden, self.hidden)}
        return {
            f"{block}.up": (self.inner, self.hidden),
            f"{block}.down": (self.hidden, self.inner),
        }

    def config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Return config.json: vLLM's where it computes such heads, with what it does not have."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "medusa" if self.runs_in_vllm else MODEL_TYPE,
            "torch_dtype": dtype,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "num_heads": self.heads,
            "num_hidden_layers": self.blocks,
            "medusa_fc_bias": self.biases,
            "original_lm_head": not self.own_projections,
            "body": str(self.body),
            "hidden_act": self.activation,
        }

    @property
    def runs_in_vllm(self) -> bool:
        """True for what vLLM's MedusaModel loads and computes as it is meant."""
        projected = self.own_projections or self.stored_projection
        return self.body is Body.FFN and not self.inner and self.activation == "silu" and projected


def released_name(name: str, config: Mapping[str, Any]) -> str:
    """Return a stored tensor's name as vLLM has it.

    Raises InvalidInputError for a name of no known layout: engines drop such tensors silently.
    """
    old = _MEDUSA.fullmatch(name)
    if old is not None:
        head, place, linear, kind = old.groups()
        if linear:
            return f"blocks.{head}.layers.{place}.{kind}"
        if kind == "weight":
            return f"lm_heads.{head}.weight"
    if name.startswith("lm_heads.0.") and config.get("original_lm_head"):
        return "lm_head.weight"  # vLLM writes the shared one so
    if _NAMES.fullmatch(name):
        return name
    raise InvalidInputError(
        f"Tensor {name} is of no known layout of parallel heads",
        expected="blocks.H.layers.L.weight, H.L.linear.weight, lm_heads.H.weight or"
        " extra_heads.H.*",
        found=name,
        todo="vLLM would drop it silently, and draft with what is left",
    )


def implied_config(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with what a layout implies that leaves it out: Medusa's blocks have
    biases, vLLM's have none."""
    old = any((match := _MEDUSA.fullmatch(name)) and match[3] for name in names)
    return {"medusa_fc_bias": old, **config}


def layout_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], vocab: int
) -> HeadsLayout:
    """Return the layout of tensors by vLLM's names, whose config.json may say little.

    Raises InvalidInputError for tensors that are missing, or that contradict each other or
    config.json.
    """
    fields = Fields(config).without_nulls()
    layers = {int(match[1]) for name in shapes if (match := _EXTRA.match(name))}
    ffn = {(int(match[1]), int(match[2])) for name in shapes if (match := _BLOCK.fullmatch(name))}
    if bool(layers) == bool(ffn):
        raise InvalidInputError(
            "There are no parallel heads in this draft" if not ffn else "Heads of two kinds",
            expected="blocks.H.layers.L.weight for each head, or extra_heads.H.*",
            found=", ".join(sorted(shapes)[:3]) or "no tensor",
        )
    heads = 1 + max(layers or {head for head, _ in ffn})
    _check_count(fields, heads)
    if layers:
        body = Body.LAYER
        hidden = fields.whole("hidden_size")
        _refuse_gaps(range(heads), layers, "extra_heads")
        return HeadsLayout(heads, body, hidden, vocab, blocks=0, biases=False)
    first = "blocks.0.layers.0.up.weight"
    some = shapes.get(first) or shapes.get("blocks.0.layers.0.weight") or (0, 0)
    layout = HeadsLayout(
        heads=heads,
        body=Body.FFN,
        hidden=some[-1],
        vocab=vocab,
        blocks=1 + max(block for _, block in ffn),
        inner=some[0] if first in shapes else 0,
        biases=_has_biases(shapes, fields),
        activation=fields.word("hidden_act", "silu", choices=ACTIVATIONS),
        own_projections=any(name.startswith("lm_heads.") for name in shapes),
        stored_projection="lm_head.weight" in shapes,
    )
    _compare(shapes, layout)
    return layout


def _has_biases(shapes: Mapping[str, tuple[int, ...]], fields: Fields) -> bool:
    """Return whether blocks have biases: by the tensors, and by config.json where it says so."""
    there = any(name.endswith(".bias") for name in shapes)
    promised = fields.flag("medusa_fc_bias")
    if promised and not there:
        raise InvalidInputError(
            "The biases of the heads are missing",
            expected="a bias beside every blocks.H.layers.L.weight, by medusa_fc_bias",
            found="none",
            todo="Get the draft again; vLLM would not notice, and draft without them",
        )
    if there and not promised:
        raise InvalidInputError(
            "The heads have biases that config.json leaves out",
            expected="medusa_fc_bias true",
            found="false",
            todo="Correct config.json; vLLM would drop the biases silently",
        )
    return there


def _check_count(fields: Fields, heads: int) -> None:
    for key in ("num_heads", "medusa_num_heads"):
        promised = fields.whole(key, heads, maximum=MAX_HEADS)
        if promised != heads:
            raise InvalidInputError(
                f"config.json promises another number of heads in {key}",
                expected=promised,
                found=f"{heads} in the tensors",
                todo="Correct config.json, or get the draft again",
            )


def _refuse_gaps(numbers: Iterable[int], present: set[int], what: str) -> None:
    lost = sorted(set(numbers) - present)
    if lost:
        raise InvalidInputError(
            f"Head {lost[0]} of the draft is missing",
            expected=f"{what}.{lost[0]}.*",
            found="no such tensor",
            todo="Get the draft again",
        )


def _compare(shapes: Mapping[str, tuple[int, ...]], layout: HeadsLayout) -> None:
    """Refuse tensors that are missing, of another shape, or not of the layout."""
    promised = layout.shapes()
    for name in (*promised, *shapes):
        if shapes.get(name) != promised.get(name):
            bias = name.endswith(".bias")
            raise InvalidInputError(
                f"Tensor {name} of the parallel heads is not as the others ask for",
                expected=list(promised[name]) if name in promised else "no such tensor",
                found=list(shapes[name]) if name in shapes else "no such tensor",
                todo="vLLM would not notice a missing bias" if bias else "Get the draft again",
            )
