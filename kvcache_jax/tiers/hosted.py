"""The state of the host's memory: which published blocks it has, found by their contents as the device's are.

A published block is on the device or on the host, never on both. The host's blocks have a control state of
their own, without rows: pools of blocks that are free, cached in the order of their demotion, or held while
blocks of the device wait for their contents, and an index. Invariants, which `violations` looks for:

* The ids of the host's index are its blocks' and, from `num_blocks` on, the indexed blocks' of the device.
  Under one of the latter the index lists blocks of other layer groups that are on the host while the indexed
  block is not; no bucket has it.
* In place of the id of the block before it, `parent` has that block's serial number, which goes with the
  block from tier to tier. Only blocks with successors on the host have one, and no two have the same.
* A block of the host whose contents are still on the device `awaits` them, and is not found meanwhile. A
  block of the device whose contents are on the host has a `source` there, and owns it. `settle` moves the
  contents of both, those to the host first: so a source awaits nothing.
* States, and windows beside them, are in one order of release over both tiers. They are forgotten once both
  are full, so that the host has room for the device's too: a prefix takes its states along.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.empty_state import empty_control
from kvcache_jax.core.eviction_policy import LRU
from kvcache_jax.core.state import BlockPool, Cache, Control, GroupLinks, PrefixIndex
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div

NAME = "host"
"""The key of the host's blocks in `Control.extras`."""


@pytree_dataclass()
class HostTier:
    """Published blocks in host memory, by ids of their own; nowhere is one past each pool.

    Attributes:
      control: Control, the host's pools of blocks per layer group, and the index.
      serial: i32[ids of the index], serial numbers of blocks with successors on the host; 0 for others.
      num_serials: i32[], how many were given out, modulo 2**31 - 1.
      num_hits: i32[num_blocks of the device], uses of indexed blocks since they were published.
      awaits: per group i32[blocks of the host], the device's block whose contents each waits for, or nowhere.
      sources: per group i32[num_blocks of the device], the host's block whose contents each waits for, or
        nowhere.
      released_at: per group u32[blocks of the host], of states, as `CachedBlocks.released_at` on the device;
        None for other groups.
      is_settled: bool[], no block waits.
      num_demoted: u32[], indexed blocks that were demoted.
      num_promoted: u32[], indexed blocks that got contents from the host.
    """

    control: Control
    serial: jax.Array
    num_serials: jax.Array
    num_hits: jax.Array
    awaits: tuple[jax.Array, ...]
    sources: tuple[jax.Array, ...]
    released_at: tuple[jax.Array | None, ...]
    is_settled: jax.Array
    num_demoted: jax.Array
    num_promoted: jax.Array

    @property
    def index(self) -> PrefixIndex:
        """The host's index."""
        assert self.control.prefix_index is not None
        return self.control.prefix_index

    @property
    def num_blocks(self) -> int:
        """Indexed blocks of the host; also the id, in its index, of the device's first."""
        return self.serial.shape[-1] - self.num_hits.shape[-1]

    @property
    def nowhere(self) -> int:
        """One past the ids of the index."""
        return self.serial.shape[-1]

    def of_device(self, block_ids: jax.Array) -> jax.Array:
        """Computes the ids in the host's index of the device's indexed blocks, i32 like `block_ids`."""
        return jnp.where(block_ids < self.num_hits.shape[-1], self.num_blocks + block_ids, self.nowhere)

    def with_control(self, **fields: Any) -> "HostTier":
        """Sets fields of the host's control state."""
        return dataclasses.replace(self, control=dataclasses.replace(self.control, **fields))

    def with_pool(self, group_id: int, pool: BlockPool) -> "HostTier":
        """Sets a layer group's pool of blocks."""
        pools = self.control.block_pools
        return self.with_control(block_pools=(*pools[:group_id], pool, *pools[group_id + 1 :]))

    def waiting(self, group_id: int, **ids: jax.Array) -> "HostTier":
        """Sets who waits for contents in a layer group: `awaits` or `sources`."""
        fields: dict[str, Any] = {}
        for name, values in ids.items():
            of_groups = getattr(self, name)
            fields[name] = (*of_groups[:group_id], values, *of_groups[group_id + 1 :])
        return dataclasses.replace(self, **fields, is_settled=jnp.zeros_like(self.is_settled))


@functools.lru_cache(maxsize=64)
def capacity(config: CacheConfig, num_blocks: int) -> tuple[int, ...]:
    """Counts the blocks per layer group that stay on the host, `num_blocks` of the indexed group.

    Other groups have as many in proportion to their pools on the device, or none, if prefixes need none.
    """
    indexed = config.groups[config.indexed_group]
    return tuple(
        ceil_div(num_blocks * group.num_blocks, indexed.num_blocks) if group.span.is_in_prefix else 0
        for group in config.groups
    )


@functools.lru_cache(maxsize=64)
def host_groups(config: CacheConfig, num_blocks: int) -> tuple[LayerGroup, ...]:
    """Builds the layer groups as they are in host memory: with room beside for what one row promotes."""

    def num_more(group_id: int, group: LayerGroup) -> int:
        if group_id in config.snapshot_groups:
            return group.num_blocks
        return min(group.max_held_blocks, group.num_blocks) * group.span.is_in_prefix

    stay = capacity(config, num_blocks)
    return tuple(
        dataclasses.replace(group, num_blocks=stay[g] + num_more(g, group))
        for g, group in enumerate(config.groups)
    )


@functools.lru_cache(maxsize=64)
def host_config(config: CacheConfig) -> CacheConfig:
    """Builds the config of the host's control state: without rows, evicted in the order of demotion."""
    return dataclasses.replace(config, extras=(), eviction_policy=LRU, max_seqs=1)


def empty_tier(config: CacheConfig, num_blocks: int, numpy: Any) -> HostTier:
    """Builds the state of a host without blocks; `numpy` makes its arrays."""
    gi, groups = config.indexed_group, host_groups(config, num_blocks)
    num_host, num_device = groups[gi].num_blocks, config.groups[gi].num_blocks
    num_ids = num_host + num_device
    with_device = dataclasses.replace(groups[gi], num_blocks=num_ids)
    control = empty_control(
        host_config(config),
        numpy.zeros(2, jnp.uint32),
        numpy,
        [*groups[:gi], with_device, *groups[gi + 1 :]],
    )
    pools = list(control.block_pools)
    order = numpy.arange(num_ids, dtype=jnp.int32)
    # The device's ids are neither free nor cached.
    pools[gi] = dataclasses.replace(
        pools[gi],
        ref_count=(order >= num_host).astype(jnp.int32),
        free_stack=numpy.where(order < num_host, num_host - 1 - order, order).astype(jnp.int32),
        num_free=numpy.full((), num_host, jnp.int32),
        peak_used=numpy.full((), num_device, jnp.int32),
    )

    def filled(lengths: Sequence[int], values: Sequence[int]) -> tuple[Any, ...]:
        pairs = zip(lengths, values, strict=True)
        return tuple(numpy.full(length, value, jnp.int32) for length, value in pairs)

    on_device = [group.num_blocks for group in config.groups]
    return HostTier(
        control=dataclasses.replace(control, block_pools=tuple(pools)),
        serial=numpy.zeros(num_ids, jnp.int32),
        num_serials=numpy.zeros((), jnp.int32),
        num_hits=numpy.zeros(num_device, jnp.int32),
        awaits=filled([group.num_blocks for group in groups], on_device),
        sources=filled(on_device, [pool.num_blocks for pool in pools]),
        released_at=tuple(
            numpy.zeros(group.num_blocks, jnp.uint32) if g in config.snapshot_groups else None
            for g, group in enumerate(groups)
        ),
        is_settled=numpy.ones((), bool),
        num_demoted=numpy.zeros((), jnp.uint32),
        num_promoted=numpy.zeros((), jnp.uint32),
    )


def tier_of(control: Control) -> HostTier:
    """Returns the host's blocks of a cache that has some."""
    return control.extras[NAME]


def with_tier(control: Control, tier: HostTier, **fields: Any) -> Control:
    """Sets the host's blocks, and further fields of the control state."""
    return dataclasses.replace(control, extras=control.extras | {NAME: tier}, **fields)


def require_tier(operation: str, cache: Cache) -> HostTier:
    """Refuses a cache without blocks on the host."""
    if NAME not in cache.control.extras:
        raise ValueError(
            f"{operation} got a cache without blocks in host memory, expected one built with "
            "CacheConfig(extras=[kv.tiers.Host(num_blocks=...)])"
        )
    return tier_of(cache.control)


def linked_groups(index: PrefixIndex) -> Iterator[tuple[int, GroupLinks]]:
    """Yields the groups, and the links to them, of which prefixes need blocks beside the indexed ones."""
    for g, links in enumerate(index.group_links):
        if links is not None and links.block_ids.shape[1]:
            yield g, links
