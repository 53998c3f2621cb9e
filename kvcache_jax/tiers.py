"""Blocks that leave the cache and return to it: candidates, contents, export, import."""

from kvcache_jax.operations.eviction_candidates import eviction_candidates
from kvcache_jax.operations.export_blocks import BlockContents, export_blocks
from kvcache_jax.operations.import_blocks import import_blocks

__all__ = [
    "BlockContents",
    "eviction_candidates",
    "export_blocks",
    "import_blocks",
]
