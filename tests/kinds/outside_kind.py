"""A layer kind that the library does not know: keys and values side by side, tokens before heads."""

import dataclasses

import jax.numpy as jnp

import kvcache_jax as kv


@dataclasses.dataclass(frozen=True)
class SideBySide(kv.LayerKind):
    """A layer that stores keys beside the sums of keys and values, in one array."""

    window: int | None = dataclasses.field(default=None, kw_only=True)

    @property
    def span(self):
        return kv.Span(self.window)

    def arrays(self, block_size, dtype):
        shape = block_size, self.num_kv_heads, 2 * self.head_dim
        return {"both": kv.BlockArray(shape, dtype, head_axis=1, token_axis=0)}

    def encode(self, k, v):
        return {"both": jnp.concatenate([k, k + v], axis=-1)}

    def keys_values(self, tile, weights=None):
        self.refuse_weights(weights)
        k, sums = jnp.split(tile["both"], 2, axis=-1)
        return k, sums - k, None, None
