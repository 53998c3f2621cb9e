"""Blocks outside of the device's memory: on the host, and as values that leave the cache and return to it."""

from kvcache_jax.operations.evict import eviction_candidates
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_blocks
from kvcache_jax.tiers.host import Host
from kvcache_jax.tiers.host_operations import (
    HostStats,
    break_even,
    demote_to_utilization,
    host_stats,
    prefetch,
)

__all__ = [
    "BlockContents",
    "Host",
    "HostStats",
    "break_even",
    "demote_to_utilization",
    "eviction_candidates",
    "export_blocks",
    "host_stats",
    "import_blocks",
    "prefetch",
]
