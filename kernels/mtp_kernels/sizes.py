"""Sizes of a decoder's parts: checkpoints are described by them, layers made of them, and compiled
code takes them as they are, so that they are named tuples of numbers."""

from __future__ import annotations

from typing import NamedTuple

Shapes = dict[str, tuple[int, ...] | None]
LANES = 16  # floats of a vector of compiled code


class LatentSizes(NamedTuple):
    """Sizes of latent attention. A slot of its cache is [latent | rope key].

    query_rank 0: queries are projected from the hidden state in one step. Neighbouring entries of
    the last r of a query, and of the rope key, are rotated as pairs.
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_rank: int

    @property
    def projected(self) -> int:
        """Outputs of the first projection."""
        query = self.query_rank or self.heads * (self.nope + self.rope)
        return query + self.latent + self.rope

    @property
    def slot(self) -> int:
        """Numbers that are cached of a token."""
        return self.latent + self.rope

    @property
    def key(self) -> int:
        """Width of what is multiplied with a cached key."""
        return self.latent + self.rope

    @property
    def attended(self) -> int:
        """Width of a head's sum of cached values."""
        return self.latent

    @property
    def output(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.value

    def weights(self, hidden: int, input_width: int) -> Shapes:
        """Return the shapes of the weights, given those of the stream and of attention's input."""
        width, rank = self.nope + self.rope, self.query_rank
        return {
            "down": (self.projected, input_width),
            "query_norm": (rank,) if rank else None,
            "query_up": (self.heads, width, rank) if rank else None,
            "latent_norm": (self.latent,),
            "key_up": (self.heads, self.nope, self.latent),
            "value_up": (self.heads, self.value, self.latent),
            "output": (hidden, self.output),
        }


class GroupedSizes(NamedTuple):
    """Sizes of attention whose kv_heads keys and values are shared by as many groups of heads. A
    slot of its cache is [keys of all kv_heads | values].

    The first `rope` entries of a head are rotated, an entry of their first half being a pair with
    one of the second. has_bias: of the projection; has_norms: of every query and key. is_gated: a
    head projects [query | gate], and the sigmoid of its gate multiplies what it attended to.
    """

    heads: int
    kv_heads: int
    head: int
    rope: int
    has_bias: bool
    has_norms: bool
    is_gated: bool = False

    @property
    def projected(self) -> int:
        """Outputs of the first projection."""
        return (self.queries + 2 * self.kv_heads) * self.head

    @property
    def queries(self) -> int:
        """Queries that are projected, and gates where there are some."""
        return self.heads * (2 if self.is_gated else 1)

    @property
    def slot(self) -> int:
        """Numbers that are cached of a token."""
        return 2 * self.kv_heads * self.head

    @property
    def key(self) -> int:
        """Width of what is multiplied with a cached key."""
        return self.head

    @property
    def attended(self) -> int:
        """Width of a head's sum of cached values."""
        return self.head

    @property
    def output(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.head

    def weights(self, hidden: int, input_width: int) -> Shapes:
        """Return the shapes of the weights, given those of the stream and of attention's input."""
        norm = (self.head,) if self.has_norms else None
        return {
            "qkv": (self.projected, input_width),
            "bias": (self.projected,) if self.has_bias else None,
            "query_norm": norm,
            "key_norm": norm,
            "output": (hidden, self.output),
        }


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net: value heads, of which equally many in a row share a key head, and
    the taps of the causal convolution over its channels, [queries | keys | values].

    key and value are the elements of a head's key (or query) and value; its state is [value, key].
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key + self.output

    @property
    def output(self) -> int:
        """Inputs of the output projection."""
        return self.value_heads * self.value

    @property
    def has_whole_vectors(self) -> bool:
        """True where keys are whole vectors, as compiled code takes them."""
        return self.key % LANES == 0

    def weights(self, hidden: int, input_width: int) -> Shapes:
        """Return the shapes of the weights, given those of the stream and of attention's input."""
        heads = self.value_heads
        return {
            "inputs": (self.channels + self.output, input_width),
            "gate_inputs": (2 * heads, input_width),
            "convolution": (self.channels, self.width),
            "rate": (heads,),
            "decay_bias": (heads,),
            "value_norm": (self.value,),
            "output": (hidden, self.output),
        }


class Routing(NamedTuple):
    """Choice of a sparse layer's experts, and the weights of those that are picked.

    Experts are picked within the groups_per_token best of some groups. scale multiplies their
    weights, after normalises made them sum to 1.
    """

    experts_per_token: int
    groups: int
    groups_per_token: int
    normalises: bool
    scale: float


ONE_EXPERT = Routing(1, 1, 1, normalises=False, scale=1.0)
