"""The operation `truncate`."""

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.state import Cache
from kvcache_jax.operations import rows
from kvcache_jax.operations.row_calls import on_rows


@takes_one
@jax.named_scope("kvcache.truncate")
def truncate(cache: Cache, seq_ids: IntRows, new_len: IntRows) -> tuple[Cache, jax.Array]:
    """Drops tokens from the end of rows; blocks left without a token, reserved ones too, go back.

    A row of a window group that is longer than the window can be rolled back by at most
    `max_rollback` tokens, and not always into a prefix that it found cached.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows.
      new_len: i32[n], tokens to keep.

    Returns:
      The cache and status i32[n]: TOO_LONG (`new_len` exceeds the row), BAD_LENGTH, WINDOW_LOST,
      SEQ_NOT_ACTIVE, SKIPPED, BAD_SEQ_ID.
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    new_len = arguments.int_column("new_len", new_len, seq_ids.shape[0])
    return on_rows(rows.truncate_row, cache, seq_ids, new_len)
