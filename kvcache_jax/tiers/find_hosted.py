"""Prefixes that go on in host memory."""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, num_true, quotient
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control
from kvcache_jax.prefix import group_links, prefix_index
from kvcache_jax.prefix.prefix_index import Content
from kvcache_jax.tiers.hosted import linked_groups, tier_of


def find_hosted(
    control: Control,
    tokens: jax.Array,
    most: jax.Array,
    namespace: jax.Array,
    columns: list[jax.Array],
    break_even: int,
    config: CacheConfig,
) -> list[jax.Array]:
    """Adds the host's blocks to a prompt's blocks on the device; see `Keeper.find`.

    A prefix that goes on for fewer than `break_even` tokens on the host ends on the device.
    """
    tier, g = tier_of(control), config.indexed_group
    index, found = tier.index, columns[g]
    nowhere, block_size = control.block_pools[g].num_blocks, index.block_tokens.shape[1]
    blocks, hashes = prefix_index.prefix_blocks(
        control.hash_key, tokens[: found.shape[0] * block_size], namespace, block_size
    )
    in_bucket = index.buckets[prefix_index.bucket_of(index, hashes)]
    hosted = prefix_index.candidates(index, in_bucket, hashes)
    parent_serial = get_at(index.parent, hosted)
    is_hosted = prefix_index.matches(index, hosted, Content(blocks, hashes, parent_serial, namespace))
    is_hosted &= get_at(tier.awaits[g], hosted, 0) == nowhere
    ids = jnp.where(found < nowhere, tier.of_device(found), hosted)
    serials = get_at(tier.serial, ids, 0)
    # By its number the block before is known, whichever tier it is in.
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), serials[:-1]])
    order = jnp.arange(found.shape[0], dtype=jnp.int32)
    is_hosted &= (parent_serial == before) & ((order == 0) | (before > 0))
    is_hosted &= order < quotient(most, block_size)
    is_found = jnp.cumsum(~(is_hosted | (found < nowhere))) == 0
    is_hosted = is_found & (found == nowhere)
    is_hosted &= num_true(is_hosted) * block_size >= break_even
    ids = jnp.where(is_hosted | (found < nowhere), ids, tier.nowhere)
    columns = list(columns)
    columns[g] = jnp.where(is_hosted, nowhere + 1 + hosted, found)
    for other, links in linked_groups(index):
        linked = group_links.linked_columns(links, ids, other, config)[: columns[other].shape[0]]
        nowhere = control.block_pools[other].num_blocks
        is_there = get_at(tier.awaits[other], linked, 0) == nowhere
        is_there &= columns[other] == nowhere
        columns[other] = jnp.where(is_there, nowhere + 1 + linked, columns[other])
    return columns
