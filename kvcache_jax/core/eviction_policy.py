"""Eviction policies by name, which choose the cached block to evict first, and a decorator for one's own.

A policy is a pure function from metadata of the blocks to an integer key per block: lower is evicted first,
and of equal keys the one released longest ago. Children are evicted before their parents, so a block counts
as its most valuable descendant. `lru` is the exception: it is the order of release itself and needs no key.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.registry import Registry
from kvcache_jax.layers.layer_kind import check_positive


class BlockMetadata(NamedTuple):
    """Metadata that a policy sees, one entry per block; None where the policy did not ask for it.

    A use is a publication, a hit by `allocate`, or an adoption by `commit`, where a row gives its own block
    back for the published one. Committing a block that the row shares anyway, after `fork`, is no use. Times
    are ticks of the cache's clock, which advances with each call of allocate, extend, fork, reorder or touch
    that uses a row, the one that evicts included. Entries of blocks that are not cached mean nothing.

    Attributes:
      recency: i32[num_blocks], grows with the moment of the last release; no two cached blocks have the same.
      num_hits: i32[num_blocks], uses after the publication.
      age: i32[num_blocks], ticks since the publication.
      idle: i32[num_blocks], ticks since the last use.
      priority: i32[num_blocks], of the row that used the block last, at that moment.
      depth: i32[num_blocks], blocks before it in its sequence.
    """

    recency: jax.Array
    num_hits: jax.Array | None = None
    age: jax.Array | None = None
    idle: jax.Array | None = None
    priority: jax.Array | None = None
    depth: jax.Array | None = None


EvictionKey = Callable[..., jax.Array]
LRU = "lru"


@dataclasses.dataclass(frozen=True)
class InBatches:
    """An eviction policy that evicts several blocks at a time, for `CacheConfig(eviction_policy=)`.

    Attributes:
      policy: Name of the policy; "lru" is always exact.
      batch_size: Blocks evicted at a time; the blocks that they make evictable compete afterwards, so 1 is
        exact.
    """

    policy: str
    batch_size: int

    def __post_init__(self):
        if not isinstance(self.policy, str):
            raise ValueError(f"eviction_policy is {self.policy!r}, expected the name of a policy")
        check_positive(self, "batch_size")


policies = Registry[EvictionKey](
    "an eviction policy", "policies.eviction_policy", "eviction_policy", BlockMetadata, reserved=[LRU]
)


def eviction_policy(
    name: str, *, needs: Sequence[str] = (), extra: str | None = None
) -> Callable[[EvictionKey], EvictionKey]:
    """Registers a function from `BlockMetadata` to i32[num_blocks] keys as an eviction policy.

    The block with the lowest key is evicted first; ties: the block released longest ago. A block is evicted
    before the blocks that it continues.

    Configs name the policy, so that they stay hashable and can be exported; a program that loads an exported
    config registers the same name first. The function is traced once per program.

    Args:
      name: For `CacheConfig(eviction_policy=name)`.
      needs: The fields of `BlockMetadata` that it reads, besides `recency`; only these are kept by the cache.
      extra: The name of an extra, whose arrays in `Control.extras` are the function's second argument. A
        config with this policy must have it.

    Returns:
      The decorator; it returns the function unchanged.

    Raises:
      ValueError: the name is taken, or `needs` names no field.

    Example:
      >>> import jax.numpy as jnp
      >>> import kvcache_jax as kv
      >>> @kv.policies.eviction_policy("beginnings last", needs=["depth"])
      ... def beginnings_last(blocks: kv.policies.BlockMetadata):
      ...     return -blocks.depth
      >>> config = kv.CacheConfig(
      ...     [kv.FullAttention(1, 8)], enable_prefix_caching=True, eviction_policy="beginnings last")
    """
    return policies.decorate(name, needs, extra=extra)


def eviction_keys(name: str, blocks: BlockMetadata, extras: Mapping[str, Any] | None = None) -> jax.Array:
    """Computes the policy's keys, i32[num_blocks]; `extras` are `Control.extras`."""
    key, extra = policies.find(name).function, policies.find(name).options["extra"]
    of_extra = () if extra is None else ((extras or {})[extra],)
    with policies.noted(name):
        return policies.checked(name, key(blocks, *of_extra), blocks.recency.shape, dtype=jnp.int32)


@eviction_policy("lfu", needs=["num_hits"])
def _least_frequently_used(blocks: BlockMetadata) -> jax.Array:
    assert blocks.num_hits is not None
    return blocks.num_hits


@eviction_policy("fifo", needs=["age"])
def _first_published(blocks: BlockMetadata) -> jax.Array:
    assert blocks.age is not None
    return -blocks.age


@eviction_policy("priority", needs=["priority"])
def _lowest_priority(blocks: BlockMetadata) -> jax.Array:
    assert blocks.priority is not None
    return blocks.priority


@eviction_policy("hyperbolic", needs=["num_hits", "age"])
def _fewest_uses_per_time(blocks: BlockMetadata) -> jax.Array:
    """Computes uses over the time since the publication (Blankstein et al., Hyperbolic Caching, 2017)."""
    assert blocks.num_hits is not None and blocks.age is not None
    return -lax.div(blocks.age, 1 + blocks.num_hits)
