"""The operation `free`: ends rows and releases their blocks."""

import dataclasses

import jax

from kvcache_jax.arrays.masked_updates import get_at, num_true, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import Cache, Control, row_fields
from kvcache_jax.core.status import Status
from kvcache_jax.operations.rows import active_rows, on_rows


@takes_one
@jax.named_scope("kvcache.free")
def free(cache: Cache, seq_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Ends rows; blocks that no other row holds are free again, or stay cached if they are published.

    Published blocks are queued for LRU row by row, each row's last block first, and a block that several of
    the rows hold at its last release.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows, each at most once.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    return on_rows(free_rows, cache, arguments.int_column("seq_ids", seq_ids))


def free_rows(control: Control, seq_ids: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    """Ends rows `seq_ids` i32[n]: all their blocks lose these owners."""
    status, rows = active_rows(control, seq_ids)
    control, pools = config.hooks.forget(control, rows), []
    for pool in control.block_pools:
        ids = get_at(pool.block_table, rows, pool.num_blocks)
        pool = block_pool.release(pool, ids[:, ::-1])
        pools.append(dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, pool.num_blocks)))
    return dataclasses.replace(
        control,
        **{name: set_at(values, rows, 0) for name, values in row_fields(control).items()},
        holes=jax.tree.map(lambda x: set_at(x, rows, 0), control.holes),
        counters=count_events(control.counters, {Counter.FREES: num_true(status == Status.OK)}),
        block_pools=tuple(pools),
    ), status
