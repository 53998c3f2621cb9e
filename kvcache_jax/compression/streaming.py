"""Streaming: endless texts in fixed memory, of which the first tokens and the last ones stay."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import first_true, get_at, quotient
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.compression.drop_tokens import drop, drop_rows
from kvcache_jax.compression.dropping import reads_rotated
from kvcache_jax.core import arguments
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.decoding.prompts import Retention
from kvcache_jax.layers.span import Span, ceil_div
from kvcache_jax.operations.preempt import groups_above, one_by_one, row_policies, rows_in_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Retention):
    """The tokens of a text that stay as it goes on; the others are dropped (StreamingLLM).

    A token sees the first `num_sink_tokens` and the last `window`, whatever the layers' kinds, which may see
    less.

    Attributes:
      window: Last tokens that a token sees, itself included.
      num_sink_tokens: First tokens of the text, which are always seen.

    Raises:
      ValueError, TypeError: a window of less than 1 token, sinks of less than 0, more than 2**30.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.compression.Streaming()
      Streaming(window=508, num_sink_tokens=4)

    References:
      Efficient Streaming Language Models with Attention Sinks (Xiao et al.; arXiv:2309.17453).
    """

    window: int = 508
    num_sink_tokens: int = 4

    def __post_init__(self):
        for name, least in (("window", 1), ("num_sink_tokens", 0)):
            value = static_count(name, getattr(self, name), least, 2**30, "2**30")  # their sum is an i32
            object.__setattr__(self, name, value)

    @property
    def span(self) -> Span:
        """The positions that a token sees."""
        return Span(window=self.window, num_sink_tokens=self.num_sink_tokens)

    def max_held_len(self, config: CacheConfig, num_new: int) -> int:
        """Counts the most tokens that a row holds in a step of `num_new`, hidden ones too.

        Tokens dropped in the blocks of the last sink and of the window's first token are still held.
        """
        unit = config.drop_unit
        return ceil_div(self.num_sink_tokens, unit) * unit + unit - 1 + self.window - 1 + num_new

    def check(self, caller: str, config: CacheConfig, num_drafts: int) -> None:
        """Refuses drafts, and a cache whose rows cannot stream so."""
        require_streaming(caller, self, config)
        if num_drafts:
            raise ValueError(
                f"{caller} got streaming and num_drafts = {num_drafts}, expected 0: rows that stream take "
                "none"
            )
        if config.max_seq_len < self.max_held_len(config, 1):
            raise ValueError(
                f"max_seq_len is {config.max_seq_len}, expected at least {self.max_held_len(config, 1)}: "
                f"{self.num_sink_tokens} sinks, a window of {self.window}, and what fills their blocks of "
                f"{config.drop_unit}; raise max_seq_len"
            )

    def prefill_len(self, config: CacheConfig, prefill_len: int) -> int:
        """Limits the tokens of one call of the model to those that fit beside a row's sinks and window."""
        return min(prefill_len, config.max_seq_len - self.max_held_len(config, 0))

    def max_text_len(self, config: CacheConfig, prompts: Sequence[np.ndarray], max_new_tokens: int) -> int:
        """Counts the tokens of the longest text: a power of two, so that lengths share programs."""
        return 1 << (max(map(len, prompts), default=0) + max_new_tokens - 1).bit_length()

    def drop_unseen(self, cache: Cache, rows: jax.Array) -> Cache:
        """Drops tokens that the next token of `rows` i32[n] will not see."""
        assert cache.control.holes is not None
        text_len = get_at(cache.context_len, rows, 0) + cache.control.holes.of_rows(rows).num_dropped
        start = jnp.full_like(rows, self.num_sink_tokens)
        length = jnp.maximum(text_len + 1 - self.window - start, 0)
        return drop(cache, rows, start, length)[0]


def require_streaming(caller: str, streaming: Any, config: CacheConfig) -> None:
    """Refuses anything but a `Streaming`, and a cache whose rows cannot stream so."""
    if not isinstance(streaming, Streaming):
        raise TypeError(
            f"{caller} got {streaming!r}, expected kv.compression.Streaming(window=..., num_sink_tokens=...)"
        )
    if config.enable_prefix_caching:
        raise ValueError(
            f"{caller} got streaming and a cache with enable_prefix_caching=True, expected "
            "False: what is after dropped tokens is not found by its own"
        )
    if not config.hides_tokens:
        raise ValueError(f"{caller} got streaming, expected a cache with extras=[kv.compression.Dropping()]")
    least = max(group.num_sink_tokens for group in config.groups)
    if streaming.num_sink_tokens < least:
        raise ValueError(
            f"streaming has num_sink_tokens = {streaming.num_sink_tokens}, expected at least {least}: the "
            "sinks of a layer kind are never dropped"
        )


@takes_one
def drop_to_utilization(
    cache: Cache, target: ArrayLike, policy: str = "longest", *, streaming: Streaming | None = None
) -> tuple[Cache, jax.Array]:
    """Drops tokens of rows, one row after the other, until `utilization` is at most `target`.

    Rows go on: each drops whole blocks after its sinks, or after the tokens that it dropped before, oldest
    tokens first, no more than are needed (see `drop`). The call stops early when no row is left that frees a
    block on its own in a layer group that is above the target. Rows whose sinks `drop(positions="cache")` has
    rotated are left alone.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Dropping()])`, without prefix caching.
      target: f32[], share of referenced blocks, 0 to 1.
      policy: As in `select_rows_to_preempt`, by the blocks that dropping frees; asked again after each row.
      streaming: The tokens that rows keep. Default: `Streaming()`.

    Returns:
      The cache and i32[max_seqs], the rows that dropped tokens, in that order, then `max_seqs`.

    Raises:
      ValueError, TypeError: there is no such policy, `target` is not from 0 to 1 (unless it is traced), or
        the cache's rows cannot drop tokens.

    Example:
      >>> import kvcache_jax as kv
      >>> sizes = dict(num_blocks=8, max_seqs=4, max_seq_len=64, extras=[kv.compression.Dropping()])
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], **sizes))
      >>> cache, _ = kv.allocate(cache, [0, 1], [1, 60])
      >>> cache, _ = kv.extend(cache, [1, 60, 0, 0], max_new=60)
      >>> streaming = kv.compression.Streaming(window=4, num_sink_tokens=2)
      >>> cache, rows = kv.compression.drop_to_utilization(cache, 0.5, streaming=streaming)
      >>> rows.tolist(), float(kv.utilization(cache))
      ([1, 4, 4, 4], 0.5)
    """
    row_policies.find(policy)
    streaming = Streaming() if streaming is None else streaming
    require_streaming("drop_to_utilization", streaming, cache.config)
    target = arguments.fraction("target", target)
    control, rows = _drop(cache.control, target, policy=policy, streaming=streaming, config=cache.config)
    return dataclasses.replace(cache, control=control), rows


@functools.partial(jax.jit, static_argnames=("policy", "streaming", "config"))
def _drop(
    control: Control, target: jax.Array, policy: str, streaming: Streaming, config: CacheConfig
) -> tuple[Control, jax.Array]:
    def next_row(control: Control) -> tuple[jax.Array, jax.Array, jax.Array]:
        num_freed, start, length = _droppable(control, target, streaming, config)
        row = rows_in_order(control, num_freed, policy)[:1]
        return row, get_at(start, row, 0), get_at(length, row, 0)

    def drop_of(control: Control, row: jax.Array, start: jax.Array, length: jax.Array) -> Control:
        return drop_rows(control, row, start, length, config=config)[0]

    control, target = as_varied((control, target))
    return one_by_one(control, next_row, drop_of)


def _droppable(
    control: Control, target: jax.Array, streaming: Streaming, config: CacheConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the tokens of each row that lie in whole blocks after its sinks, and as few of them as will do.

    Counts the blocks of groups above the target that become free if all of these tokens are dropped; then the
    first of them in the text; then how many to drop, up to the first block with which all groups are at the
    target, or all. All are i32[max_seqs].
    """
    assert control.holes is not None
    holes, unit = control.holes, config.drop_unit
    start = jnp.where(holes.is_plain, ceil_div(streaming.num_sink_tokens, unit) * unit, holes.start)
    first = quotient(start + unit - 1, unit)  # in units, like the following
    end = jnp.maximum(quotient(control.context_len - streaming.window, unit), first)
    num_units = ceil_div(config.max_seq_len, unit)
    units = jnp.arange(num_units, dtype=jnp.int32)[None]
    is_droppable = (units >= first[:, None]) & (units < end[:, None])
    # What such rows drop moves their sinks, which takes keys.
    is_droppable &= ~reads_rotated(control, jnp.arange(control.max_seqs, dtype=jnp.int32))[:, None]
    num_freed, is_enough = jnp.zeros_like(start), jnp.ones_like(is_droppable)
    is_above = groups_above(control, target)
    for g, group in config.row_groups.items():
        pool = control.block_pools[g]
        per_unit = unit // group.block_size
        is_own = block_pool.ref_counts(pool, pool.block_table) == 1
        is_own = jnp.pad(is_own, ((0, 0), (0, num_units * per_unit - pool.max_blocks_per_seq)))
        num_own = is_own.reshape(-1, num_units, per_unit).sum(axis=2, dtype=jnp.int32)
        freed = jnp.cumsum(jnp.where(is_droppable, num_own, 0), axis=1)
        num_freed += jnp.where(is_above[g], freed[:, -1], 0)
        is_enough &= block_pool.utilization(pool, freed) <= target
    end = jnp.minimum(jnp.where(is_enough.any(axis=1), first_true(is_enough) + 1, end), end) * unit
    start = jnp.maximum(start, holes.kept_until)
    return num_freed, start, jnp.maximum(end + holes.num_dropped - start, 0)
