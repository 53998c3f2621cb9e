"""The operations: pure functions from a cache to a new cache and what came of it.

Row operations take `seq_ids i32[n]`; `seq_id == max_seqs` skips the entry. n rows mean n successive
one-row calls, in order (but for the choice of what is evicted, see `extend`). A row that fails is exactly
as it was and its status says why.

Operations that move no keys or values (`allocate`, `fork`, `free`, `truncate`, `reorder`, the row
edits) are jitted over the control state and hand the pools on by reference. `extend`, `write`,
`append` and `attention` update pools: call them inside a function wrapped by `donate`. Called
eagerly, they copy the pools.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax import admission, arguments, attention_kernels, rows, storage
from kvcache_jax.arguments import IntRows, Layer
from kvcache_jax.cache_form import is_traced, takes_one
from kvcache_jax.config import CacheConfig
from kvcache_jax.extend import extend_control, record_tokens
from kvcache_jax.indexing import get_at
from kvcache_jax.new_tokens import packed_tokens, padded_tokens
from kvcache_jax.single_kernel import one_control_kernel
from kvcache_jax.state import Admission, Cache, Control, Step
from kvcache_jax.static_numbers import static_count


def donate(fn: Callable) -> Callable:
    """`jax.jit` that donates the first argument, the cache: its pools are updated in place.

    The cache passed in is gone afterwards; keep a `fork` of a row to be able to come back to it.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=32))
      >>> cache, _ = kv.allocate(cache, [0], [5])
      >>> step_fn = kv.donate(lambda cache, num_new: kv.extend(cache, num_new, max_new=5))
      >>> cache, step = step_fn(cache, jnp.array([5, 0]))
      >>> cache.context_len.tolist()
      [5, 0]
    """
    return jax.jit(fn, donate_argnums=0)


@takes_one
@jax.named_scope("kvcache.allocate")
def allocate(
    cache: Cache,
    seq_ids: IntRows,
    num_tokens: IntRows,
    *,
    tokens: ArrayLike | None = None,
    namespace: ArrayLike | None = None,
    priority: IntRows | None = None,
    reuse: ArrayLike = True,
    items: ArrayLike | None = None,
) -> tuple[Cache, Admission]:
    """Starts rows and reserves the blocks of their whole prompts.

    `extend` uses the reserved blocks first. A window group reserves no more than a row may hold.
    `context_len` is then `num_cached`; nothing is written yet.

    Args:
      cache: Not changed.
      seq_ids: i32[n], idle rows.
      num_tokens: i32[n], prompt lengths; 0 starts an empty row.
      tokens: i32[n, P], the prompts, `P` at least the longest; required with prefix caching, else unused.
      namespace: u32[4] or u32[n, 4], who may share the rows' blocks. Default: all zero.
      priority: i32[n], for eviction policies. Default: 0.
      reuse: bool[] or bool[n], look for cached prefixes; without prefix caching there are none.
      items: i32[n, I, 2], first position and end of each multimodal item (see `item_tokens`), equal ones
        where a row has fewer: an item is reused whole or not at all.

    Returns:
      The cache and an `Admission` with `status` (SEQ_IN_USE, TOO_LONG, BAD_LENGTH, OUT_OF_BLOCKS,
      SKIPPED, BAD_SEQ_ID) and `num_cached`. A row that fails takes nothing; smaller rows behind it
      may still succeed.

    Raises:
      ValueError, TypeError: no `tokens` with prefix caching, or shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, admission = kv.allocate(cache, [0, 1], [40, 20])
      >>> [kv.Status(s).name for s in admission.status.tolist()]
      ['OK', 'OUT_OF_BLOCKS']
    """
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = seq_ids.shape[0]
    num_tokens = arguments.int_column("num_tokens", num_tokens, num_rows)
    arguments.require_tokens("allocate", tokens, cache)
    tokens = None if tokens is None else arguments.token_ids(tokens, num_rows, None)
    items = arguments.item_spans(items, num_rows)
    if cache.control.prefix_index is None:  # prompts of any width are one program
        tokens, items = None, None
    priority = np.zeros(num_rows, np.int32) if priority is None else arguments.priorities(priority, num_rows)
    prompts: dict[str, Any] = {
        "num_tokens": num_tokens,
        "namespace": arguments.namespace_words(namespace, num_rows),
        "priority": priority,
        "tokens": tokens,
        "reuse": arguments.flags("reuse", reuse, num_rows),
        "items": items,
    }
    return _on_rows(admission.allocate_row, cache, seq_ids, admission.Prompt(**prompts))


@takes_one
@jax.named_scope("kvcache.extend")
def extend(
    cache: Cache,
    num_new: IntRows,
    *,
    max_new: int | None = None,
    num_tokens: int | None = None,
    seq_ids: IntRows | None = None,
    tokens: ArrayLike | None = None,
) -> tuple[Cache, Step]:
    """Reserves slots for the next tokens of each row, copying first a last block that is shared or published.

    Blocks reserved by `allocate` are used first; blocks that left a window go back: those of all rows of the
    call that grow before any of them takes one, so that other cached blocks may be evicted than by one-row
    calls. Call it inside a donated jit: called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated.
      num_new: i32[n], new tokens per row; 0 leaves the row alone, even an idle one.
      max_new: Width of padded token arrays, `[n, max_new]`.
      num_tokens: In place of `max_new`: length of packed token arrays, `[num_tokens]`, in which rows
        lie end to end in the order of `seq_ids`.
      seq_ids: i32[n]. Default: all rows, n = max_seqs.
      tokens: i32[n, max_new] or i32[num_tokens]; required with prefix caching, else unused.

    Returns:
      The cache and a `Step`. `status`: OUT_OF_BLOCKS, TOO_LONG, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID,
      BAD_LENGTH, BAD_SEQ_ID, SKIPPED; such a row has `query_len` 0.

    Raises:
      ValueError, TypeError: both or none of `max_new` and `num_tokens`, no `tokens` with prefix caching, or
        shapes or dtypes that do not fit.

    Example:
      >>> import jax, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [1], [3])
      >>> cache, step = kv.extend(cache, [0, 3], max_new=4)
      >>> step.slots[0].tolist()  # 64 = 4 blocks * 16 tokens is nowhere
      [[64, 64, 64, 64], [0, 1, 2, 64]]
    """
    if (max_new is None) == (num_tokens is None):
        raise ValueError(
            f"got max_new={max_new} and num_tokens={num_tokens}, expected one: padded or packed tokens"
        )
    limit = cache.config.query_len_limit
    if max_new is not None:
        max_new = static_count("max_new", max_new, most=limit, most_name="max_query_len")
    if seq_ids is not None:
        seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = cache.max_seqs if seq_ids is None else seq_ids.shape[0]
    if num_tokens is not None:
        most = (2**31 - 1) // max(num_rows, 1) - 1  # what all rows ask for is added up
        num_tokens = static_count("num_tokens", num_tokens, most=most, most_name="2**31 over the rows")
    num_new = arguments.int_column("num_new", num_new, num_rows)
    arguments.require_tokens("extend", tokens, cache)
    if tokens is not None:
        tokens = arguments.token_ids(tokens, *((num_rows, max_new) if num_tokens is None else (num_tokens,)))
    if cache.control.prefix_index is None:
        tokens = None
    return _extend(cache, seq_ids, num_new, tokens, max_new=max_new, num_tokens=num_tokens)


@functools.partial(jax.jit, static_argnames=("max_new", "num_tokens"))
def _extend(
    cache: Cache,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: jax.Array | None,
    max_new: int | None,
    num_tokens: int | None,
) -> tuple[Cache, Step]:
    config = cache.config  # `reserve` outlives the trace: see `single_kernel`.

    def reserve(control, seq_ids, num_new, tokens):
        if num_tokens is not None:
            new_tokens, limit = packed_tokens(num_new, num_tokens), num_tokens
        else:
            assert max_new is not None
            new_tokens, limit = padded_tokens(num_new.shape[0], max_new), max_new
        limit = min(limit, config.query_len_limit)
        control, step, copies = extend_control(control, seq_ids, num_new, new_tokens, limit, config)
        if tokens is not None:
            control = record_tokens(control, tokens, step, copies, config)
        return control, step, copies

    control, step, copies = one_control_kernel(reserve, cache.control, seq_ids, num_new, tokens)
    pools = cache.pools
    if pools:
        step = attention_kernels.with_work(step, config, pools, control.block_pools)
        pools = tuple(
            storage.copy_blocks(pool, copied, block_pool.num_blocks, config)
            for pool, copied, block_pool in zip(pools, copies, control.block_pools, strict=True)
        )
    return dataclasses.replace(cache, control=control, pools=pools), step


@takes_one
@jax.named_scope("kvcache.write")
def write(cache: Cache, layer: Layer, k: jax.Array, v: jax.Array, step: Step) -> Cache:
    """Stores the step's keys and values of one layer in the slots that `extend` reserved.

    Args:
      cache: Not changed, unless donated.
      layer: As in `attention`.
      k: `[n, max_new, num_kv_heads, head_dim]`, or `[num_tokens, ...]` for a packed step; cast to the
        cache's dtype.
      v: Likewise.
      step: From `extend`.

    Returns:
      The cache. Padding and failed rows are written nowhere.

    Raises:
      ValueError, TypeError: the layer, shapes or dtypes do not fit.
    """
    group_id, index = arguments.locate_layer(cache.config, layer)
    pool = arguments.pool_of(cache, group_id)
    arguments.check_keys_values(cache, pool, k, v, step)
    k, v = arguments.owned((k, v))
    num_blocks = cache.control.block_pools[group_id].num_blocks
    return storage.with_pool(
        cache, group_id, storage.store_tokens(pool, index, k, v, step.slots[group_id], num_blocks)
    )


@takes_one
@jax.named_scope("kvcache.append")
def append(
    cache: Cache,
    k: jax.Array | Sequence[jax.Array],
    v: jax.Array | Sequence[jax.Array],
    num_new: IntRows,
    *,
    seq_ids: IntRows | None = None,
    tokens: ArrayLike | None = None,
) -> tuple[Cache, Step]:
    """`extend`, then `write` of all layers.

    Args:
      cache: Not changed, unless donated.
      k: `[num_layers, n, T, num_kv_heads, head_dim]`; or a sequence, one array per layer.
      v: Likewise.
      num_new: i32[n], new tokens per row, at most T.
      seq_ids: i32[n]. Default: all rows.
      tokens: i32[n, T], for prefix caching.

    Returns:
      The cache and the `Step` of `extend`.

    Raises:
      ValueError, TypeError: no `tokens` with prefix caching, or the layers, shapes or dtypes do not fit.
    """
    num_layers = cache.config.num_layers
    arguments.check_layers("k", k, num_layers)
    arguments.check_layers("v", v, num_layers)
    max_new = k[0].shape[1] if isinstance(k, Sequence) else k.shape[2]
    cache, step = extend(cache, num_new, max_new=max_new, seq_ids=seq_ids, tokens=tokens)
    return _write_all(cache, *arguments.owned((k, v)), step), step


@functools.partial(jax.jit, inline=True)
def _write_all(cache: Cache, k: Any, v: Any, step: Step) -> Cache:
    for layer in range(cache.config.num_layers):
        cache = write(cache, layer, k[layer], v[layer], step)
    return cache


@takes_one
@jax.named_scope("kvcache.fork")
def fork(cache: Cache, src_ids: IntRows, dst_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Starts rows that share all tokens of other rows; takes no block and copies nothing.

    Write the source's tokens before. Blocks that it reserved and has not filled stay with it. The first write
    into a shared last block copies it (see `extend`).

    Args:
      cache: Not changed.
      src_ids: i32[n], active rows.
      dst_ids: i32[n], idle rows.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE (source), SEQ_IN_USE (destination), SKIPPED, BAD_SEQ_ID.

    Example:
      >>> import kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, status = kv.fork(cache, [0, 0], [1, 0])
      >>> [kv.Status(s).name for s in status.tolist()]
      ['OK', 'SEQ_IN_USE']
    """
    src_ids = arguments.int_column("src_ids", src_ids)
    dst_ids = arguments.int_column("dst_ids", dst_ids, src_ids.shape[0])
    return _on_rows(rows.fork_row, cache, src_ids, dst_ids)


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
    return _on_rows(rows.truncate_row, cache, seq_ids, new_len)


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
    return _on_rows(rows.free_row, cache, arguments.int_column("seq_ids", seq_ids))


@takes_one
@jax.named_scope("kvcache.touch")
def touch(cache: Cache, seq_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Marks rows as just used. Returns the cache and status i32[n]: SEQ_NOT_ACTIVE, SKIPPED, BAD_SEQ_ID."""
    return _on_rows(rows.touch_row, cache, arguments.int_column("seq_ids", seq_ids))


@takes_one
@jax.named_scope("kvcache.set_priority")
def set_priority(cache: Cache, seq_ids: IntRows, priority: IntRows) -> tuple[Cache, jax.Array]:
    """Sets rows' priority, i32[n]. Returns the cache and status i32[n], as `touch`."""
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    priority = arguments.priorities(priority, seq_ids.shape[0])
    return _on_rows(rows.set_priority_row, cache, seq_ids, priority)


@takes_one
@jax.named_scope("kvcache.gather")
def gather(cache: Cache, seq_id: ArrayLike, layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's keys and values as contiguous arrays.

    Args:
      cache: Not changed.
      seq_id: i32[], a row.
      layer: As in `attention`.

    Returns:
      `(k, v, length)`: `[max_seq_len, num_kv_heads, head_dim]` twice and i32[]. Zero past the length
      and, in a window group, where tokens were given back; length 0 for idle rows, and for ids and
      traced layers out of range.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [3])
      >>> cache, _ = kv.append(cache, jnp.ones((1, 2, 3, 1, 8)), jnp.ones((1, 2, 3, 1, 8)), [3, 0])
      >>> k, v, length = kv.gather(cache, 0, layer=0)
      >>> k.shape, int(length), float(k.sum())
      ((64, 1, 8), 3, 24.0)
    """
    group_id, index = arguments.locate_layer(cache.config, layer)
    pool = arguments.pool_of(cache, group_id)
    seq_id = arguments.int_scalar("seq_id", seq_id)
    return _gather(
        pool, cache.control, seq_id, index, group_id=group_id, max_seq_len=cache.config.max_seq_len
    )


@functools.partial(jax.jit, static_argnames=("group_id", "max_seq_len"))
def _gather(
    pool: Any, control: Control, seq_id: jax.Array, index: jax.Array, group_id: int, max_seq_len: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    block_pool = control.block_pools[group_id]
    is_layer = index < pool.k.shape[0] // block_pool.num_blocks
    length = jnp.where(is_layer, get_at(control.context_len, seq_id, 0), 0)
    ids = get_at(block_pool.block_table, seq_id)
    block = storage.block_rows(ids, index, block_pool.num_blocks, pool.k.shape[0])
    k, v = storage.load_row(pool, block, length, max_seq_len)
    return k, v, length


def _on_rows(operation: Callable, cache: Cache, *columns: Any) -> tuple[Cache, Any]:
    """A one-row operation of `rows` for all rows of `columns`, ids first; the pools are handed on."""
    num_rows = columns[0].shape[0]
    num_more = 0
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(columns)) and not is_traced(cache):
        # One program for lists of five to eight rows, and so on.
        num_more = (1 << (num_rows - 1).bit_length()) - num_rows
        columns = _padded(columns, num_more, cache.max_seqs)
    control, result = _each_row(cache.control, *columns, operation=operation, config=cache.config)
    if num_more:
        result = _first_rows(result, num_rows)
    return dataclasses.replace(cache, control=control), result


def _padded(columns: tuple[Any, ...], num_more: int, nobody: int) -> tuple[Any, ...]:
    """The columns, all of them in numpy, with `num_more` entries that are skipped."""

    def padded(column: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.pad(column, [(0, num_more)] + [(0, 0)] * (column.ndim - 1), constant_values=fill)

    return padded(columns[0], nobody), *jax.tree.map(padded, columns[1:])


@functools.partial(jax.jit, static_argnames="num_rows")
def _first_rows(result: Any, num_rows: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:num_rows], result)


@functools.partial(jax.jit, static_argnames=("operation", "config"))
def _each_row(
    control: Control, *columns: Any, operation: Callable, config: CacheConfig
) -> tuple[Control, Any]:
    one_row = functools.partial(operation, config=config)
    return one_control_kernel(functools.partial(rows.each_row, one_row), control, *columns)


@functools.partial(jax.jit, static_argnames="config")
def _reorder(control: Control, *columns: jax.Array, config: CacheConfig) -> tuple[Control, jax.Array]:
    return one_control_kernel(functools.partial(rows.reorder_rows, config=config), control, *columns)
