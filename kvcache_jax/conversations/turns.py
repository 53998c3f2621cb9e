"""Facts that a cache without an engine is told: the time, and whose turns its rows are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from kvcache_jax.conversations.conversations import NAME
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import MOST_TICKS, TICKS_PER_SECOND, Turn
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations.rows import active_rows, on_rows


@takes_one
@jax.named_scope("kvcache.set_time")
def set_time(cache: Cache, seconds: ArrayLike) -> Cache:
    """Tells a cache with `Conversations` the time: of rows that end from now on.

    Args:
      cache: Not changed.
      seconds: []. By any clock that begins near 0, to a sixteenth of a second; an earlier time than the one
        before changes nothing.

    Raises:
      ValueError, TypeError: a cache without `Conversations`, or no number.
    """
    _require("set_time", cache)
    now = _ticks("seconds", seconds, 1)
    cache, _ = on_rows(_tick, cache, now)
    return cache


def _tick(control: Control, now: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    return config.hooks.tick(control, now[0]), now


@takes_one
@jax.named_scope("kvcache.set_turns")
def set_turns(
    cache: Cache, seq_ids: IntRows, conversations: IntRows, retain: ArrayLike = 0.0
) -> tuple[Cache, jax.Array]:
    """Tells whose turns active rows are, and for how long what they leave is worth more.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Conversations()])`.
      seq_ids: i32[n], active rows.
      conversations: i32[n], numbers, 1 to 2**31 - 2; 0 for none, and so is a traced one out of range.
      retain: [] or [n], seconds from the row's end. The next turn of the conversation says it anew.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: a cache without `Conversations`, numbers out of range, shapes or dtypes that do
        not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, max_seqs=2, max_seq_len=64,
      ...     enable_prefix_caching=True, extras=[kv.policies.Conversations()], eviction_policy="retention")
      >>> cache, _ = kv.allocate(kv.init(config), [0], [2], tokens=[[5, 6]])
      >>> cache, status = kv.policies.set_turns(kv.policies.set_time(cache, 3.5), [0], [71], retain=60)
      >>> status.tolist()
      [0]
    """
    _require("set_turns", cache)
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = seq_ids.shape[0]
    conversations = _numbers(conversations, num_rows)
    turn: dict[str, Any] = {"conversation": conversations, "retain": _ticks("retain", retain, num_rows)}
    return on_rows(_begin, cache, seq_ids, Turn(**turn))


def _begin(
    control: Control, seq_ids: jax.Array, turn: Turn, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    status, rows = active_rows(control, seq_ids)
    return config.hooks.begin(control, rows, turn), status


def _require(caller: str, cache: Cache) -> None:
    if NAME not in cache.control.extras:
        raise ValueError(
            f"{caller} got a cache that does not learn of conversations, expected one built with "
            "CacheConfig(extras=[kv.policies.Conversations()])"
        )


def _numbers(values: Any, num_rows: int) -> arguments.Array:
    """Converts numbers of conversations to i32[num_rows]; a saturated one would be another conversation's."""
    given = arguments.integers("conversations", values)
    column = arguments.int_column("conversations", given, num_rows)
    if isinstance(given, Tracer):
        return jnp.where((column < 0) | (column == arguments.INT32.max), 0, column)
    for number in np.asarray(given).tolist():
        if not 0 <= number < arguments.INT32.max:
            raise ValueError(f"conversations has {number}, expected 0 to {arguments.INT32.max - 1}")
    return column


def _ticks(name: str, seconds: ArrayLike, num_rows: int) -> arguments.Array:
    """Converts seconds to i32[num_rows] ticks, rounded up."""
    values = arguments.as_array(name, seconds)
    is_whole = jnp.issubdtype(values.dtype, jnp.integer)
    is_number = is_whole or jnp.issubdtype(values.dtype, jnp.floating)
    if not is_number or values.shape not in ((), (num_rows,)):
        raise TypeError(f"{name} is {values.dtype}{list(values.shape)}, expected numbers [] or [{num_rows}]")
    numpy = jnp if isinstance(values, jax.Array) else np
    if is_whole:  # a float32 would round them
        whole, most = arguments.saturated(name, values), MOST_TICKS // TICKS_PER_SECOND
        ticks = numpy.where(whole > most, MOST_TICKS, numpy.clip(whole, 0, most) * TICKS_PER_SECOND)
        return numpy.broadcast_to(ticks.astype(np.int32), (num_rows,))
    values = values.astype(numpy.float32 if numpy is jnp else np.float64)
    if numpy is np and not np.isfinite(values).all():
        raise ValueError(f"{name} is {seconds!r}, expected finite numbers")
    ticks = numpy.ceil(numpy.clip(values, 0, MOST_TICKS / TICKS_PER_SECOND) * TICKS_PER_SECOND)
    return numpy.broadcast_to(ticks.astype(np.int32), (num_rows,))
