"""The operation `touch`."""

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache
from kvcache_jax.operations import rows
from kvcache_jax.operations.row_calls import on_rows


@takes_one
@jax.named_scope("kvcache.touch")
def touch(cache: Cache, seq_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Marks rows as just used. Returns the cache and status i32[n]: SEQ_NOT_ACTIVE, SKIPPED, BAD_SEQ_ID."""
    return on_rows(rows.touch_row, cache, arguments.int_column("seq_ids", seq_ids))
