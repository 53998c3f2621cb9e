"""The operation `reorder`."""

import dataclasses
import functools

import jax

from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.single_kernel import one_control_kernel
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations import rows


@takes_one
@jax.named_scope("kvcache.reorder")
def reorder(cache: Cache, seq_ids: IntRows, parent_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Lets each row continue from a parent as it was before the call, as beam search does.

    Takes no block; blocks that only replaced rows held come back.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows, each at most once.
      parent_ids: i32[n], active rows; the same parent may serve several rows.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    parent_ids = arguments.int_column("parent_ids", parent_ids, seq_ids.shape[0])
    control, status = _reorder(cache.control, seq_ids, parent_ids, config=cache.config)
    return dataclasses.replace(cache, control=control), status


@functools.partial(jax.jit, static_argnames="config")
def _reorder(control: Control, *columns: jax.Array, config: CacheConfig) -> tuple[Control, jax.Array]:
    return one_control_kernel(functools.partial(rows.reorder_rows, config=config), control, *columns)
