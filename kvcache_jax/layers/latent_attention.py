"""Multi-head latent attention: all heads read one latent vector per token."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import KeysValues, LayerKind, check_positive


@dataclasses.dataclass(frozen=True)
class LatentAttention(LayerKind):
    """A layer that stores one latent vector and one rotated key part per token, for all heads (MLA).

    `attention(cache, layer, q, latent, None, step, scale=..., weights=...)` takes `latent`
    `[n, T, 1, latent_dim + rope_dim]`, the compressed token and after it its rotated key part.

    Without weights queries are absorbed ones, `[q_nope W_k | q_rope]`, as wide as latents, and the results
    are sums of compressed tokens, `[..., latent_dim]`, to be multiplied by `W_v`. With weights
    `{"k": [latent_dim, heads, nope_dim], "v": [latent_dim, heads, value_dim]}` keys and values are computed
    of the compressed tokens, tile by tile: queries are `[q_nope | q_rope]`, results `[..., value_dim]`. Both
    give the same. The first takes less work for fewer than about 170 queries of a row. Give the scale: that
    of the latent's width is not meant.

    Attributes:
      latent_dim: Width of the compressed token, from which keys and values are computed.
      rope_dim: Width of the key part that is rotated, shared by all heads.

    Example:
      >>> import kvcache_jax as kv
      >>> layer = kv.LatentAttention(latent_dim=512, rope_dim=64)
      >>> config = kv.CacheConfig([layer], num_blocks=1, block_size=16, dtype="bfloat16")
      >>> kv.memory_bytes(config) // (2 * 16)  # values stored per token and layer
      576

    References:
      DeepSeek-V2 (DeepSeek-AI; arXiv:2405.04434).
    """

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False)
    latent_dim: int
    rope_dim: int

    def __post_init__(self):
        check_positive(self, "latent_dim", "rope_dim")
        object.__setattr__(self, "head_dim", self.latent_dim + self.rope_dim)
        super().__post_init__()

    @property
    def label(self) -> str:
        """Name and widths."""
        return f"LatentAttention({self.latent_dim} + {self.rope_dim})"

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Latents alone, as "k"."""
        return {"k": (1, self.head_dim)}

    def arrays(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the one array, which no mesh splits."""
        return {"latent": BlockArray((block_size, self.head_dim), dtype, head_axis=None, token_axis=0)}

    def encode(self, **new: jax.Array) -> Mapping[str, jax.Array]:
        """Drops the axis of heads."""
        return {"latent": new["k"][..., 0, :]}

    @property
    def rotated_features(self) -> Mapping[str, slice]:
        """The key part after the compressed token."""
        return {"latent": slice(self.latent_dim, None)}

    def keys_values(self, tile: Mapping[str, jax.Array], weights: Any = None) -> KeysValues:
        """Takes the latents as keys and their first part as values, or expands them by weights."""
        latent = tile["latent"]  # [1, tokens, head_dim]
        compressed = latent[..., : self.latent_dim]
        if weights is None:
            return KeysValues(latent, compressed)
        self._check_weights(weights)
        keys, values = (_expanded(compressed[0], weights[name]) for name in ("k", "v"))
        rotated = jnp.broadcast_to(latent[..., self.latent_dim :], (*keys.shape[:2], self.rope_dim))
        return KeysValues(jnp.concatenate([keys, rotated], axis=-1), values)

    def _check_weights(self, weights: Any) -> None:
        is_dict = isinstance(weights, dict) and {*weights} == {"k", "v"}
        shapes = [jnp.shape(weights[name]) for name in ("k", "v")] if is_dict else [(), ()]
        if [shape[:1] for shape in shapes] != [(self.latent_dim,)] * 2 or not _are_per_head(*shapes):
            raise ValueError(
                f"weights are {jax.tree.map(jnp.shape, weights)}, expected {{'k': ({self.latent_dim}, heads, "
                f"nope_dim), 'v': ({self.latent_dim}, heads, value_dim)}}"
            )


def _are_per_head(k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    return len(k) == len(v) == 3 and k[1] == v[1]


def _expanded(compressed: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiplies `[tokens, latent_dim]` by `[latent_dim, heads, d]`: `[heads, tokens, d]`."""
    precision = lax.Precision.HIGHEST if compressed.dtype == jnp.float32 else None
    product = jnp.einsum(
        "tl,lhd->htd",
        compressed,
        weights.astype(compressed.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return product.astype(compressed.dtype)
