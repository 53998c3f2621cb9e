"""Blocks outside of the device's memory: on the host, in stores, and as values that leave and return."""

from kvcache_jax.operations.evict import eviction_candidates
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_blocks
from kvcache_jax.tiers.attached_store import AttachedStore
from kvcache_jax.tiers.block_store import BlockStore, MemoryStore
from kvcache_jax.tiers.catalogue import StoreReport
from kvcache_jax.tiers.copy_blocks import copy_prompts
from kvcache_jax.tiers.directory_store import DirectoryStore
from kvcache_jax.tiers.giver import Giver, Ticket
from kvcache_jax.tiers.host import Host
from kvcache_jax.tiers.host_operations import (
    HostStats,
    break_even,
    demote_to_utilization,
    host_stats,
    prefetch,
)
from kvcache_jax.tiers.load_blocks import load
from kvcache_jax.tiers.mooncake_store import MooncakeStore
from kvcache_jax.tiers.peer_store import PeerStore, take
from kvcache_jax.tiers.save_blocks import save
from kvcache_jax.tiers.stored_block import digest
from kvcache_jax.tiers.tensor_store import TensorStore
from kvcache_jax.tiers.valkey_store import ValkeyStore

__all__ = [
    "AttachedStore",
    "BlockContents",
    "BlockStore",
    "DirectoryStore",
    "Giver",
    "Host",
    "HostStats",
    "MemoryStore",
    "MooncakeStore",
    "PeerStore",
    "StoreReport",
    "TensorStore",
    "Ticket",
    "ValkeyStore",
    "break_even",
    "copy_prompts",
    "demote_to_utilization",
    "digest",
    "eviction_candidates",
    "export_blocks",
    "host_stats",
    "import_blocks",
    "load",
    "prefetch",
    "save",
    "take",
]
