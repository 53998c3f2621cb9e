"""Full attention: every position stays."""

import dataclasses

from kvcache_jax.layers.layer_kind import LayerKind


@dataclasses.dataclass(frozen=True)
class FullAttention(LayerKind):
    """A layer in which every token attends to all tokens before it and to itself."""
