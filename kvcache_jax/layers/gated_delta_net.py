"""Gated DeltaNet and Kimi Delta Attention: heads whose matrices decay, and which each token corrects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import check_count, check_positive
from kvcache_jax.layers.matrix_state_parts import convolved, folded, point_arrays
from kvcache_jax.layers.recurrent import Arrays, Recurrent
from kvcache_jax.layers.required_shapes import require_shapes
from kvcache_jax.recurrence import matrix_state


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet(Recurrent):
    """A layer of Gated DeltaNet, or with a decay per channel of Kimi Delta Attention (KDA).

    `recurrence(cache, layer, new, step, weights=...)` takes of each token:

    * `x [channels]`: queries, keys and values `(q | k | v)` before the convolution, `channels = 2 *
      num_key_heads * key_dim + num_kv_heads * head_dim`;
    * `g [num_kv_heads]`, or `[num_kv_heads, key_dim]` with a decay per channel: log decays, at most 0;
    * `beta [num_kv_heads]`: how far the value of the token's key is corrected, from 0 to 1.

    Weights are `{"conv": [kernel, channels]}`, the last one for a token's own input, and "bias" `[channels]`
    where the convolution has one. After it comes silu; queries and keys get the length 1, and queries are
    scaled by `key_dim**-0.5`. Results are `[num_kv_heads, head_dim]`, in the dtype of `x`.

    Attributes:
      num_kv_heads: Heads of values, each with a matrix of `head_dim` x `key_dim` in float32.
      head_dim: Width of a value.
      key_dim: Width of queries and keys.
      num_key_heads: Heads of queries and keys, each for equally many consecutive heads of values. Default:
        one for each.
      kernel: Inputs of the convolution, the token's own included.
      decay: "head", or "channel" for log decays per channel of keys.
      dtype: Of what a token stores until the next point, in place of the config's.

    Example:
      >>> import kvcache_jax as kv
      >>> layer = kv.GatedDeltaNet(num_kv_heads=32, head_dim=128, key_dim=128, num_key_heads=16)
      >>> layer.num_channels
      8192

    References:
      Gated Delta Networks (Yang et al.; arXiv:2412.06464), Kimi Linear (Kimi Team; arXiv:2510.26692).
    """

    key_dim: int = dataclasses.field(kw_only=True)
    num_key_heads: int | None = dataclasses.field(default=None, kw_only=True)
    kernel: int = dataclasses.field(default=4, kw_only=True)
    decay: str = dataclasses.field(default="head", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.num_key_heads is None:
            object.__setattr__(self, "num_key_heads", self.num_kv_heads)
        check_positive(self, "key_dim", "num_key_heads")
        check_count(self, "kernel", least=2)
        if self.num_kv_heads % self.key_heads:
            raise ValueError(
                f"num_key_heads is {self.num_key_heads}, expected a divisor of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if not isinstance(self.decay, str) or self.decay not in ("head", "channel"):
            raise ValueError(f"decay is {self.decay!r}, expected 'head' or 'channel'")

    @property
    def key_heads(self) -> int:
        """Heads of queries and keys."""
        return self.num_key_heads or self.num_kv_heads

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.num_kv_heads * self.head_dim

    @property
    def _decay_shape(self) -> tuple[int, ...]:
        return (self.num_kv_heads, self.key_dim) if self.decay == "channel" else (self.num_kv_heads,)

    def point(self, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the heads' matrices and the convolution's last inputs."""
        state = self.num_kv_heads, self.head_dim, self.key_dim
        return point_arrays(state, (self.kernel - 1, self.num_channels), dtype)

    def entry(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns keys, changes and log decays of the matrices, and inputs of the convolution."""

        def array(*shape: int, dtype: Any = dtype, head_axis: int | None = 1) -> BlockArray:
            return BlockArray((block_size, *shape), dtype, head_axis, token_axis=0)

        return {
            "k": array(self.key_heads, self.key_dim),
            "u": array(self.num_kv_heads, self.head_dim),
            "g": array(*self._decay_shape, dtype=jnp.float32),
            "inputs": array(self.num_channels, head_axis=None),
        }

    def advance(
        self, point: Arrays, held: Arrays, count: jax.Array, new: Arrays, weights: Any
    ) -> tuple[jax.Array, Arrays]:
        """Computes outputs `[T, num_kv_heads, head_dim]` and entries of new tokens."""
        channels = self.num_channels
        inputs = {"x": (channels,), "g": self._decay_shape, "beta": (self.num_kv_heads,)}
        require_shapes(f"new inputs of {self.label} per token", new, inputs, first_axis=1)
        shapes = {"conv": (self.kernel, channels), "bias": (channels,)}
        require_shapes(f"weights of {self.label}", weights, shapes, optional=["bias"])
        x = convolved(point, held, count, new["x"], weights)
        q, k, v = jnp.split(x, [self.key_heads * self.key_dim, 2 * self.key_heads * self.key_dim], axis=-1)
        q, k = (_normalised(each.reshape(len(x), self.key_heads, self.key_dim)) for each in (q, k))
        v = v.reshape(len(x), self.num_kv_heads, self.head_dim)
        before = matrix_state.Entries(held["k"], held["u"], held["g"])
        q = q * self.key_dim**-0.5
        out, u = matrix_state.advance(point["state"], before, q, k, v, new["g"], new["beta"])
        return out.astype(new["x"].dtype), {"k": k, "u": u, "g": new["g"], "inputs": new["x"]}

    def fold(self, point: Arrays, entries: Arrays) -> Arrays:
        """Computes the matrices after a block, and the convolution's last inputs."""
        changes = matrix_state.Entries(entries["k"], entries["u"], entries["g"])
        return folded(point, entries["inputs"], changes)


def _normalised(x: jax.Array) -> jax.Array:
    """Scales vectors `[..., n]` to length 1, those near 0 to less."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
