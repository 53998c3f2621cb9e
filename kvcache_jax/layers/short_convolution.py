"""Short convolutions: a token reads its own input and a few before it, and there is no state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import check_count, check_positive
from kvcache_jax.layers.recurrent import Arrays, Recurrent
from kvcache_jax.layers.required_shapes import require_shapes
from kvcache_jax.recurrence.convolution import convolve


@dataclasses.dataclass(frozen=True)
class ShortConvolution(Recurrent):
    """A causal convolution per channel of the last inputs, as in LFM2.

    `recurrence(cache, layer, new, step, weights=...)` takes `x [num_channels]` of each token, and weights
    `{"conv": [kernel, num_channels]}`, the last one for a token's own input, and "bias" `[num_channels]`
    where the convolution has one. Results are `[num_channels]`, in the dtype of `x`.

    Attributes:
      num_channels: Width of an input.
      kernel: Inputs that a token reads, its own included.
      dtype: Of inputs as they are stored, in place of the config's.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.ShortConvolution(2048, kernel=3).reach
      2
    """

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False)
    num_channels: int
    kernel: int = dataclasses.field(kw_only=True)

    def __post_init__(self):
        check_positive(self, "num_channels")
        check_count(self, "kernel", least=2)
        object.__setattr__(self, "head_dim", self.num_channels)
        super().__post_init__()

    @property
    def reach(self) -> int:
        """Inputs before a token's own that it reads."""
        return self.kernel - 1

    def entry(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the inputs."""
        return {"inputs": BlockArray((block_size, self.num_channels), dtype, head_axis=None, token_axis=0)}

    def advance(
        self, point: Arrays, held: Arrays, count: jax.Array, new: Arrays, weights: Any
    ) -> tuple[jax.Array, Arrays]:
        """Computes outputs `[T, num_channels]` of new tokens, and keeps their inputs."""
        channels = (self.num_channels,)
        require_shapes(f"new inputs of {self.label} per token", new, {"x": channels}, first_axis=1)
        shapes = {"conv": (self.kernel, *channels), "bias": channels}
        require_shapes(f"weights of {self.label}", weights, shapes, optional=["bias"])
        x = new["x"]
        out = convolve(held["inputs"], x, weights["conv"], weights.get("bias"))
        return out.astype(x.dtype), {"inputs": x}
