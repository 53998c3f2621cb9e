"""KV caches as values: one immutable pytree, and pure functions that allocate, append, fork and free.

The files, in an order to read them in; the first line of each says what it does:

* state: `config`, `state`, `empty_state`, `build`, `memory_plan`, `status`, `summary`, `pytree`, `cache_form`
* operations: `cache` is the page of them; `admission`, `rows`, `new_tokens`, `demand`, `extend`, `block_pool`
  change the control state, `storage` the keys and values, `stats` asks; below them `arguments`,
  `static_numbers`, `reach`, `indexing`, `loops`, `single_kernel`, `manual_axes`
* attention: `attention`, `attention_options`, `queries`, `attention_vjp`, `attention_xla`; and by kernels:
  `implementations`, `attention_kernels`, `head_axis`
* prefix cache: `prefix_cache` has the operations; `content_hash`, `prefix_index`, `publish`, `companions`
  find blocks by their tokens; `eviction`, `eviction_policy`, `block_history`, `tournament`, `preemption`
  choose what goes; `explain`, `scrub`
* decoding: `decode`, `forward`, `prefill`, `decode_loop`, `decode_host`, `decode_arguments`, `sampling`,
  `speculation`, `beam`, `score`
* on the host: `manager`, `manager_questions`, `manager_requests`, `manager_batches`,
  `manager_rows`, `manager_programs`, `manager_errors`, `cache_holder`
* checks and pictures: `checks`, `oracle`, `testing`, `forward_check`, `poison`, `picture`, `block_view`
"""

import logging as _logging

from kvcache_jax import testing
from kvcache_jax.attention import attend, attention
from kvcache_jax.beam import Beam, BeamResult, beam_search
from kvcache_jax.build import init, reset
from kvcache_jax.cache import (
    allocate,
    append,
    donate,
    extend,
    fork,
    free,
    gather,
    reorder,
    set_priority,
    touch,
    truncate,
    write,
)
from kvcache_jax.checks import check_invariants
from kvcache_jax.config import (
    CacheConfig,
    FullAttention,
    LayerGroup,
    LayerKind,
    SlidingWindow,
    memory_bytes,
)
from kvcache_jax.decode import Draft, GenerateResult, Generation, Look, generate
from kvcache_jax.eviction_policy import BlockMetadata, eviction_policies, eviction_policy
from kvcache_jax.explain import explain
from kvcache_jax.manager import CacheManager
from kvcache_jax.manager_errors import (
    CacheError,
    CacheLost,
    DuplicateRequest,
    ManagerBusy,
    ManagerClosed,
    OutOfBlocks,
    OutOfRows,
    OutOfSync,
    StaleBatch,
    TooLong,
    UnknownRequest,
    WindowLost,
)
from kvcache_jax.manager_requests import Batch, Request
from kvcache_jax.memory_plan import describe
from kvcache_jax.picture import block_map, draw_block_map
from kvcache_jax.preemption import evict_to_utilization, select_victim_rows
from kvcache_jax.prefix_cache import commit, evict, item_tokens, lookup, namespace, reset_prefix_cache
from kvcache_jax.score import ScoreResult, score
from kvcache_jax.scrub import scrub
from kvcache_jax.state import (
    Admission,
    AttentionPlan,
    BlockHistory,
    BlockPool,
    Cache,
    CachedBlocks,
    Companions,
    Control,
    Counter,
    KVPool,
    PrefixIndex,
    Step,
)
from kvcache_jax.stats import (
    Stats,
    active_seq_ids,
    idle_seq_ids,
    needs_eviction,
    num_available_blocks,
    num_blocks_needed,
    stats,
    utilization,
)
from kvcache_jax.status import Status, StatusError, raise_for_status

_logging.getLogger(__name__).addHandler(_logging.NullHandler())

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AttentionPlan",
    "Batch",
    "Beam",
    "BeamResult",
    "BlockHistory",
    "BlockMetadata",
    "BlockPool",
    "Cache",
    "CacheConfig",
    "CacheError",
    "CacheLost",
    "CacheManager",
    "CachedBlocks",
    "Companions",
    "Control",
    "Counter",
    "Draft",
    "DuplicateRequest",
    "FullAttention",
    "GenerateResult",
    "Generation",
    "KVPool",
    "LayerGroup",
    "LayerKind",
    "Look",
    "ManagerBusy",
    "ManagerClosed",
    "OutOfBlocks",
    "OutOfRows",
    "OutOfSync",
    "PrefixIndex",
    "Request",
    "ScoreResult",
    "SlidingWindow",
    "StaleBatch",
    "Stats",
    "Status",
    "StatusError",
    "Step",
    "TooLong",
    "UnknownRequest",
    "WindowLost",
    "active_seq_ids",
    "allocate",
    "append",
    "attend",
    "attention",
    "beam_search",
    "block_map",
    "check_invariants",
    "commit",
    "describe",
    "donate",
    "draw_block_map",
    "evict",
    "evict_to_utilization",
    "eviction_policies",
    "eviction_policy",
    "explain",
    "extend",
    "fork",
    "free",
    "gather",
    "generate",
    "idle_seq_ids",
    "init",
    "item_tokens",
    "lookup",
    "memory_bytes",
    "namespace",
    "needs_eviction",
    "num_available_blocks",
    "num_blocks_needed",
    "raise_for_status",
    "reorder",
    "reset",
    "reset_prefix_cache",
    "score",
    "scrub",
    "select_victim_rows",
    "set_priority",
    "stats",
    "testing",
    "touch",
    "truncate",
    "utilization",
    "write",
]
