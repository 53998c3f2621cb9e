"""The edits of rows: `touch` and `set_priority`."""

import dataclasses

import jax

from kvcache_jax.arrays.masked_updates import set_at
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control, mark_used
from kvcache_jax.operations.rows import active_rows, on_rows


@takes_one
@jax.named_scope("kvcache.touch")
def touch(cache: Cache, seq_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Marks rows i32[n] as just used.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    return on_rows(_touch_rows, cache, arguments.int_column("seq_ids", seq_ids))


def _touch_rows(control: Control, seq_ids: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    status, rows = active_rows(control, seq_ids)
    return mark_used(control, rows), status


@takes_one
@jax.named_scope("kvcache.set_priority")
def set_priority(cache: Cache, seq_ids: IntRows, priority: IntRows) -> tuple[Cache, jax.Array]:
    """Sets the priority, i32[n], of rows i32[n]; higher ones are evicted and preempted later.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    priority = arguments.priorities(priority, seq_ids.shape[0])
    return on_rows(_set_priorities, cache, seq_ids, priority)


def _set_priorities(
    control: Control, seq_ids: jax.Array, priority: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    status, rows = active_rows(control, seq_ids)
    return dataclasses.replace(control, priority=set_at(control.priority, rows, priority)), status
