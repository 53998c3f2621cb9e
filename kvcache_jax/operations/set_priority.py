"""The operation `set_priority`."""

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache
from kvcache_jax.operations import rows
from kvcache_jax.operations.row_calls import on_rows


@takes_one
@jax.named_scope("kvcache.set_priority")
def set_priority(cache: Cache, seq_ids: IntRows, priority: IntRows) -> tuple[Cache, jax.Array]:
    """Sets rows' priority, i32[n]. Returns the cache and status i32[n], as `touch`."""
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    priority = arguments.priorities(priority, seq_ids.shape[0])
    return on_rows(rows.set_priority_row, cache, seq_ids, priority)
