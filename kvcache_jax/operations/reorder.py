"""The operation `reorder`: continues rows from other rows, as beam search does."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.rows import check_ids, inherit, on_rows, token_blocks


@takes_one
@jax.named_scope("kvcache.reorder")
def reorder(cache: Cache, seq_ids: IntRows, parent_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Continues each row from a parent as it was before the call, as beam search does.

    Takes no block; blocks that only replaced rows held are released.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows, each at most once.
      parent_ids: i32[n], active rows; the same parent may serve several rows.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    parent_ids = arguments.int_column("parent_ids", parent_ids, seq_ids.shape[0])
    return on_rows(reorder_rows, cache, seq_ids, parent_ids)


def reorder_rows(
    control: Control, seq_ids: jax.Array, parent_ids: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Continues row `seq_ids[i]` from `parent_ids[i]`; i32[n] both.

    New owners are counted before old ones are released, so a block that only changes its
    owner is never free in between.
    """
    status = first_failure(
        *check_ids(control, seq_ids, parent_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (~get_at(control.is_active, parent_ids), Status.SEQ_NOT_ACTIVE),
    )
    moves = (status == Status.OK) & (seq_ids != parent_ids)
    rows = jnp.where(moves, seq_ids, control.max_seqs)
    pools = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        new_ids = token_blocks(pool, group, control, parent_ids)
        old_ids = get_at(pool.block_table, rows, pool.num_blocks)
        pool = block_pool.share(pool, jnp.where(moves[:, None], new_ids, pool.num_blocks))
        pool = block_pool.release(pool, old_ids[:, ::-1])
        pools.append(dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, new_ids)))
    control = dataclasses.replace(inherit(control, rows, parent_ids), block_pools=tuple(pools))
    return config.hooks.inherit(control, rows, parent_ids), status
