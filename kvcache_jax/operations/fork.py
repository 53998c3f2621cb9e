"""The operation `fork`."""

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache
from kvcache_jax.operations import rows
from kvcache_jax.operations.row_calls import on_rows


@takes_one
@jax.named_scope("kvcache.fork")
def fork(cache: Cache, src_ids: IntRows, dst_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Starts rows that share all tokens of other rows; takes no block and copies nothing.

    Write the source's tokens before. Blocks that it reserved and has not filled stay with it. The first write
    into a shared last block copies it (see `extend`).

    Args:
      cache: Not changed.
      src_ids: i32[n], active rows.
      dst_ids: i32[n], idle rows.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE (source), SEQ_IN_USE (destination), SKIPPED, BAD_SEQ_ID.

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
    return on_rows(rows.fork_row, cache, src_ids, dst_ids)
