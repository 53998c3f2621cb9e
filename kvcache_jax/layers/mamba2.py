"""Mamba-2: heads whose matrices decay, and to which each token adds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import check_count, check_positive
from kvcache_jax.layers.matrix_state_parts import convolved, folded, point_arrays
from kvcache_jax.layers.recurrent import Arrays, Recurrent
from kvcache_jax.layers.required_shapes import require_shapes
from kvcache_jax.recurrence import matrix_state


@dataclasses.dataclass(frozen=True)
class Mamba2(Recurrent):
    """A layer of Mamba-2 (state space duality).

    `recurrence(cache, layer, new, step, weights=...)` takes of each token:

    * `x [channels]`: inputs of the heads and their groups' B and C `(x | B | C)` before the convolution,
      `channels = num_kv_heads * head_dim + 2 * num_groups * state_dim`;
    * `dt [num_kv_heads]`: steps, after softplus and bounds.

    Weights are `{"conv": [kernel, channels], "A": [num_kv_heads], "D": [num_kv_heads]}`: the convolution, its
    last weight for a token's own input, rates below 0, and shares of a head's input that are added to its
    output; and "bias" `[channels]` where the convolution has one. After it comes silu. Results are
    `[num_kv_heads, head_dim]`, in the dtype of `x`.

    Attributes:
      num_kv_heads: Heads, each with a matrix of `head_dim` x `state_dim` in float32.
      head_dim: Width of a head's input and output.
      state_dim: Width of B and C.
      num_groups: Groups of consecutive heads that share B and C.
      kernel: Inputs of the convolution, the token's own included.
      dtype: Of what a token stores until the next point, in place of the config's.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.Mamba2(num_kv_heads=128, head_dim=64, state_dim=128).num_channels
      8448

    References:
      Transformers are SSMs (Dao and Gu; arXiv:2405.21060).
    """

    state_dim: int = dataclasses.field(kw_only=True)
    num_groups: int = dataclasses.field(default=1, kw_only=True)
    kernel: int = dataclasses.field(default=4, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "state_dim", "num_groups")
        check_count(self, "kernel", least=2)
        if self.num_kv_heads % self.num_groups:
            raise ValueError(
                f"num_groups is {self.num_groups}, expected a divisor of num_kv_heads = {self.num_kv_heads}"
            )

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.num_kv_heads * self.head_dim + 2 * self.num_groups * self.state_dim

    def point(self, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the heads' matrices and the convolution's last inputs."""
        state = self.num_kv_heads, self.head_dim, self.state_dim
        return point_arrays(state, (self.kernel - 1, self.num_channels), dtype)

    def entry(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns B, heads' inputs, steps and log decays, and inputs of the convolution.

        Steps are apart from heads' inputs: the product of both would be rounded once more.
        """

        def array(*shape: int, dtype: Any = dtype, head_axis: int | None = 1) -> BlockArray:
            return BlockArray((block_size, *shape), dtype, head_axis, token_axis=0)

        return {
            "B": array(self.num_groups, self.state_dim, head_axis=None),
            "x": array(self.num_kv_heads, self.head_dim),
            "dt": array(self.num_kv_heads, dtype=jnp.float32),
            "g": array(self.num_kv_heads, dtype=jnp.float32),
            "inputs": array(self.num_channels, head_axis=None),
        }

    def advance(
        self, point: Arrays, held: Arrays, count: jax.Array, new: Arrays, weights: Any
    ) -> tuple[jax.Array, Arrays]:
        """Computes outputs `[T, num_kv_heads, head_dim]` and entries of new tokens."""
        channels, heads = self.num_channels, (self.num_kv_heads,)
        inputs = {"x": (channels,), "dt": heads}
        require_shapes(f"new inputs of {self.label} per token", new, inputs, first_axis=1)
        shapes = {"conv": (self.kernel, channels), "A": heads, "D": heads, "bias": (channels,)}
        require_shapes(f"weights of {self.label}", weights, shapes, optional=["bias"])
        inner, width = self.num_kv_heads * self.head_dim, self.num_groups * self.state_dim
        parts = jnp.split(convolved(point, held, count, new["x"], weights), [inner, inner + width], axis=-1)
        x = parts[0].reshape(-1, self.num_kv_heads, self.head_dim)
        B, C = (part.reshape(-1, self.num_groups, self.state_dim) for part in parts[1:])
        dt = new["dt"].astype(jnp.float32)
        A, D = (weights[name].astype(jnp.float32)[None] for name in "AD")
        entries = {"B": B, "x": x, "dt": dt, "g": A * dt, "inputs": new["x"]}
        changes = _changes(entries)
        out, _ = matrix_state.advance(point["state"], _changes(held), C, B, changes.u, changes.g)
        return (out + D[..., None] * x).astype(new["x"].dtype), entries

    def fold(self, point: Arrays, entries: Arrays) -> Arrays:
        """Computes the matrices after a block, and the convolution's last inputs."""
        return folded(point, entries["inputs"], _changes(entries))


def _changes(entries: Arrays) -> matrix_state.Entries:
    """Computes what tokens change."""
    u = entries["dt"][..., None] * entries["x"].astype(jnp.float32)
    return matrix_state.Entries(entries["B"], u, entries["g"])
