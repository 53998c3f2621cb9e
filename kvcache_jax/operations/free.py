"""The operation `free`."""

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache
from kvcache_jax.operations import rows
from kvcache_jax.operations.row_calls import on_rows


@takes_one
@jax.named_scope("kvcache.free")
def free(cache: Cache, seq_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Ends rows; blocks that no other row holds are free again, or stay cached if they are published.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, SKIPPED, BAD_SEQ_ID.
    """
    return on_rows(rows.free_row, cache, arguments.int_column("seq_ids", seq_ids))
