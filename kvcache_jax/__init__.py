"""KV caches as values: one immutable pytree, and pure functions that allocate, append, fork and free.

Its rooms, each of which imports only those above it; a public operation's file bears its name:

* `arrays`: masked updates, sharding types, registries, checks of numbers; nothing of caches
* `recurrence`: matrix states, short convolutions and linear scans of one row
* `layers`: the arrays that a model layer keeps per token, by kinds, and groups of equal layers
* `quantised`: keys and values in fewer bits: `Quantised` and its formats
* `core`: the parts of a cache: config, every array of the state, status, checks of arguments, backends
* `blocks`: owners of blocks, and the movement of keys and values
* `attention`: `write`, `attend`, `attention`, `recurrence`, `gather`, `attention_scores`; XLA and kernels
* `prefix`: blocks found by their contents: hashes, the index, eviction
* `operations`: `allocate`, `extend`, `fork`, `commit` and the others, a file each
* `inspect`: invariants, block maps, reasons for a miss
* `decoding`: `generate`, `beam_search`, `score`, speculation, for any model
* `compression`: fewer tokens per row: `drop`, `compress`, scores of tokens, streaming
* `chunks`: stored passages that are reused at any position
* `conversations`: what turns leave in the cache, and eviction policies that keep it
* `tiers`: blocks in host memory, in stores of bytes, and as values that leave the cache and return
* `processes`: an engine on a mesh of several processes, events of what it holds, the choice among replicas
* `engine`: continuous batching inside one compiled program
* `manager`: requests by id on the host
* `testing`: poison, the token test, checks of a model of one's own
* `integrations`: doors into lm-eval, tunix and Flax NNX, of which each is imported by its user alone

Other names are in namespaces: `chunks`, `compression`, `engine`, `decoding`, `inspect`, `manager`,
`processes`, `testing`, `tiers`, which are rooms, and `state`, `policies`, `backends`. Namespaces and flat
names share none.
"""

import importlib.metadata as _metadata
import logging as _logging

from kvcache_jax import (
    backends,
    chunks,
    compression,
    decoding,
    engine,
    inspect,
    manager,
    policies,
    processes,
    state,
    testing,
    tiers,
)
from kvcache_jax.attention import mosaic as _mosaic
from kvcache_jax.attention.attention import attend, attention
from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.gather import gather
from kvcache_jax.attention.recurrence import recurrence
from kvcache_jax.attention.write import write
from kvcache_jax.core.config import CacheConfig, memory_bytes
from kvcache_jax.core.describe import describe
from kvcache_jax.core.donate import donate
from kvcache_jax.core.init import init, reset
from kvcache_jax.core.snapshots import Snapshots
from kvcache_jax.core.state import Admission, Cache, Step
from kvcache_jax.core.status import Status, StatusError, raise_for_status
from kvcache_jax.decoding.beam_search import beam_search
from kvcache_jax.decoding.generate import generate
from kvcache_jax.decoding.options import Draft
from kvcache_jax.decoding.score import score
from kvcache_jax.engine.engine import Engine
from kvcache_jax.engine.requests import GenerationRequest
from kvcache_jax.inspect.block_map import block_map
from kvcache_jax.inspect.check_invariants import check_invariants
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.cross_attention import CrossAttention
from kvcache_jax.layers.gated_delta_net import GatedDeltaNet
from kvcache_jax.layers.latent_attention import LatentAttention
from kvcache_jax.layers.layer_kind import KeysValues, LayerKind
from kvcache_jax.layers.mamba2 import Mamba2
from kvcache_jax.layers.plain import FullAttention, SharedWith, SlidingWindow
from kvcache_jax.layers.recurrent import Recurrent
from kvcache_jax.layers.rg_lru import RGLRU
from kvcache_jax.layers.short_convolution import ShortConvolution
from kvcache_jax.layers.span import Span
from kvcache_jax.manager.manager import CacheManager
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.append import append
from kvcache_jax.operations.commit import commit
from kvcache_jax.operations.evict import evict, reset_prefix_cache
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.fork import fork
from kvcache_jax.operations.free import free
from kvcache_jax.operations.lookup import lookup
from kvcache_jax.operations.preempt import preempt_to_utilization, select_rows_to_preempt
from kvcache_jax.operations.reorder import reorder
from kvcache_jax.operations.rewrite import rewrite
from kvcache_jax.operations.scrub import scrub
from kvcache_jax.operations.stats import num_available_blocks, num_blocks_needed, stats, utilization
from kvcache_jax.operations.touch import set_priority, touch
from kvcache_jax.operations.truncate import truncate
from kvcache_jax.operations.write_source import write_source
from kvcache_jax.prefix.names import item_tokens, namespace
from kvcache_jax.quantised.quantised import Quantised

_logging.getLogger(__name__).addHandler(_logging.NullHandler())
for _backend in _mosaic.BACKENDS:
    backends.register_backend(_backend)

try:
    __version__ = _metadata.version("kvcache_jax")
except _metadata.PackageNotFoundError:  # a clone on the path, not installed
    __version__ = "0.0.0"

__all__ = [
    "Admission",
    "BlockArray",
    "Cache",
    "CacheConfig",
    "CacheManager",
    "CrossAttention",
    "Draft",
    "Engine",
    "FullAttention",
    "GatedDeltaNet",
    "GenerationRequest",
    "KeysValues",
    "LatentAttention",
    "LayerKind",
    "Mamba2",
    "Quantised",
    "RGLRU",
    "Recurrent",
    "SharedWith",
    "ShortConvolution",
    "SlidingWindow",
    "Snapshots",
    "Span",
    "Status",
    "StatusError",
    "Step",
    "allocate",
    "append",
    "attend",
    "attention",
    "attention_scores",
    "backends",
    "beam_search",
    "block_map",
    "check_invariants",
    "chunks",
    "commit",
    "compression",
    "decoding",
    "describe",
    "donate",
    "engine",
    "evict",
    "extend",
    "fork",
    "free",
    "gather",
    "generate",
    "init",
    "inspect",
    "item_tokens",
    "lookup",
    "manager",
    "memory_bytes",
    "namespace",
    "num_available_blocks",
    "num_blocks_needed",
    "policies",
    "processes",
    "preempt_to_utilization",
    "raise_for_status",
    "recurrence",
    "reorder",
    "reset",
    "reset_prefix_cache",
    "rewrite",
    "score",
    "scrub",
    "select_rows_to_preempt",
    "set_priority",
    "state",
    "stats",
    "testing",
    "tiers",
    "touch",
    "truncate",
    "utilization",
    "write",
    "write_source",
]
