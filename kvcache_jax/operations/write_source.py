"""The operation `write_source`: stores the sources that cross-attention layers of rows read."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder, set_at
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows, Place
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import decide
from kvcache_jax.operations.rows import check_ids


@takes_one
@jax.named_scope("kvcache.write_source")
def write_source(
    cache: Cache,
    seq_ids: IntRows,
    k: jax.Array | Sequence[jax.Array],
    v: jax.Array | Sequence[jax.Array] | None,
    source_len: IntRows,
) -> tuple[Cache, jax.Array]:
    """Stores the sources that cross-attention layers of rows read, and takes their blocks.

    Write a row's source before the `extend` of its first step: the step's plan knows the source's length.
    Forks share it, `reorder` moves it along, `truncate` leaves it, and `free` ends it; it is never copied.
    Scarce blocks are assigned in entry order, and a smaller source may be stored after a larger one failed.
    Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated.
      seq_ids: i32[n], active rows without a source.
      k: `[num_source_layers, n, S, num_kv_heads, head_dim]`; or a sequence, one array per layer. Of the
        layers `cache.config.source_layers`, in this order.
      v: Values, shaped like `k`; None if no layer takes values.
      source_len: i32[n], tokens of each source, at most `S`; 0 stores none.

    Returns:
      The cache and status i32[n]: OUT_OF_BLOCKS, TOO_LONG (more than `max_source_len`), BAD_LENGTH (negative,
      or more than `S`), HAS_SOURCE, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: no layer reads sources, or layers, shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> layers = [kv.FullAttention(1, 8), kv.CrossAttention(1, 8, max_source_len=20)]
      >>> cache, _ = kv.allocate(kv.init(kv.CacheConfig(layers, max_seqs=2)), [0, 1], [3, 3])
      >>> k = jnp.ones((1, 2, 24, 1, 8))
      >>> cache, status = kv.write_source(cache, [0, 1], k, k, [18, 24])
      >>> [kv.Status(s).name for s in status.tolist()], kv.gather(cache, 0, layer=1)[2].item()
      (['OK', 'TOO_LONG'], 18)
    """
    config = cache.config
    if not config.source_layers:
        raise ValueError("write_source got a cache without layers that read sources, expected CrossAttention")
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    source_len = arguments.int_column("source_len", source_len, seq_ids.shape[0])
    new, tokens = [], None
    for name, values in {"k": k, "v": v}.items():
        if values is not None:
            arguments.check_layers(name, values, len(config.source_layers))
    for i, layer in enumerate(config.source_layers):
        group_id, index = arguments.locate_layer(config, layer)
        place = Place(group_id, index, arguments.pool_of(cache, group_id))
        tokens = tokens or (seq_ids.shape[0], k[i].shape[1])
        given = {"k": k[i], "v": None if v is None else v[i]}
        new.append(arguments.layer_inputs(cache, place, given, tokens))
    return _write_source(cache, seq_ids, source_len, new)


@jax.jit
def _write_source(
    cache: Cache, seq_ids: jax.Array, source_len: jax.Array, new: list[dict[str, jax.Array]]
) -> tuple[Cache, jax.Array]:
    config = cache.config
    control, (seq_ids, source_len) = as_varied((cache.control, (seq_ids, source_len)))
    width = next(iter(new[0].values())).shape[1]
    control, slots, status = _take(control, seq_ids, source_len, width, config)
    cache = dataclasses.replace(cache, control=control)
    for layer, inputs in zip(config.source_layers, new, strict=True):
        g, index = config.locate(layer)
        pool = storage.store_tokens(cache.pools[g], index, inputs, slots[g], config, g)
        cache = storage.with_pool(cache, g, pool)
    return cache, status


def _take(
    control: Control, seq_ids: jax.Array, source_len: jax.Array, width: int, config: CacheConfig
) -> tuple[Control, dict[int, jax.Array], jax.Array]:
    """Takes the blocks of sources; returns their slots i32[n, width] by layer group, and status i32[n]."""
    assert control.source_len is not None
    groups = {g: group for g, group in enumerate(config.groups) if group.holds_sources}
    status = first_failure(
        *check_ids(control, seq_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (get_at(control.source_len, seq_ids, 0) > 0, Status.HAS_SOURCE),
        (source_len < 0, Status.BAD_LENGTH),
        (source_len > min(group.max_len for group in groups.values()), Status.TOO_LONG),
        (source_len > width, Status.BAD_LENGTH),
    )
    wants = status == Status.OK
    needs = {g: group.num_columns(source_len) for g, group in groups.items()}
    ok, status = decide(control, needs, wants, status)
    rows, length = jnp.where(ok, seq_ids, control.max_seqs), jnp.where(ok, source_len, 0)
    pools, slots = list(control.block_pools), {}
    for g, group in groups.items():
        pools[g], slots[g] = _take_group(pools[g], group, rows, length, width)
    control = dataclasses.replace(
        control, source_len=set_at(control.source_len, rows, length), block_pools=tuple(pools)
    )
    return control, slots, status


def _take_group(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, length: jax.Array, width: int
) -> tuple[BlockPool, jax.Array]:
    """Takes the blocks of one group; returns also the slots i32[n, width], nowhere past the lengths."""
    columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
    pool, ids = block_pool.take(pool, columns < group.num_columns(length)[:, None])
    pool = dataclasses.replace(pool, block_table=set_at(pool.block_table, rows, ids))
    position = jnp.arange(width, dtype=jnp.int32)
    blocks = ids.at[:, quotient(position, group.block_size)].get(mode="fill", fill_value=pool.num_blocks)
    slots = blocks * group.block_size + remainder(position, group.block_size)[None]
    return pool, jnp.where(position[None] < length[:, None], slots, pool.num_blocks * group.block_size)
