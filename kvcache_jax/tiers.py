"""Blocks that leave the cache and return to it: candidates, contents, export, import."""

from kvcache_jax.operations.evict import eviction_candidates
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_blocks

__all__ = [
    "BlockContents",
    "eviction_candidates",
    "export_blocks",
    "import_blocks",
]
