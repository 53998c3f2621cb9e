"""The operation `compress`: keeps the tokens of rows with the highest scores, and releases other blocks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at, min_at, quotient, set_at
from kvcache_jax.arrays.sharding import as_varied, split_alone
from kvcache_jax.blocks import block_pool, storage
from kvcache_jax.blocks.moves import TokenMoves, move_tokens
from kvcache_jax.compression.dropping import reads_rotated, require_dropping
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.exchange import Exchange, carry_out, decide
from kvcache_jax.operations.rows import check_ids


@takes_one
@jax.named_scope("kvcache.compress")
def compress(
    cache: Cache, seq_ids: IntRows, scores: ArrayLike, num_keep: ArrayLike
) -> tuple[Cache, jax.Array]:
    """Keeps the tokens of rows with the highest scores, and releases the blocks of the others.

    The tokens kept move to the front of the row, in their order; new ones follow at the positions of the text
    as if nothing had happened. Nothing is attended to differently: a token that is kept has its position in
    its key. Scores may differ by layer and head, and so may the tokens kept, as many in each.

    Tokens move within blocks that the row alone holds. Where it has too few of them, for its blocks are
    shared or published, it takes others; no other row's blocks change. A row that was compressed publishes no
    more than its first blocks that stayed as they were. Scarce blocks are assigned in entry order, before any
    is released. Call it inside a donated jit: called eagerly it copies the pools.

    The gradient passes through the tokens kept, and the choice has none. Beside the pool's gradient it takes
    three copies of one layer of the pool.

    Args:
      cache: Not changed, unless donated; built with `CacheConfig(extras=[Dropping()])`.
      seq_ids: i32[n], active rows, each at most once.
      scores: f32[n, max_seq_len]; or `[n, layers, max_seq_len]`, or `[n, layers, heads, max_seq_len]`, of the
        layers `cache.config.own_layers` in this order. Of equal scores the earlier token's counts more; NaN
        counts least. Places without a token may have any score.
      num_keep: i32[n], tokens to keep; as many as the row shows change nothing. Where layers are in several
        groups also i32[n, layers], the same in all layers of a group.

    Returns:
      The cache and status i32[n]: BAD_LENGTH (below 1, beyond the row, or not the same within a group),
      OUT_OF_BLOCKS, SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError, TypeError: the cache has no `Dropping`, or shapes or dtypes do not fit.
      NotImplementedError: a layer has a window, whose distances need the position of every token.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> layers, sizes = [kv.FullAttention(1, 8)], dict(num_blocks=8, max_seqs=2, max_seq_len=64)
      >>> cache = kv.init(kv.CacheConfig(layers, extras=[kv.compression.Dropping()], **sizes))
      >>> cache, _ = kv.allocate(cache, [0], [60])
      >>> cache, _ = kv.extend(cache, [60, 0], max_new=60)
      >>> latest = jnp.arange(64.0)[None]
      >>> cache, status = kv.compression.compress(cache, [0], latest, [20])
      >>> status.tolist(), cache.context_len.tolist(), kv.stats(cache).num_blocks_free.tolist()
      ([0], [20, 0], 6)
      >>> kv.extend(cache, [1, 0], max_new=1)[1].positions.tolist()[0]
      [60]

    References:
      SnapKV (Li et al.; arXiv:2404.14469) and H2O (Zhang et al.; arXiv:2306.14048), for scores.
    """
    config = cache.config
    _require_compressible(config)
    seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_layers = len(config.own_layers)
    num_keep = arguments.saturated("num_keep", num_keep)
    if num_keep.shape not in ((seq_ids.shape[0],), (seq_ids.shape[0], num_layers)):
        raise ValueError(
            f"num_keep has shape {num_keep.shape}, expected ({seq_ids.shape[0]},), a number per row, or "
            f"({seq_ids.shape[0]}, {num_layers}), one per layer"
        )
    if num_keep.ndim == 2 and len(config.row_groups) == 1:
        raise ValueError(
            "num_keep has a number per layer, and the layers are one group, which share a row's places, "
            "expected one per row: give layers sizes of their own, such as num_blocks, and they form groups"
        )
    scores = _checked_scores(cache, scores, seq_ids.shape[0])
    return _compress(cache, seq_ids, scores, num_keep)


def _require_compressible(config: CacheConfig) -> None:
    require_dropping("compress", config)
    for group in config.row_groups.values():
        if not group.span.keeps_all:
            raise NotImplementedError(
                f"compress got {group.kind.label} layers, expected layers that keep all tokens: how far a "
                "window reaches depends on the positions of tokens, which differ by layer once some are gone"
            )


def _checked_scores(cache: Cache, scores: ArrayLike, num_rows: int) -> arguments.Array:
    """Returns the scores as they are, after a look at their shape."""
    config = cache.config
    scores = arguments.as_array("scores", scores)
    arguments.require_floats("scores", scores)
    *middle, width = scores.shape[1:] or [0]
    if scores.shape[:1] != (num_rows,) or width != config.max_seq_len or len(middle) > 2:
        raise ValueError(
            f"scores has shape {scores.shape}, expected ({num_rows}, {config.max_seq_len}), a score per "
            "token of each row, with layers, or layers and heads, between"
        )
    if middle and middle[0] != len(config.own_layers):
        raise ValueError(
            f"scores has shape {scores.shape} and {middle[0]} layers, expected {len(config.own_layers)}, "
            "those that store their row's tokens"
        )
    for group_id, group in config.row_groups.items() if len(middle) == 2 and cache.pools else ():
        for name, position in group.head_positions.items():
            num_heads = 1 if position is None else cache.pools[group_id].arrays[name].shape[position]
            if num_heads != middle[1]:
                raise ValueError(
                    f"scores has {middle[1]} heads, expected {num_heads}, as the array {name!r} of "
                    f"{group.kind.label} layers: leave the heads out, and all keep the same tokens"
                )
    return scores


class _Kept(NamedTuple):
    """The tokens that rows of one layer group keep."""

    sources: jax.Array  # as in `TokenMoves`
    first: jax.Array  # i32[n], first place with a token
    same_len: jax.Array  # i32[n], first tokens, which stay where they are, in all layers and heads


class _MovedColumns(NamedTuple):
    """The columns of rows of one layer group, `[n, C]`."""

    exchange: Exchange  # blocks that the row takes and releases
    reused: jax.Array  # i32, the row's own blocks that get moved tokens, in their new columns, or nowhere


class _CompressPlan(NamedTuple):
    """The rows of a call, and those that are compressed; dicts are by layer group."""

    status: jax.Array  # i32[n]
    rows: jax.Array  # i32[n], rows that are compressed, else nowhere
    new_len: jax.Array  # i32[n], places of the row afterwards
    same_len: jax.Array  # i32[n], first tokens, whose blocks stay as they are
    kept: dict[int, _Kept]
    columns: dict[int, _MovedColumns]


@jax.jit
def _compress(
    cache: Cache, seq_ids: jax.Array, scores: jax.Array, num_keep: jax.Array
) -> tuple[Cache, jax.Array]:
    config = cache.config
    control, (seq_ids, scores, num_keep) = as_varied((cache.control, (seq_ids, scores, num_keep)))
    scores = split_alone(scores, 0, None, scores)  # few numbers, of which every device ranks all
    plan = _plan(control, seq_ids, scores, num_keep, config)
    exchanges = {g: columns.exchange for g, columns in plan.columns.items()}
    control, new = carry_out(control, plan.rows, exchanges, config)
    cache = config.keeper.settle(dataclasses.replace(cache, control=control))
    control = cache.control
    is_row = (plan.rows < control.max_seqs)[:, None]
    for g, group in config.row_groups.items() if cache.pools else ():
        destination = jnp.where(is_row, jnp.minimum(plan.columns[g].reused, new[g]), group.num_blocks)
        moves = TokenMoves(plan.kept[g].sources, exchanges[g].entries, destination)
        cache = storage.with_pool(cache, g, move_tokens(cache.pools[g], group, moves))
    return dataclasses.replace(cache, control=_note(control, seq_ids, plan, config)), plan.status


def _plan(
    control: Control, seq_ids: jax.Array, scores: jax.Array, num_keep: jax.Array, config: CacheConfig
) -> _CompressPlan:
    """Decides which tokens rows keep, and which rows, in entry order, there are blocks for."""
    assert control.holes is not None
    holes, context_len = control.holes.of_rows(seq_ids), get_at(control.context_len, seq_ids, 0)
    groups, counts = config.row_groups, {}
    is_bad, is_same = jnp.zeros_like(seq_ids, bool), jnp.ones_like(seq_ids, bool)
    for g, group in groups.items():
        count, is_uneven = _counts_of(num_keep, group, config)
        num_shown = context_len - holes.num_hidden - holes.first[:, g]
        is_bad |= (count < max(group.span.num_sink_tokens, 1)) | (count > num_shown) | is_uneven
        is_same &= count == num_shown
        counts[g] = count
    is_bad |= reads_rotated(control, seq_ids) & ~is_same
    status = first_failure(
        *check_ids(control, seq_ids),
        (~get_at(control.is_active, seq_ids), Status.SEQ_NOT_ACTIVE),
        (is_bad, Status.BAD_LENGTH),
    )
    # A row that keeps all its tokens is left alone, and cannot fail for blocks.
    wants = (status == Status.OK) & ~is_same

    new_len, kept = jnp.max(jnp.stack([*counts.values()]), axis=0), {}
    for g, group in groups.items():
        of_group = _scores_of(scores, group, config)
        kept[g] = _keep(of_group, context_len, holes.of_group(g), counts[g], new_len, group)
    same_len = jnp.min(jnp.stack([of_group.same_len for of_group in kept.values()]), axis=0)
    same_len = quotient(same_len, config.drop_unit) * config.drop_unit
    lens = context_len, new_len, same_len
    columns = {
        g: _moved_columns_of(control.block_pools[g], group, seq_ids, kept[g].first, *lens)
        for g, group in groups.items()
    }
    needs = {g: of_group.exchange.need for g, of_group in columns.items()}
    ok, status = decide(control, needs, wants, status)
    return _CompressPlan(status, jnp.where(ok, seq_ids, control.max_seqs), new_len, same_len, kept, columns)


def _note(control: Control, seq_ids: jax.Array, plan: _CompressPlan, config: CacheConfig) -> Control:
    """Records the lengths of the rows, and which tokens are no prefix any more."""
    assert control.holes is not None
    holes, context_len = control.holes.of_rows(seq_ids), get_at(control.context_len, seq_ids, 0)
    prefix_len = jnp.where(holes.is_plain, plan.same_len, jnp.minimum(plan.same_len, holes.prefix_len))
    first = holes.first
    for g, kept in plan.kept.items():
        first = first.at[:, g].set(kept.first)
    new_holes = Holes(
        start=plan.new_len,
        num_hidden=jnp.zeros_like(plan.new_len),
        num_dropped=holes.num_dropped + context_len - plan.new_len,
        num_kept=plan.new_len - prefix_len,
        first=first,
    )
    num_plain = quotient(prefix_len, config.groups[config.indexed_group].block_size)
    control = dataclasses.replace(
        control,
        context_len=set_at(control.context_len, plan.rows, plan.new_len),
        num_published=min_at(control.num_published, plan.rows, num_plain),
        holes=control.holes.with_rows(plan.rows, new_holes),
    )
    return config.hooks.move(control, plan.rows, prefix_len)


def _counts_of(num_keep: jax.Array, group: LayerGroup, config: CacheConfig) -> tuple[jax.Array, jax.Array]:
    """Reads how many tokens a group keeps, i32[n], and in which rows its layers differ, bool[n]."""
    if num_keep.ndim == 1:
        return num_keep, jnp.zeros_like(num_keep, bool)
    of_layers = num_keep[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    return of_layers[:, 0], (of_layers != of_layers[:, :1]).any(axis=1)


def _scores_of(scores: jax.Array, group: LayerGroup, config: CacheConfig) -> jax.Array:
    """Reads a group's scores, `[n, layers, heads, max_seq_len]`, 1 layer or head where they are all's."""
    if scores.ndim > 2:
        scores = scores[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    num_middle = scores.ndim - 2
    shape = scores.shape[0], *scores.shape[1:-1], *[1] * (2 - num_middle), scores.shape[-1]
    return scores.reshape(shape)


def _keep(
    scores: jax.Array,
    context_len: jax.Array,
    holes: Holes,
    num_keep: jax.Array,
    new_len: jax.Array,
    group: LayerGroup,
) -> _Kept:
    """Chooses the tokens that rows keep in a layer group, the last of them at place `new_len - 1`.

    `scores` is f32[n, layers, heads, max_seq_len], `holes` of the rows and the group, all else i32[n].
    """
    shape, width = scores.shape, group.max_blocks_per_seq * group.block_size
    num_keep, first = num_keep[:, None, None, None], new_len - num_keep
    places = lax.broadcasted_iota(jnp.int32, shape, 3)
    row_places = places[:, 0, 0]
    is_shown = (row_places < context_len[:, None]) & ~holes.is_hidden(row_places)
    scores = jnp.where(places < group.span.num_sink_tokens, jnp.inf, scores)
    is_less = jnp.broadcast_to(~is_shown[:, None, None], shape).astype(jnp.int32)
    # Visible tokens first, then by score, then by place; NaN sorts after all numbers, so it is kept last.
    *_, best = lax.sort((is_less, -scores, places), num_keys=3)
    chosen = jnp.sort(jnp.where(places < num_keep, best, width), axis=-1)  # `places` are ranks here

    target = lax.broadcasted_iota(jnp.int32, (*shape[:3], width), 3)
    nth = target - first[:, None, None, None]
    is_kept = (nth >= 0) & (nth < num_keep)
    found = jnp.take_along_axis(chosen, jnp.clip(nth, 0, shape[3] - 1), axis=-1)
    sources = jnp.where(is_kept, found, width)
    # _Kept places ascend, so the tokens that stay in their places are the first ones.
    same_len = jnp.min(jnp.sum(sources == target, axis=-1, dtype=jnp.int32), axis=(1, 2))
    return _Kept(sources, first, jnp.where(first + holes.first == 0, same_len, 0))


def _moved_columns_of(
    pool: BlockPool,
    group: LayerGroup,
    seq_ids: jax.Array,
    first: jax.Array,
    context_len: jax.Array,
    new_len: jax.Array,
    same_len: jax.Array,
) -> _MovedColumns:
    """Finds the columns of rows i32[n] that are written, and the blocks that may be.

    The blocks of the first `same_len` of `context_len` tokens stay; afterwards the row has `new_len` places,
    with tokens from `first` on; i32[n] all.
    """
    entries = get_at(pool.block_table, seq_ids, pool.num_blocks)
    num_before, num_after = group.num_columns(context_len), group.num_columns(new_len)
    columns, order = (lax.broadcasted_iota(jnp.int32, entries.shape, axis) for axis in (1, 0))
    num_same = quotient(same_len, group.block_size)
    first_written = jnp.maximum(num_same, quotient(first, group.block_size))
    num_same, num_before, num_after = (x[:, None] for x in (num_same, num_before, num_after))
    is_replaced = (columns >= num_same) & (columns < num_before)
    is_own = (block_pool.ref_counts(pool, entries) == 1) & ~block_pool.is_published(pool, entries)
    is_own &= is_replaced
    is_written = (columns >= first_written[:, None]) & (columns < num_after)

    nowhere, nth_own, nth_written = pool.num_blocks, _ranked(is_own), _ranked(is_written)
    own = set_at(jnp.full_like(entries, nowhere), (order, nth_own), entries)  # one after the other
    reused = jnp.where(is_written, get_at(own, (order, nth_written), nowhere), nowhere)
    num_written = jnp.sum(is_written, axis=1, dtype=jnp.int32)[:, None]
    # Blocks reserved after the tokens stay the row's.
    reserved = get_at(entries, (order, columns + num_before - num_after), nowhere)

    def table(new: jax.Array) -> jax.Array:
        written = jnp.where(columns < num_after, jnp.minimum(reused, new), reserved)
        return jnp.where(columns < num_same, entries, written)

    exchange = Exchange(
        entries,
        is_taken=is_written & (reused == nowhere),
        is_released=is_replaced & ~(is_own & (nth_own < num_written)),
        table=table,
    )
    return _MovedColumns(exchange, reused)


def _ranked(mask: jax.Array) -> jax.Array:
    """Counts the true entries before each true one in its row, i32 like `mask`; past the end for others."""
    before = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    return jnp.where(mask, before, mask.shape[1])
