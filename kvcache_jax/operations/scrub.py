"""The operation `scrub`: ends rows and overwrites their own blocks with zeros."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.derivatives import reverse_mode_only
from kvcache_jax.arrays.masked_updates import common_bound, get_at, max_at, num_true, rank_true
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import storage
from kvcache_jax.blocks.split_blocks import require_whole
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control, KVPool, row_len
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.free import free_rows
from kvcache_jax.prefix import eviction


@takes_one
@jax.named_scope("kvcache.scrub")
def scrub(
    cache: Cache, seq_ids: IntRows | None = None, *, namespace: ArrayLike | None = None
) -> tuple[Cache, jax.Array]:
    """Ends rows and overwrites their own blocks with zeros: keys, values and recorded tokens.

    With `seq_ids`: the blocks that these rows hold and no other row does, published or not, and the cached
    blocks that continue them. Blocks that another row or an extra holds stay as they are, findable if they
    were.

    With `namespace`: all its rows end, and all blocks that they hold, that extras keep of it or that are
    cached in it are overwritten. A free block does not know whose it was, nor does the part of a block after
    a row's last token: so every free block, every reserved one and the empty rest of last blocks is
    overwritten too.
    Nothing of the namespace is left in the pools, nor of its tokens in the index. Blocks that rows of
    other namespaces hold, or that are cached in them, are not touched.

    Overwritten blocks are free, except those that other rows have reserved. Call it inside a donated jit:
    called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated.
      seq_ids: i32[n], rows; those that are not active own nothing. Give this or `namespace`.
      namespace: u32[4].

    Returns:
      The cache and i32[], how many blocks were overwritten, all groups.

    Raises:
      ValueError, TypeError: both or none of `seq_ids` and `namespace`, or other values than theirs.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=64))
      >>> cache, _ = kv.allocate(cache, [0], [20])
      >>> cache, num_blocks = kv.donate(kv.scrub)(cache, jnp.array([0]))
      >>> int(num_blocks), cache.is_active.tolist()
      (2, [False, False])
    """
    if (seq_ids is None) == (namespace is None):
        raise ValueError("scrub got both or none of seq_ids and namespace, expected one of them")
    cache = cache.config.keeper.settle(cache)
    if seq_ids is not None:
        return _scrub(cache, arguments.int_column("seq_ids", seq_ids), None)
    return _scrub(cache, None, arguments.namespace_words(namespace, 1)[0])


@jax.jit
def _scrub(cache: Cache, seq_ids: jax.Array | None, words: jax.Array | None) -> tuple[Cache, jax.Array]:
    """Scrubs rows i32[n] or a namespace u32[4]."""
    cache, seq_ids, words = as_varied((cache, seq_ids, words))
    control = cache.control
    if seq_ids is not None:
        named = jnp.where(seq_ids < 0, control.max_seqs, seq_ids)
        is_row = jnp.zeros_like(control.is_active).at[named].set(True, mode="drop") & control.is_active
    else:
        assert words is not None
        is_row = (control.namespace == words[None]).all(axis=-1) & control.is_active
    masks = _blocks_of_rows(cache, is_row) if words is None else _blocks_not_of_others(cache, is_row, words)
    cache = cache.config.keeper.scrub(cache, masks, words)
    control = cache.control
    if words is not None:
        control = cache.config.hooks.forget_namespace(control, words)
    control = _unpublish(_end_rows(control, is_row, cache.config), masks, cache.config)
    if words is not None:
        control = _forget_rests(control, cache.config)
    pools = []
    for g, pool in enumerate(cache.pools):
        rests = None if words is None else _rests(control, g, cache.config)
        require_whole("scrub", pool, cache.config.groups[g])
        pool = reverse_mode_only("scrubbed pools", pool)
        pools.append(_overwrite(cache.config.groups[g], pool, masks[g], rests))
    num_blocks = sum((num_true(mask) for mask in masks), start=jnp.int32(0))
    return dataclasses.replace(cache, control=control, pools=tuple(pools)), num_blocks


def _blocks_of_rows(cache: Cache, is_row: jax.Array) -> list[jax.Array]:
    """Masks per group blocks of these rows alone, and cached blocks after them; bool[num_blocks]."""
    index, masks = cache.control.prefix_index, []
    for g, pool in enumerate(cache.control.block_pools):
        held = cache.config.hooks.blocks_of_rows(cache.control, g)
        entries = jnp.where(is_row[:, None], held, pool.num_blocks)
        num_refs = jnp.zeros_like(pool.ref_count).at[entries].add(1, mode="drop")
        masks.append((num_refs > 0) & (num_refs == pool.ref_count))
    if index is None:
        return masks
    group_id = cache.config.indexed_group

    def is_cached(g: int) -> jax.Array:
        pool = cache.control.block_pools[g]
        assert pool.cached is not None
        return pool.cached.is_published & (pool.ref_count == 0)

    # Children of scrubbed blocks are scrubbed too: without their parent they are never found.
    def grow(state):
        mask, _ = state
        behind = is_cached(group_id) & ~mask & get_at(mask, index.parent, False)
        return mask | behind, behind.any()

    mask = masks[group_id]
    mask, _ = lax.while_loop(lambda state: state[1], grow, (mask, mask.any()))
    for g, links in enumerate(index.group_links):
        if links is None:
            masks[g] = mask
        else:
            masks[g] |= is_cached(g) & get_at(mask, links.indexed_ids, False)
    return masks


def _blocks_not_of_others(cache: Cache, is_row: jax.Array, words: jax.Array) -> list[jax.Array]:
    """Masks per group the blocks without tokens of other namespaces, in rows or cached; bool[num_blocks]."""
    control, index, masks = cache.control, cache.control.prefix_index, []
    is_other = control.is_active & ~is_row
    for g, (pool, group) in enumerate(zip(control.block_pools, cache.config.groups, strict=True)):
        columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)[None]
        length = row_len(control, group.kind)
        is_filled = is_other[:, None] & (columns * group.block_size < length[:, None])
        kept = jnp.where(is_filled, pool.block_table, pool.num_blocks)
        is_kept = jnp.zeros(pool.num_blocks, bool).at[kept].set(True, mode="drop")
        if index is not None and pool.cached is not None:
            namespace, links = index.namespace, index.group_links[g]
            if links is not None:
                namespace = get_at(namespace, links.indexed_ids)
            is_kept |= pool.cached.is_published & (namespace != words[None]).any(axis=-1)
        for held in cache.config.hooks.held_blocks(control, g):
            is_of_other = (held.namespace != words[None]).any(axis=-1)
            of_others = jnp.where(is_of_other[:, None], held.block_ids, pool.num_blocks)
            is_kept = is_kept.at[of_others].set(True, mode="drop")
        masks.append(~is_kept)
    return masks


def _end_rows(control: Control, is_row: jax.Array, config: CacheConfig) -> Control:
    """Ends all masked rows."""
    order = jnp.arange(control.max_seqs, dtype=jnp.int32)
    return free_rows(control, jnp.where(is_row, order, control.max_seqs), config=config)[0]


def _unpublish(control: Control, masks: list[jax.Array], config: CacheConfig) -> Control:
    """Takes the masked blocks, of which no row holds a token, out of the index, and their tokens too."""
    if control.prefix_index is None:
        return control
    # The indexed group last: blocks of other groups still linked to its blocks become free with them.
    for g in sorted(range(len(masks)), key=lambda g: g == config.indexed_group):
        pool = control.block_pools[g]
        assert pool.cached is not None
        order = jnp.arange(pool.num_blocks, dtype=jnp.int32)
        block_ids = jnp.where(masks[g] & pool.cached.is_published, order, pool.num_blocks)
        control = eviction.unpublish(control, g, block_ids, pool, config)
    index, mask = control.prefix_index, masks[config.indexed_group]
    assert index is not None
    index = dataclasses.replace(
        index,
        block_tokens=jnp.where(mask[:, None], 0, index.block_tokens),
        block_hash=jnp.where(mask[:, None], jnp.uint32(0), index.block_hash),
        parent=jnp.where(mask, jnp.int32(mask.shape[0]), index.parent),
        namespace=jnp.where(mask[:, None], jnp.uint32(0), index.namespace),
    )
    return dataclasses.replace(control, prefix_index=index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overwrite(
    group: LayerGroup, pool: KVPool, mask: jax.Array, rests: tuple[jax.Array, jax.Array] | None
) -> KVPool:
    """Overwrites blocks, and the slots after last tokens, with zeros."""
    pool = jax.tree.map(functools.partial(_zero_blocks, mask=mask), pool)
    return pool if rests is None else _zero_rests(pool, group, *rests)


def _overwrite_fwd(group, pool, *where):
    return _overwrite(group, pool, *where), where


def _overwrite_bwd(group, where, grads):
    storage.require_gradient(group)
    return _overwrite(group, grads, *where), None, None  # zeros had no part in the result


_overwrite.defvjp(_overwrite_fwd, _overwrite_bwd)


def _zero_blocks(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Overwrites the masked blocks of all layers with zeros, one block after the other."""
    num_blocks = mask.shape[0]
    layers = jnp.arange(values.shape[0] // num_blocks, dtype=jnp.int32) * num_blocks
    rank, num_masked = rank_true(mask)
    order = jnp.arange(num_blocks, dtype=jnp.int32)
    ids = jnp.zeros_like(rank).at[jnp.where(mask, rank, num_blocks)].set(order, mode="drop")

    def zero_one(i: jax.Array, values: jax.Array) -> jax.Array:
        return _set_zero(values, jnp.where(i < num_masked, layers + get_at(ids, i), values.shape[0]))

    return lax.fori_loop(0, common_bound(num_masked), zero_one, values)


def _set_zero(values: jax.Array, *index: Any) -> jax.Array:
    """Sets entries to zeros of their own sharding: a mesh with explicit axes takes no others."""
    places = values.at[index]
    return places.set(jnp.zeros_like(places.get(mode="clip")), mode="drop")


def _forget_rests(control: Control, config: CacheConfig) -> Control:
    """Takes the tokens out of the index that no row holds and no published block has."""
    index, g = control.prefix_index, config.indexed_group
    if index is None:
        return control
    block_size = config.groups[g].block_size
    num_tokens = num_tokens_held(control, g, config)
    is_token = jnp.arange(block_size, dtype=jnp.int32)[None] < num_tokens[:, None]
    index = dataclasses.replace(index, block_tokens=jnp.where(is_token, index.block_tokens, 0))
    return dataclasses.replace(control, prefix_index=index)


def _rests(control: Control, group_id: int, config: CacheConfig) -> tuple[jax.Array, jax.Array]:
    """Finds the last block of every row, i32[max_seqs], and how many tokens each block holds."""
    blocks, group = control.block_pools[group_id], config.groups[group_id]
    columns, _ = group.tail_column(row_len(control, group.kind))
    order = jnp.arange(control.max_seqs, dtype=jnp.int32)
    tails = get_at(blocks.block_table, (order, columns), blocks.num_blocks)
    return tails, num_tokens_held(control, group_id, config)


def _zero_rests(pool: KVPool, group: LayerGroup, tails: jax.Array, num_tokens: jax.Array) -> KVPool:
    """Overwrites with zeros after the last token of every row, except blocks of others and published ones."""
    block_size, num_blocks = group.block_size, pool.num_rows // group.num_layers
    offsets = jnp.arange(block_size, dtype=jnp.int32)

    def clear(values: jax.Array, array: BlockArray) -> jax.Array:
        def clear_row(row: jax.Array, values: jax.Array) -> jax.Array:
            tail = tails[row]
            layers = jnp.arange(group.num_layers, dtype=jnp.int32) * num_blocks
            where = jnp.where(tail < num_blocks, layers + tail, values.shape[0])
            is_rest = offsets >= get_at(num_tokens, tail)
            offset = jnp.where(is_rest, offsets, block_size)
            return _set_zero(values, where[:, None], *array.before_tokens, offset)

        if array.token_axis is None:  # a row's last block has all its tokens or none
            return values
        return lax.fori_loop(0, tails.shape[0], clear_row, values)

    return KVPool(arrays={name: clear(pool.arrays[name], array) for name, array in group.arrays})


def num_tokens_held(control: Control, group_id: int, config: CacheConfig) -> jax.Array:
    """Counts the tokens that each block of a group holds for rows, for extras, or published; i32[any]."""
    group = config.groups[group_id]
    pool, block_size = control.block_pools[group_id], group.block_size
    starts = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32) * block_size
    filled = jnp.clip(row_len(control, group.kind)[:, None] - starts[None], 0, block_size)
    # A last block may be shared by a longer fork, for which it is not the last.
    num_tokens = max_at(jnp.zeros_like(pool.ref_count), pool.block_table, filled)
    for held in config.hooks.held_blocks(control, group_id):
        num_tokens = max_at(num_tokens, held.block_ids, block_size)
    if pool.cached is None:
        return num_tokens
    return jnp.where(pool.cached.is_published, block_size, num_tokens)
