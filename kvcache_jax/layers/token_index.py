"""The kind of a group without layers, by whose blocks prefixes are found where no layer keeps all tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import LayerKind


@dataclasses.dataclass(frozen=True)
class TokenIndex(LayerKind):
    """Blocks of tokens alone: a row has one for each of its blocks, and they take no memory in pools."""

    num_kv_heads: int = dataclasses.field(init=False, default=1)
    head_dim: int = dataclasses.field(init=False, default=1)

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing: no layer stores anything there."""
        return {}

    def arrays(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns no arrays."""
        return {}
