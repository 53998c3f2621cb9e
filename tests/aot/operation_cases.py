"""The public operations, each as a program to compile, and how often it may wait for the host.

The numbers are those of DESIGN.md, section 7. A group is the layers of one kind; the second one has a window.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.aot.budget import i32

NUM_ROWS, NUM_LISTED, PROMPT_LEN = 32, 8, 256
"""Rows of the cache, rows that a call names, and tokens of a prompt."""
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 128
LRU, OTHER_POLICY = "lru", "hyperbolic"


@dataclasses.dataclass(frozen=True)
class OperationCase:
    """One operation on one cache.

    Attributes:
      operation: Name of the public function.
      config: Of the cache.
      function: Takes the cache and what `arguments` returns.
      arguments: Builds shapes, from the shapes of the cache.
      max_waits: Loops of unknown trips and conditionals, at most.
      max_known_loops: Loops of known trips, say over rows, at most; None for any number.
      max_launches: Kernels outside loops of unknown trips, at most; None for any number.
      returns_cache: Whether the cache is donated, and the first of the results.
    """

    operation: str
    config: kv.CacheConfig
    function: Callable
    arguments: Callable[[Any], tuple]
    max_waits: int
    max_known_loops: int | None = None
    max_launches: int | None = None
    returns_cache: bool = True

    @property
    def name(self) -> str:
        """The operation and its cache, as in `extend_index_2_groups_lru`."""
        return "_".join([self.operation.replace(" ", "_"), *self.cache_name.replace(",", "").split()])

    @property
    def cache_name(self) -> str:
        """The cache in words."""
        num_groups = len(self.config.groups)
        words = [f"{num_groups} group{'s' * (num_groups > 1)}"]
        if self.config.enable_prefix_caching:
            words += ["index", self.config.eviction_policy]
        return ", ".join(words)

    def shapes(self) -> tuple:
        """The cache and the other arguments."""
        cache = jax.eval_shape(lambda: kv.init(self.config))
        return cache, *self.arguments(cache)

    @property
    def num_pool_elements(self) -> int:
        """Elements of the smallest pool."""
        cache = jax.eval_shape(lambda: kv.init(self.config))
        return min(array.size for array in jax.tree.leaves(cache.pools))


def config_of(num_groups: int, policy: str | None) -> kv.CacheConfig:
    """A cache of one layer a group, with an index if it has a policy."""
    kinds = (kv.FullAttention(NUM_KV_HEADS, HEAD_DIM), kv.SlidingWindow(NUM_KV_HEADS, HEAD_DIM, window=64))
    index = {} if policy is None else dict(enable_prefix_caching=True, eviction_policy=policy)
    return kv.CacheConfig(
        kinds[:num_groups],
        num_blocks=4096,
        max_seqs=NUM_ROWS,
        max_seq_len=1024,
        max_query_len=PROMPT_LEN,
        dtype=jnp.bfloat16,
        implementation="xla",
        **index,
    )


def _step(cache: Any) -> Any:
    tokens = None if cache.control.prefix_index is None else i32(NUM_ROWS, 1)
    return jax.eval_shape(lambda *args: _extend(*args)[1], cache, i32(NUM_ROWS), tokens)


def _extend(cache, num_new, tokens):
    return kv.extend(cache, num_new, max_new=1, tokens=tokens)


def _allocate(cache, seq_ids, num_tokens, tokens):
    return kv.allocate(cache, seq_ids, num_tokens, tokens=tokens)


def _attention(cache, q, k, v, step):
    for layer in range(cache.config.num_layers):
        cache, q = kv.attention(cache, layer, q, k, v, step)
    return cache, q


def _write(cache, k, v, step):
    for layer in range(cache.config.num_layers):
        cache = kv.write(cache, layer, k, v, step)
    return cache


def _gather(cache, seq_id):
    return kv.gather(cache, seq_id, 0)


def _values(num_heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((NUM_ROWS, 1, num_heads, HEAD_DIM), jnp.bfloat16)


def _cases_of(num_groups: int, policy: str | None) -> list[OperationCase]:
    """All operations on one cache."""
    config = config_of(num_groups, policy)
    has_index = policy is not None
    # Other policies than LRU choose their victims by one loop more for each group that evicts.
    choices = int(policy not in (None, LRU))
    shortage, copies = 1, num_groups
    evictions = has_index * num_groups * (1 + choices)
    admissions = shortage + has_index * num_groups + evictions
    listed, tokens = i32(NUM_LISTED), i32(NUM_LISTED, PROMPT_LEN)
    new_tokens = i32(NUM_ROWS, 1) if has_index else None
    keys = _values(NUM_KV_HEADS)

    def case(operation: str, function: Callable, *arguments: Any, most: int, **options: Any) -> OperationCase:
        return OperationCase(operation, config, function, lambda _: arguments, most, **options)

    cases = [
        case("extend", _extend, i32(NUM_ROWS), new_tokens, most=shortage + copies + evictions),
        case("allocate", _allocate, listed, listed, tokens if has_index else None, most=admissions),
    ]
    if has_index:
        batches = num_groups
        cases += [
            case("commit", kv.commit, listed, most=1 + batches),
            case("lookup", kv.lookup, tokens, listed, most=0, returns_cache=False),
            # Of the group that prefixes are found by, which takes the blocks of the others along.
            case("evict", kv.evict, i32(), most=1 + choices),
        ]
    if policy not in (None, LRU):
        return cases  # the others evict nothing
    rows = {
        "fork": (listed, listed),
        "free": (listed,),
        "truncate": (listed, listed),
        "reorder": (listed, listed),
        "touch": (listed,),
        "set_priority": (listed, listed),
    }
    # Row after row, each one would launch as much.
    straight = dict(most=0, max_known_loops=0, max_launches=20 + 40 * num_groups)
    cases += [case(name, getattr(kv, name), *columns, **straight) for name, columns in rows.items()]
    if not has_index:
        q = _values(NUM_Q_HEADS)
        cases += [
            OperationCase(
                "attention", config, _attention, lambda cache: (q, keys, keys, _step(cache)), num_groups
            ),
            OperationCase("write", config, _write, lambda cache: (keys, keys, _step(cache)), 0),
            case("gather", _gather, i32(), most=0, returns_cache=False),
        ]
    return cases


OPERATION_CASES = tuple(
    case
    for policy in (None, LRU, OTHER_POLICY)
    for num_groups in (1, 2)
    for case in _cases_of(num_groups, policy)
)
"""In the order of the table."""
