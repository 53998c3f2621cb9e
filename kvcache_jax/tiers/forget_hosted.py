"""The host's blocks that are forgotten, and overwritten."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.prefix import eviction, group_links
from kvcache_jax.tiers.hosted import HostTier, host_config, tier_of, with_tier
from kvcache_jax.tiers.move_blocks import overwrite


def forget(control: Control, config: CacheConfig) -> Control:
    """Forgets all of the host's blocks; those that the device's wait for stay until they are there."""
    tier = tier_of(control)
    return with_tier(control, _forget(tier, jnp.ones_like(tier.serial, bool), config))


def _forget(tier: HostTier, mask: jax.Array, config: CacheConfig) -> HostTier:
    """Forgets the masked ids of the index, bool[ids], with the blocks of other groups under them."""
    g = config.indexed_group
    pool = tier.control.block_pools[g]
    assert pool.cached is not None
    ids = jnp.where(mask, jnp.arange(tier.nowhere, dtype=jnp.int32), tier.nowhere)
    control = group_links.drop_links(tier.control, ids)
    listed = jnp.where(pool.cached.is_published, ids, tier.nowhere)
    control = eviction.unpublish(control, g, listed, control.block_pools[g], host_config(config))
    return dataclasses.replace(tier, control=control, serial=jnp.where(mask, 0, tier.serial))


def scrub(cache: Cache, masks: Sequence[jax.Array], namespace: jax.Array | None) -> Cache:
    """Overwrites the host's blocks that continue the device's masked ones, per group bool[num_blocks].

    With a `namespace` u32[4], those in it and all that hold nothing, which may have been its.
    """
    tier, config = tier_of(cache.control), cache.config
    is_listed = _is_published(tier, config.indexed_group)[: tier.num_blocks]
    parents, on_device = tier.index.parent[: tier.num_blocks], masks[config.indexed_group]
    if namespace is not None:
        is_hosted = (tier.index.namespace[: tier.num_blocks] == namespace[None]).all(axis=-1) & is_listed
    else:

        def grow(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            is_hosted, _ = state
            numbers = jnp.where(jnp.concatenate([is_hosted, on_device]), tier.serial, 0)
            follows = is_listed & ~is_hosted & (parents > 0) & jnp.isin(parents, numbers)
            return is_hosted | follows, follows.any()

        none = jnp.zeros_like(is_listed)
        is_hosted, _ = lax.while_loop(lambda state: state[1], grow, (none, on_device.any()))
    before = [_is_published(tier, g) for g in range(len(config.groups))]
    tier = _forget(tier, jnp.concatenate([is_hosted, on_device]), config)
    index = tier.index
    gone = jnp.concatenate([is_hosted | (~is_listed & (namespace is not None)), jnp.zeros_like(on_device)])
    tier = tier.with_control(
        prefix_index=dataclasses.replace(
            index,
            block_tokens=jnp.where(gone[:, None], 0, index.block_tokens),
            block_hash=jnp.where(gone[:, None], jnp.uint32(0), index.block_hash),
            namespace=jnp.where(gone[:, None], jnp.uint32(0), index.namespace),
        )
    )
    cache = dataclasses.replace(cache, control=with_tier(cache.control, tier))
    if not cache.pools:
        return cache
    cleared = []
    for g, awaits in enumerate(tier.awaits):
        is_cleared = ~_is_published(tier, g) & (before[g] | (namespace is not None))
        cleared.append(is_cleared[: awaits.shape[0]])
    return dataclasses.replace(cache, kept=overwrite(cache.kept, cleared))


def _is_published(tier: HostTier, group_id: int) -> jax.Array:
    cached = tier.control.block_pools[group_id].cached
    assert cached is not None
    return cached.is_published
