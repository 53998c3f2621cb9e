"""Shared layers: a layer reads what another one stores."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvcache_jax.layers.layer_kind import LayerKind, check_not_negative


@dataclasses.dataclass(frozen=True)
class SharedWith(LayerKind):
    """A layer that reads the keys and values of an earlier layer, in its span, and stores none.

    It takes no memory. A model calls `attend(cache, layer, q, step)` there, once the other layer's keys and
    values of the step are written; `attention` and `write` refuse it.

    Attributes:
      layer: The earlier model layer, which stores keys and values of its own.

    Example:
      >>> import kvcache_jax as kv
      >>> layers = [kv.FullAttention(num_kv_heads=2, head_dim=64)] * 2 + [kv.SharedWith(1)] * 4
      >>> kv.memory_bytes(kv.CacheConfig(layers, num_blocks=4)) == kv.memory_bytes(
      ...     kv.CacheConfig(layers[:2], num_blocks=4))
      True

    References:
      Cross-Layer Attention (Brandon et al.; arXiv:2405.12981).
    """

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False, default=1)
    layer: int
    num_blocks: int | None = dataclasses.field(init=False, default=None)
    block_size: int | None = dataclasses.field(init=False, default=None)
    dtype: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        check_not_negative(self, "layer")

    @property
    def shared_layer(self) -> int:
        """The earlier layer."""
        return self.layer

    @property
    def label(self) -> str:
        """Name and layer."""
        return f"SharedWith({self.layer})"

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing."""
        return {}
