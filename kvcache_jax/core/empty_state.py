"""States in which nothing is held, from which `init`, `reset` and a forgotten index start."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.eviction_policy import LRU, policies
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.snapshots import NUM_MARKS
from kvcache_jax.core.state import (
    BlockHistory,
    BlockPool,
    CachedBlocks,
    Control,
    GroupLinks,
    KVPool,
    PrefixIndex,
)
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div

# A bucket is compared at once. A full one refuses a block: now and then, if there is one bucket per block.
_WAYS, _BUCKETS_PER_BLOCK = 8, 2


def in_place_of(old: Any, fresh: Any) -> Any:
    """Makes `fresh`, a pytree of constants, as varying over a mesh as `old`: a loop may carry it on."""
    return jax.tree.map(lambda x, new: jnp.where(jnp.zeros_like(x, bool), x, new), old, fresh)


def empty_control(
    config: CacheConfig, hash_key: Any, numpy: Any = jnp, groups: Sequence[LayerGroup] | None = None
) -> Control:
    """Builds a control state of idle rows and free blocks alone; `numpy` makes its arrays.

    With `groups`, of the layer groups of the config in other sizes.
    """
    groups = config.groups if groups is None else groups

    def ints(*shape: int, fill: int = 0) -> Any:
        return numpy.full(shape, fill, jnp.int32)

    max_seqs = config.max_seqs
    return Control(
        is_active=numpy.zeros(max_seqs, bool),
        context_len=ints(max_seqs),
        priority=ints(max_seqs),
        namespace=numpy.zeros((max_seqs, 4), jnp.uint32),
        last_used=numpy.zeros(max_seqs, jnp.uint32),
        num_uses=numpy.zeros(max_seqs, jnp.uint32),
        clock=numpy.zeros((), jnp.uint32),
        counters=numpy.zeros(len(Counter), jnp.uint32),
        hash_key=hash_key,
        num_published=ints(max_seqs),
        source_len=ints(max_seqs) if config.source_layers else None,
        marks=_no_marks(config, numpy),
        holes=_no_holes(config, numpy) if config.hides_tokens else None,
        prefix_index=empty_index(config, numpy, groups) if config.enable_prefix_caching else None,
        block_pools=tuple(
            BlockPool(
                block_table=ints(max_seqs, group.max_blocks_per_seq, fill=group.num_blocks),
                ref_count=ints(group.num_blocks),
                # Popped from the end, so the lowest ids are assigned first.
                free_stack=numpy.arange(group.num_blocks, dtype=jnp.int32)[::-1],
                num_free=ints(fill=group.num_blocks),
                peak_used=ints(),
                cached=_no_cached_blocks(config, g, group.num_blocks, numpy),
            )
            for g, group in enumerate(groups)
        ),
        extras=config.hooks.empty(config, numpy),
    )


def _no_marks(config: CacheConfig, numpy: Any) -> Any:
    if not (config.enable_prefix_caching and config.snapshot_groups):
        return None
    return numpy.zeros((config.max_seqs, NUM_MARKS), jnp.int32)


def _no_holes(config: CacheConfig, numpy: Any) -> Holes:
    none = numpy.zeros(config.max_seqs, jnp.int32)
    first = numpy.zeros((config.max_seqs, len(config.groups)), jnp.int32)
    return Holes(start=none, num_hidden=none, num_dropped=none, num_kept=none, first=first)


def _no_cached_blocks(config: CacheConfig, group_id: int, num_blocks: int, numpy: Any) -> CachedBlocks | None:
    if not config.enable_prefix_caching:
        return None
    is_kept = config.keeper.memory_kind is not None and group_id in config.snapshot_groups
    return CachedBlocks(
        is_published=numpy.zeros(num_blocks, bool),
        num_cached=numpy.zeros((), jnp.int32),
        # Twice as long as there are blocks: half of it must be stale before it has to be swept.
        queue=numpy.full(1 << (2 * num_blocks - 1).bit_length(), num_blocks, jnp.int32),
        queued_at=numpy.zeros(num_blocks, jnp.uint32),
        head=numpy.zeros((), jnp.uint32),
        tail=numpy.zeros((), jnp.uint32),
        released_at=numpy.zeros(num_blocks, jnp.uint32) if is_kept else None,
        num_released=numpy.zeros((), jnp.uint32) if is_kept else None,
    )


def empty_index(
    config: CacheConfig, numpy: Any = jnp, groups: Sequence[LayerGroup] | None = None
) -> PrefixIndex:
    """Builds an index in which nothing is published, as `empty_control`."""
    groups = config.groups if groups is None else groups
    group = groups[config.indexed_group]
    num_blocks = group.num_blocks

    def links_to(group_id: int, other: LayerGroup) -> GroupLinks | None:
        if other is group:
            return None
        num_links = ceil_div(group.block_size, other.block_size) if other.span.is_in_prefix else 0
        shape = (num_blocks, num_links)
        return GroupLinks(
            block_ids=numpy.full(shape, other.num_blocks, jnp.int32),
            indexed_ids=numpy.full(other.num_blocks, num_blocks, jnp.int32),
            is_wanted=numpy.zeros(other.num_blocks, bool) if group_id in config.snapshot_groups else None,
        )

    return PrefixIndex(
        buckets=numpy.full((_BUCKETS_PER_BLOCK * num_blocks, _WAYS), num_blocks, jnp.int32),
        block_tokens=numpy.zeros((num_blocks, group.block_size), jnp.int32),
        block_hash=numpy.zeros((num_blocks, 2), jnp.uint32),
        parent=numpy.full(num_blocks, num_blocks, jnp.int32),
        namespace=numpy.zeros((num_blocks, 4), jnp.uint32),
        group_links=tuple(links_to(*pair) for pair in enumerate(groups)),
        history=_empty_history(config.eviction.policy, num_blocks, numpy),
    )


def _empty_history(policy: str, num_blocks: int, numpy: Any) -> BlockHistory | None:
    if policy == LRU:
        return None
    fields = {
        "num_hits": ("num_hits", jnp.int32),
        "age": ("published_at", jnp.uint32),
        "idle": ("last_used_at", jnp.uint32),
        "priority": ("priority", jnp.int32),
        "depth": ("depth", jnp.int32),
    }
    needs = policies.find(policy).needs
    return BlockHistory(
        num_children=numpy.zeros(num_blocks, jnp.int32),
        **{
            field: numpy.zeros(num_blocks, dtype) if name in needs else None
            for name, (field, dtype) in fields.items()
        },
    )


def empty_pools(config: CacheConfig) -> tuple[KVPool, ...]:
    """Makes the zeroed arrays of every group's blocks."""
    return tuple(
        KVPool(
            arrays={
                name: jnp.zeros((group.num_layers * group.num_blocks, *array.shape), array.dtype)
                for name, array in group.arrays
            }
        )
        for group in config.groups
    )
