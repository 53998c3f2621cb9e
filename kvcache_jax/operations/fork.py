"""The operation `fork`: starts rows that share all tokens of other rows."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, num_true, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.rows import check_ids, inherit, on_rows, token_blocks


@takes_one
@jax.named_scope("kvcache.fork")
def fork(cache: Cache, src_ids: IntRows, dst_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Starts rows that share all tokens of other rows; takes no block and copies nothing.

    Write the source's tokens before. Blocks that the source reserved and has not filled stay with it. The
    first write into a shared last block copies that block (see `extend`). A source must be active before the
    call: a chain of forks takes one call per link.

    Args:
      cache: Not changed.
      src_ids: i32[n], active rows, which may repeat.
      dst_ids: i32[n], idle rows, each at most once.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE (source), SEQ_IN_USE (destination), DUPLICATE_SEQ_ID,
      SKIPPED, BAD_SEQ_ID.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, status = kv.fork(cache, [0, 0], [1, 0])
      >>> [kv.Status(s).name for s in status.tolist()]
      ['OK', 'SEQ_IN_USE']
    """
    src_ids = arguments.int_column("src_ids", src_ids)
    dst_ids = arguments.int_column("dst_ids", dst_ids, src_ids.shape[0])
    return on_rows(fork_rows, cache, src_ids, dst_ids)


def fork_rows(
    control: Control, src_ids: jax.Array, dst_ids: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Starts rows `dst_ids` on the blocks that hold the tokens of `src_ids`."""
    status = first_failure(
        *check_ids(control, dst_ids, src_ids),
        (~get_at(control.is_active, src_ids), Status.SEQ_NOT_ACTIVE),
        (get_at(control.is_active, dst_ids), Status.SEQ_IN_USE),
    )
    ok = status == Status.OK
    rows = jnp.where(ok, dst_ids, control.max_seqs)
    pools = []
    for pool, group in zip(control.block_pools, config.groups, strict=True):
        ids = token_blocks(pool, group, control, src_ids)
        pool = block_pool.share(pool, jnp.where(ok[:, None], ids, pool.num_blocks))
        pools.append(dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, ids)))
    control = dataclasses.replace(
        inherit(control, rows, src_ids, is_active=True),
        counters=count_events(control.counters, {Counter.FORKS: num_true(ok)}),
        block_pools=tuple(pools),
    )
    return config.hooks.inherit(control, rows, src_ids), status
