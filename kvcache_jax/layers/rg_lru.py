"""The gated linear recurrence of Griffin: the state is a vector, and is stored per token."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import check_positive
from kvcache_jax.layers.recurrent import Arrays, Recurrent
from kvcache_jax.layers.required_shapes import require_shapes
from kvcache_jax.recurrence.linear_scan import rg_lru


@dataclasses.dataclass(frozen=True)
class RGLRU(Recurrent):
    """A real-gated linear recurrent unit: `h <- a h + sqrt(1 - a^2) x`, as in Griffin and RecurrentGemma.

    `recurrence(cache, layer, new, step)` takes `x [width]`, after its input gate, and `log_a [width]`, the
    log decay after its own gate, at most 0, of each token; results are the states `h [width]`, in the dtype
    of `x`. Where `log_a` is -inf a state begins anew, as `x`: RecurrentGemma does so at a text's first token.

    What a token would add is larger than the state, so that every token stores its state, in float32.

    Attributes:
      width: Of a state.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.RGLRU(2560).reach
      1

    References:
      Griffin (De et al.; arXiv:2402.19427).
    """

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False)
    width: int

    reach = 1

    def __post_init__(self):
        check_positive(self, "width")
        object.__setattr__(self, "head_dim", self.width)
        super().__post_init__()

    def entry(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the states."""
        return {"state": BlockArray((block_size, self.width), jnp.float32, head_axis=None, token_axis=0)}

    def advance(
        self, point: Arrays, held: Arrays, count: jax.Array, new: Arrays, weights: Any
    ) -> tuple[jax.Array, Arrays]:
        """Computes the states after new tokens, `[T, width]`."""
        self.refuse_weights(weights)
        inputs = {"x": (self.width,), "log_a": (self.width,)}
        require_shapes(f"new inputs of {self.label} per token", new, inputs, first_axis=1)
        states = rg_lru(held["state"][-1], new["log_a"], new["x"])
        return states.astype(new["x"].dtype), {"state": states}
