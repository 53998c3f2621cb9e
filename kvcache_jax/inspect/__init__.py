"""Views of a cache on the host: invariants, block maps, reasons for a miss."""

from kvcache_jax.inspect.block_map import draw_block_map
from kvcache_jax.inspect.explain_miss import explain

__all__ = [
    "draw_block_map",
    "explain",
]
