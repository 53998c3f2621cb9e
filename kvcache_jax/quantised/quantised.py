"""Quantised layers: full attention or a window whose keys and values take 4 or 8 bits a number."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.number_checks import static_flag
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import KeysValues, LayerKind
from kvcache_jax.layers.span import Span
from kvcache_jax.quantised.formats import FORMATS


@dataclasses.dataclass(frozen=True)
class Quantised(LayerKind):
    """A layer of another kind whose keys and values are stored in few bits.

    Every token and head has a scale of its own, computed from its numbers when they are written: there is
    nothing to calibrate, and nothing that goes stale when weights change. Equal keys and values are stored as
    equal bits, whatever the batch, the piece or the block. Scales and offsets are applied to logits and
    weights, not to tiles. Keys or values with a NaN or an infinite number are read as NaN. There is no
    gradient.

    Integers divide the range of the vector's own numbers, whether it holds 0 or not: a number is off by half
    a step at most, and 1/256 of that. "fp8" keeps four bits of each number: of numbers between 10 and 11
    "int8" keeps more.

    Attributes:
      kind: A layer kind that stores keys and values as they are: FullAttention, SlidingWindow or one's own.
      format: "int8" and "int4" with a scale and an offset, "fp8" (e4m3) with a scale, per token and head.
      rotate: Rotate keys, queries and values by an orthonormal Hadamard matrix, which spreads outliers over
        the numbers of a vector: of use with "int4". Of a `head_dim` that is no power of two, parts of the
        largest one that divides it.

    Raises:
      ValueError, TypeError: another format, a kind that stores something else, or an odd `head_dim` with
        "int4" or `rotate`.

    Example:
      >>> import kvcache_jax as kv
      >>> layer = kv.Quantised(kv.FullAttention(num_kv_heads=2, head_dim=64), "int8")
      >>> config = kv.CacheConfig([layer] * 4, num_blocks=16, block_size=16)
      >>> kv.memory_bytes(config) / (16 * 16 * 4 * 2 * 2 * 64)  # bytes a number, scales and offsets included
      1.09375

    References:
      QuaRot (Ashkboos et al.; arXiv:2404.00456) for rotations. KIVI (Liu et al.; arXiv:2402.02750) for what
      scales per channel would give keys, which need tokens in full precision beside the blocks.
    """

    num_kv_heads: int = dataclasses.field(init=False)
    head_dim: int = dataclasses.field(init=False)
    kind: LayerKind
    format: str
    rotate: bool = False

    is_differentiable = False

    def __post_init__(self):
        if not isinstance(self.kind, LayerKind) or not self.kind.is_plain:
            raise TypeError(
                f"kind is {self.kind!r}, expected a layer kind that stores keys and values as they are, such "
                "as FullAttention or SlidingWindow"
            )
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}, expected one of {', '.join(map(repr, FORMATS))}")
        object.__setattr__(self, "rotate", static_flag("rotate", self.rotate))
        for name in ("num_kv_heads", "head_dim"):
            object.__setattr__(self, name, getattr(self.kind, name))
        for name in ("num_blocks", "block_size", "dtype"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.kind, name))
        super().__post_init__()
        if self.rotate and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim} with rotate=True, expected an even number")
        self._parts()

    @property
    def span(self) -> Span:
        """The span of the kind."""
        return self.kind.span

    @property
    def label(self) -> str:
        """The kind's label and the format."""
        return f"Quantised({self.kind.label}, {self.format}{', rotated' if self.rotate else ''})"

    @property
    def has_scaled_numbers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every number has a byte."""
        return self._parts()[""][0] == self.head_dim

    def arrays(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the parts of keys and values: "k", "k_scale", ..., "v", "v_scale", ..."""
        arrays = {}
        for part, (width, part_dtype) in self._parts().items():
            shape = (self.num_kv_heads, block_size) + (() if width is None else (width,))
            arrays |= {_name(x, part): BlockArray(shape, part_dtype) for x in "kv"}
        return arrays

    def encode(self, **new: jax.Array) -> Mapping[str, jax.Array]:
        """Rounds keys and values to the format."""
        arrays = {}
        for x, values in new.items():
            parts = FORMATS[self.format].encode(self._rotated(values.astype(jnp.float32)))
            arrays |= {_name(x, part): array for part, array in parts.items()}
        return arrays

    def keys_values(self, tile: Mapping[str, jax.Array], weights: Any = None) -> KeysValues:
        """Widens the stored numbers once; scales and offsets are for logits and weights."""
        self.refuse_weights(weights)

        def read(x: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
            parts = {part: tile[_name(x, part)] for part in self._parts()}
            return FORMATS[self.format].decode(parts, jnp.float32 if self.dtype is None else self.dtype)

        (k, k_scale, k_offset), (v, v_scale, v_offset) = read("k"), read("v")
        return KeysValues(k, v, k_scale, v_scale, k_offset, v_offset)

    def queries(self, q: jax.Array) -> jax.Array:
        """Rotates queries as keys are."""
        return self._rotated(q)

    def outputs(self, out: jax.Array) -> jax.Array:
        """Rotates sums of rotated values back, in float32, whatever a backend gives."""
        return self._rotated(out.astype(jnp.float32))

    def _parts(self) -> Mapping[str, tuple[int | None, Any]]:
        return FORMATS[self.format].parts(self.head_dim)

    def _rotated(self, x: jax.Array) -> jax.Array:
        return hadamard(x) if self.rotate else x


def _name(x: str, part: str) -> str:
    return f"{x}_{part}" if part else x


def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies vectors `[..., n]` by an orthonormal Hadamard matrix, which is its own inverse.

    By additions of pairs, not by a product: the order of its sums must not depend on the batch.
    """
    size = x.shape[-1] & -x.shape[-1]  # the largest power of two that divides it
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    half = 1
    while half < size:
        pairs = parts.reshape(*parts.shape[:-1], size // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        parts = jnp.stack([first + second, first - second], axis=-2).reshape(parts.shape)
        half *= 2
    return (parts * np.asarray(size**-0.5, parts.dtype)).reshape(x.shape)
