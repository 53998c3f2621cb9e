"""Operations on the host's blocks: `prefetch`, `demote_to_utilization`, `host_stats` and `break_even`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import finite_number
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig, require_config
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations.allocate import Prompts, find_hits, hold_and_take, with_blocks
from kvcache_jax.operations.evict import evict
from kvcache_jax.operations.rows import on_rows
from kvcache_jax.tiers.hosted import require_tier
from kvcache_jax.tiers.move_blocks import kept_bytes


@takes_one
@jax.named_scope("kvcache.prefetch")
def prefetch(
    cache: Cache, tokens: ArrayLike, num_tokens: IntRows | None = None, namespace: ArrayLike | None = None
) -> tuple[Cache, jax.Array]:
    """Promotes cached prefixes of prompts from the host, before rows start from them.

    The blocks are cached on the device as if rows that held them had just ended. Cached blocks that are worth
    less are demoted for them; blocks of active rows stay. Of a prompt that has no room nothing is promoted.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Host(...)])`.
      tokens: i32[n, P], the prompts.
      num_tokens: i32[n], their lengths. Default: P.
      namespace: u32[4] or u32[n, 4]. Default: all zero.

    Returns:
      The cache and i32[n], tokens of each prompt that were promoted.

    Raises:
      ValueError, TypeError: a cache without blocks in host memory, or shapes or dtypes that do not fit.
    """
    require_tier("prefetch", cache)
    tokens = token_arguments.token_ids(tokens, None, None)
    num_rows, width = tokens.shape
    num_tokens = np.full(num_rows, width, np.int32) if num_tokens is None else num_tokens
    num_tokens = arguments.int_column("num_tokens", num_tokens, num_rows)
    namespaces = arguments.namespace_words(namespace, num_rows)
    # The place of `seq_ids`, which marks entries that are skipped.
    return on_rows(_prefetch, cache, np.zeros(num_rows, np.int32), num_tokens, tokens, namespaces)


def _prefetch(
    control: Control,
    entries: jax.Array,
    num_tokens: jax.Array,
    tokens: jax.Array,
    namespaces: jax.Array,
    *,
    config: CacheConfig,
) -> tuple[Control, jax.Array]:
    is_length = (entries == 0) & (num_tokens <= min(tokens.shape[1], config.max_seq_len))
    prompts = Prompts(num_tokens, namespaces, jnp.zeros_like(num_tokens), tokens, is_length, None)
    hits = find_hits(control, prompts, config).block_ids
    is_hosted = [ids > pool.num_blocks for ids, pool in zip(hits, control.block_pools, strict=True)]
    num_new = [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in is_hosted]
    control, ok = with_blocks(control, (jnp.stack(num_new) > 0).any(axis=0), hits, num_new)
    hits = [
        jnp.where(ok[:, None], ids, pool.num_blocks)
        for ids, pool in zip(hits, control.block_pools, strict=True)
    ]
    num_new = [jnp.where(ok, num_blocks, 0) for num_blocks in num_new]
    is_new = {g: is_hosted[g] & ok[:, None] for g in config.row_groups}
    rows = jnp.full_like(num_tokens, control.max_seqs)
    control, held = hold_and_take(control, rows, hits, num_new, is_new, config)
    # As rows that end do: the last block first.
    pools = tuple(
        block_pool.release(pool, held[g][:, ::-1]) if g in held else pool
        for g, pool in enumerate(control.block_pools)
    )
    indexed = config.groups[config.indexed_group]
    num_promoted = num_new[config.indexed_group] * indexed.block_size
    return dataclasses.replace(control, block_pools=pools), num_promoted


@takes_one
@jax.named_scope("kvcache.demote_to_utilization")
def demote_to_utilization(cache: Cache, target: ArrayLike) -> tuple[Cache, jax.Array]:
    """Demotes cached blocks until at most a share of the device's blocks holds rows or cached contents.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Host(...)])`.
      target: f32[], share of the blocks of the group that prefixes are found by, 0 to 1. Blocks of rows stay.

    Returns:
      The cache and i32[], the number of blocks that left the device.

    Raises:
      ValueError, TypeError: a cache without blocks in host memory, or `target` is not from 0 to 1 (unless it
        is traced).
    """
    require_tier("demote_to_utilization", cache)
    target = arguments.fraction("target", target)
    pool = cache.control.block_pools[cache.config.indexed_group]
    most = (target * pool.num_blocks + 1e-4).astype(np.int32)
    return evict(cache, jnp.maximum(pool.num_blocks - pool.num_free - most, 0))


@pytree_dataclass()
class HostStats:
    """Figures of the host's blocks, of the group that prefixes are found by.

    Attributes:
      num_cached: i32[], blocks on the host.
      num_demoted: u32[], blocks that came from the device since `init`.
      num_promoted: u32[], blocks of the device that got contents from the host.
      num_evicted: u32[], blocks of all layer groups that were forgotten for want of room on the host.
    """

    num_cached: jax.Array
    num_demoted: jax.Array
    num_promoted: jax.Array
    num_evicted: jax.Array


@takes_one
def host_stats(cache: Cache) -> HostStats:
    """Reads the figures of the host's blocks."""
    tier = require_tier("host_stats", cache)
    pool = tier.control.block_pools[cache.config.indexed_group]
    return HostStats(
        num_cached=block_pool.num_available(pool) - pool.num_free,
        num_demoted=tier.num_demoted,
        num_promoted=tier.num_promoted,
        num_evicted=tier.control.counters[Counter.EVICTIONS],
    )


def break_even(
    config: CacheConfig, *, bytes_per_second: float, tokens_per_second: float, latency: float = 1e-4
) -> int:
    """Computes how many tokens, at least, come from the host sooner than the model computes them.

    Args:
      config: The cache's.
      bytes_per_second: From host memory to the device, as measured.
      tokens_per_second: Of a prompt, as the model computes it.
      latency: Seconds before the first byte comes.

    Returns:
      Tokens, for `Host(break_even=)`; more than `max_seq_len` where computing is always as fast.

    Example:
      >>> import kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(8, 128)] * 32, dtype="bfloat16")
      >>> kv.tiers.break_even(config, bytes_per_second=25e9, tokens_per_second=10_000, latency=1e-3)
      11
      >>> kv.tiers.break_even(config, bytes_per_second=1e9, tokens_per_second=10_000)
      8193
    """
    require_config("break_even", config)
    speeds = {"bytes_per_second": bytes_per_second, "tokens_per_second": tokens_per_second}
    for name, speed in speeds.items():
        if finite_number(name, speed) <= 0:
            raise ValueError(f"{name} is {speed}, expected more than 0")
    groups = [group for group in config.row_groups.values() if group.span.keeps_all]
    token_bytes = sum(kept_bytes(group) / group.block_size for group in groups)
    gain = 1 / tokens_per_second - token_bytes / bytes_per_second
    if gain * config.max_seq_len <= finite_number("latency", latency):
        return config.max_seq_len + 1
    return math.ceil(latency / gain)
