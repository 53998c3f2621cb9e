"""KV caches as values: one immutable pytree, and pure functions that allocate, append, fork and free.

Its rooms, each of which imports only those above it; a public operation's file bears its name:

* `arrays`: masked updates, sharding types, checks of numbers; nothing of caches
* `core`: what a cache is: config, layer kinds, state, status, checks of arguments
* `blocks`: who holds which block, and the movement of keys and values
* `prefix`: blocks found by their contents: hashes, the index, eviction
* `operations`: `allocate`, `extend`, `fork`, `commit` and the others, a file each
* `attention`: `write`, `attend`, `attention`, `append`, `gather`, `attention_scores`; XLA, gradients, kernels
* `inspect`: invariants, block maps, reasons for a miss
* `decoding`: `generate`, `beam_search`, `score`, speculation, for anybody's model
* `engine`: continuous batching inside one compiled program
* `manager`: requests by id on the host
* `testing`: the token test, poison, checks of one's own model
"""

import logging as _logging

from kvcache_jax import manager, testing
from kvcache_jax.attention.append import append
from kvcache_jax.attention.attention import attend, attention
from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.chunk_attention import ChunkAttention, chunk_attention
from kvcache_jax.attention.chunk_deviation import chunk_deviation
from kvcache_jax.attention.gather import gather
from kvcache_jax.attention.token_scores import token_scores
from kvcache_jax.attention.write import write
from kvcache_jax.core import state
from kvcache_jax.core.backends import Backend, TargetDevice, register_backend
from kvcache_jax.core.cache_craft import context_impact, fix_overhead, num_of_share, prefix_overlap
from kvcache_jax.core.chunk_selector import ChunkMetadata, chunk_selector, chunk_selectors
from kvcache_jax.core.chunk_stats import ChunkStats
from kvcache_jax.core.chunks import Chunks, StoredChunks
from kvcache_jax.core.config import CacheConfig, memory_bytes
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.describe import describe
from kvcache_jax.core.eviction_policy import BlockMetadata, eviction_policies, eviction_policy
from kvcache_jax.core.key_rotation import key_rotation
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.layer_kinds.base import KeysValues, LayerKind
from kvcache_jax.core.layer_kinds.block_array import BlockArray
from kvcache_jax.core.layer_kinds.cross_attention import CrossAttention
from kvcache_jax.core.layer_kinds.full_attention import FullAttention
from kvcache_jax.core.layer_kinds.latent_attention import LatentAttention
from kvcache_jax.core.layer_kinds.quantised import Quantised
from kvcache_jax.core.layer_kinds.shared_with import SharedWith
from kvcache_jax.core.layer_kinds.sliding_window import SlidingWindow
from kvcache_jax.core.layer_kinds.span import Span
from kvcache_jax.core.select_tokens import select_tokens
from kvcache_jax.core.state import Admission, BlockPool, Cache, Control, Step
from kvcache_jax.core.status import Status, StatusError, raise_for_status
from kvcache_jax.core.streaming import Streaming
from kvcache_jax.core.token_scorer import (
    TokenMetadata,
    future_queries,
    pyramid_budgets,
    token_scorer,
    token_scorers,
)
from kvcache_jax.decoding.beam_search import Beam, BeamResult, beam_search
from kvcache_jax.decoding.chunk_reuse import ChunkReuse
from kvcache_jax.decoding.generate import Draft, GenerateResult, Generation, Snapshot, generate
from kvcache_jax.decoding.score import ScoreResult, score
from kvcache_jax.engine.engine import Engine
from kvcache_jax.engine.events import EngineFigures, TokenEvent
from kvcache_jax.engine.policies import RequestMetadata, request_policy
from kvcache_jax.engine.requests import GenerationRequest
from kvcache_jax.engine.state import EngineCounter, EngineState
from kvcache_jax.inspect.block_map import block_map, draw_block_map
from kvcache_jax.inspect.check_invariants import check_invariants
from kvcache_jax.inspect.explain import explain
from kvcache_jax.manager.manager import CacheManager
from kvcache_jax.manager.requests import Batch, Request
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.chunk_digests import chunk_digests, chunks_before
from kvcache_jax.operations.chunk_metadata import chunk_metadata
from kvcache_jax.operations.chunk_overhead import chunk_overhead
from kvcache_jax.operations.commit import commit
from kvcache_jax.operations.compose import compose
from kvcache_jax.operations.compress import compress
from kvcache_jax.operations.donate import donate
from kvcache_jax.operations.drop import drop
from kvcache_jax.operations.evict import evict
from kvcache_jax.operations.evict_chunks import evict_chunks
from kvcache_jax.operations.eviction_candidates import eviction_candidates
from kvcache_jax.operations.export_blocks import BlockContents, export_blocks
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.find_chunks import find_chunks
from kvcache_jax.operations.fork import fork
from kvcache_jax.operations.free import free
from kvcache_jax.operations.free_chunks import free_chunks
from kvcache_jax.operations.import_blocks import import_blocks
from kvcache_jax.operations.init import init, reset
from kvcache_jax.operations.lookup import lookup
from kvcache_jax.operations.preempt import (
    RowMetadata,
    preempt_to_utilization,
    row_policy,
    select_rows_to_preempt,
)
from kvcache_jax.operations.reorder import reorder
from kvcache_jax.operations.reset_prefix_cache import reset_prefix_cache
from kvcache_jax.operations.rewrite import rewrite
from kvcache_jax.operations.scrub import scrub
from kvcache_jax.operations.set_priority import set_priority
from kvcache_jax.operations.stats import (
    Stats,
    active_seq_ids,
    idle_seq_ids,
    needs_preemption,
    num_available_blocks,
    num_blocks_needed,
    stats,
    utilization,
)
from kvcache_jax.operations.store_chunk import store_chunk
from kvcache_jax.operations.touch import touch
from kvcache_jax.operations.truncate import truncate
from kvcache_jax.operations.write_source import write_source
from kvcache_jax.prefix.item_tokens import item_tokens
from kvcache_jax.prefix.namespace import namespace

_logging.getLogger(__name__).addHandler(_logging.NullHandler())

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "Backend",
    "Batch",
    "Beam",
    "BeamResult",
    "BlockArray",
    "BlockContents",
    "BlockMetadata",
    "BlockPool",
    "Cache",
    "CacheConfig",
    "CacheManager",
    "ChunkAttention",
    "ChunkMetadata",
    "ChunkReuse",
    "ChunkStats",
    "Chunks",
    "Control",
    "Counter",
    "CrossAttention",
    "Draft",
    "Engine",
    "EngineCounter",
    "EngineFigures",
    "EngineState",
    "FullAttention",
    "GenerateResult",
    "Generation",
    "GenerationRequest",
    "KeysValues",
    "LatentAttention",
    "LayerGroup",
    "LayerKind",
    "Quantised",
    "Request",
    "RequestMetadata",
    "RowMetadata",
    "ScoreResult",
    "SharedWith",
    "SlidingWindow",
    "Snapshot",
    "Span",
    "Stats",
    "Status",
    "StatusError",
    "Step",
    "StoredChunks",
    "Streaming",
    "TargetDevice",
    "TokenEvent",
    "TokenMetadata",
    "active_seq_ids",
    "allocate",
    "append",
    "attend",
    "attention",
    "attention_scores",
    "beam_search",
    "block_map",
    "check_invariants",
    "chunk_attention",
    "chunk_deviation",
    "chunk_digests",
    "chunk_metadata",
    "chunk_overhead",
    "chunk_selector",
    "chunk_selectors",
    "chunks_before",
    "commit",
    "compose",
    "compress",
    "context_impact",
    "describe",
    "donate",
    "draw_block_map",
    "drop",
    "evict",
    "evict_chunks",
    "eviction_candidates",
    "eviction_policies",
    "eviction_policy",
    "explain",
    "export_blocks",
    "extend",
    "find_chunks",
    "fix_overhead",
    "fork",
    "free",
    "free_chunks",
    "future_queries",
    "gather",
    "generate",
    "idle_seq_ids",
    "import_blocks",
    "init",
    "item_tokens",
    "key_rotation",
    "lookup",
    "manager",
    "memory_bytes",
    "namespace",
    "needs_preemption",
    "num_available_blocks",
    "num_blocks_needed",
    "num_of_share",
    "preempt_to_utilization",
    "prefix_overlap",
    "pyramid_budgets",
    "raise_for_status",
    "register_backend",
    "reorder",
    "request_policy",
    "reset",
    "reset_prefix_cache",
    "rewrite",
    "row_policy",
    "score",
    "scrub",
    "select_rows_to_preempt",
    "select_tokens",
    "set_priority",
    "state",
    "stats",
    "store_chunk",
    "testing",
    "token_scorer",
    "token_scorers",
    "token_scores",
    "touch",
    "truncate",
    "utilization",
    "write",
    "write_source",
]

_RENAMED = {
    "Companions": "state.GroupLinks",
    "Look": "Snapshot",
    "evict_to_utilization": "preempt_to_utilization",
    "needs_eviction": "needs_preemption",
    "select_victim_rows": "select_rows_to_preempt",
    **{
        name: f"state.{name}"
        for name in (
            "AttentionPlan",
            "BlockHistory",
            "CachedBlocks",
            "KVPool",
            "PrefixIndex",
        )
    },
    **{name: f"manager.{name}" for name in manager.__all__},
}
"""Old names, and what to write in their place."""


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        raise AttributeError(f"kvcache_jax.{name} is now kvcache_jax.{_RENAMED[name]}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
