"""Blocks as values, for tiers and transfer: `export_blocks` and `import_blocks`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import (
    first_true,
    get_at,
    num_true,
    quotient,
    read_first,
    remainder,
    set_at,
)
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.blocks.storage import refuse_derivatives
from kvcache_jax.blocks.whole_blocks import read_blocks, write_blocks
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import require_prefix_index, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache, Control, PrefixIndex
from kvcache_jax.core.status import Status
from kvcache_jax.operations.rows import first_failure
from kvcache_jax.prefix import block_metadata, eviction, prefix_index
from kvcache_jax.prefix.prefix_index import Content


@pytree_dataclass()
class BlockContents:
    """The contents of published blocks, whatever the layer kinds store.

    A block is known by all tokens up to its end, which also name the blocks before it: `import_blocks`
    compares them, and never goes by a hash alone.

    Attributes:
      tokens: i32[n, P], of the sequence from its start to the block's end; `P` covers `max_seq_len`.
      num_tokens: i32[n], how many, a multiple of the block size; 0 for no block.
      namespace: u32[n, 4], who may share the block.
      is_held: per layer group bool[n, m], which of its `m` blocks with the block's last tokens there are;
        m = 1 in the group that prefixes are found by.
      arrays: per layer group by name `[n, m, num_layers, *shape]`, as in `KVPool`; () without storage.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    namespace: jax.Array
    is_held: tuple[jax.Array, ...]
    arrays: tuple[dict[str, jax.Array], ...]


@takes_one
@jax.named_scope("kvcache.export_blocks")
def export_blocks(cache: Cache, block_ids: IntRows) -> BlockContents:
    """Reads the contents of published blocks, and of the blocks linked to them in other layer groups.

    Args:
      cache: Not changed.
      block_ids: i32[n], of the group that prefixes are found by, as `eviction_candidates` gives them. Others
        than published ones give no block.

    Returns:
      `BlockContents`, arrays of their own, for `import_blocks` of this cache later or of another one.

    Raises:
      ValueError: the cache has no prefix caching.
    """
    require_prefix_index("export_blocks", cache)
    return _export(cache.config.keeper.settle(cache), arguments.int_column("block_ids", block_ids))


@jax.jit
def _export(cache: Cache, block_ids: jax.Array) -> BlockContents:
    cache, block_ids = as_varied((cache, block_ids))
    control, config = cache.control, cache.config
    index, indexed = control.prefix_index, config.groups[config.indexed_group]
    assert index is not None
    pool = control.block_pools[config.indexed_group]
    block_ids = jnp.where(block_pool.is_published(pool, block_ids), block_ids, pool.num_blocks)
    chain, depth = _chains(index, block_ids, pool.max_blocks_per_seq)
    tokens = get_at(index.block_tokens, chain, 0).reshape(chain.shape[0], -1)
    is_block = block_ids < pool.num_blocks
    is_held, arrays = [], []
    for g, links in enumerate(index.group_links):
        ids = block_ids[:, None]
        if links is not None:
            nowhere = control.block_pools[g].num_blocks
            ids = get_at(links.block_ids, block_ids, nowhere) if links.block_ids.shape[1] else ids[:, :0]
        is_held.append(ids < control.block_pools[g].num_blocks)
        if cache.pools:
            kv_pool = refuse_derivatives(config.groups[g], cache.pools[g])
            arrays.append(read_blocks(config, config.groups[g], kv_pool, ids))
    return BlockContents(
        tokens=tokens,
        num_tokens=jnp.where(is_block, (depth + 1) * indexed.block_size, 0),
        namespace=get_at(index.namespace, block_ids, 0),
        is_held=tuple(is_held),
        arrays=tuple(arrays),
    )


def _chains(index: PrefixIndex, block_ids: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """Finds the chains of i32[n] published blocks, i32[n, num_columns], and each block's own column, i32[n].

    After a block's own column is nowhere. It takes steps of powers of two, so that a long chain takes as many
    gathers as its length has bits, and no loop.
    """
    nowhere = index.parent.shape[0]
    jumps = [index.parent]  # jumps[k][b] is 2**k blocks before b
    for _ in range(1, max(num_columns - 1, 1).bit_length()):
        jumps.append(get_at(jumps[-1], jumps[-1], nowhere))
    first, depth = block_ids, jnp.zeros_like(block_ids)
    for k, jump in reversed(list(enumerate(jumps))):
        before = get_at(jump, first, nowhere)
        first = jnp.where(before < nowhere, before, first)
        depth += jnp.where(before < nowhere, 1 << k, 0)
    distance = depth[:, None] - jnp.arange(num_columns, dtype=jnp.int32)[None]
    chain = jnp.broadcast_to(block_ids[:, None], distance.shape)
    for k, jump in enumerate(jumps):
        chain = jnp.where((distance >> k) & 1 == 1, get_at(jump, chain, nowhere), chain)
    return jnp.where(distance >= 0, chain, nowhere), depth


@takes_one
@jax.named_scope("kvcache.import_blocks")
def import_blocks(cache: Cache, contents: BlockContents) -> tuple[Cache, jax.Array]:
    """Publishes exported blocks, shorter prefixes first, so that prompts find them.

    A block is written into a free block of each layer group that it had one in, and is cached there as if a
    row had just released it: `evict` first where no blocks are free. It needs the block before it, published
    already or by this call. A block that is published already stays as it is. Call it inside a donated jit:
    called eagerly it copies the pools.

    Args:
      cache: Not changed, unless donated. Of the layer kinds and block sizes of the cache that was exported.
      contents: From `export_blocks`.

    Returns:
      The cache and status i32[n]: OUT_OF_BLOCKS (no free blocks for it, or for one of as short a prefix),
      NO_PARENT (the block before it is not published), INDEX_FULL (no place where it would be found),
      BAD_LENGTH, SKIPPED (no block). A block that fails changes nothing; others go on.

    Raises:
      ValueError, TypeError: the cache has no prefix caching, or the contents are of another cache's shapes.
    """
    require_prefix_index("import_blocks", cache)
    if not isinstance(contents, BlockContents):
        raise TypeError(
            f"contents is a {type(contents).__name__}, expected the BlockContents of export_blocks"
        )
    _check_shapes(cache, contents)
    return _import(cache.config.keeper.settle(cache), arguments.owned(contents))


def import_making_room(cache: Cache, contents: BlockContents) -> tuple[Cache, jax.Array]:
    """Imports blocks, for which cached ones are evicted where no others are free; not those before them."""
    cache, contents = as_varied((cache, contents))
    control, index, group_id = cache.control, cache.control.prefix_index, cache.config.indexed_group
    assert index is not None
    num_columns = contents.tokens.shape[1] // index.block_tokens.shape[1]
    reader = prefix_index.reader_of(contents.tokens)
    ends, namespace = contents.num_tokens + 1, contents.namespace
    chain = prefix_index.find_prefixes(index, control.hash_key, reader, num_columns, ends, namespace)
    needs = {g: num_true(held) for g, held in enumerate(contents.is_held)}
    # As if rows held what the new blocks continue.
    pool, _ = block_pool.revive(control.block_pools[group_id], chain)
    control = eviction.make_room(_with_pool(control, group_id, pool), needs, cache.config)
    pool = block_pool.sweep_queue(control.block_pools[group_id], (chain < index.parent.shape[0]).any())
    pool = block_pool.release(pool, chain[:, ::-1].reshape(-1))
    pool = dataclasses.replace(pool, peak_used=cache.control.block_pools[group_id].peak_used)
    control = _with_pool(control, group_id, pool)
    return import_blocks(dataclasses.replace(cache, control=control), contents)


def _with_pool(control: Control, group_id: int, pool: BlockPool) -> Control:
    pools = control.block_pools
    return dataclasses.replace(control, block_pools=(*pools[:group_id], pool, *pools[group_id + 1 :]))


def _check_shapes(cache: Cache, contents: BlockContents) -> None:
    one = jax.ShapeDtypeStruct((contents.num_tokens.shape[0],), jnp.int32)
    # The shapes of an export of this cache, without computing it.
    expected = jax.eval_shape(export_blocks, cache, one)
    got = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), contents)
    want = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), expected)
    if got != want and jax.tree.leaves(got) != jax.tree.leaves(want):
        found = [*dict.fromkeys(_differences(cache.config, contents, expected))]
        raise ValueError(
            f"contents are of another cache: {'; '.join(found) or 'their shapes differ'}: export from a "
            "cache of the same layer kinds, block sizes, dtypes and max_seq_len"
        )


def _differences(config: CacheConfig, got: BlockContents, want: BlockContents) -> Iterator[str]:
    """States the got and the expected value of each property of the contents that differs."""
    if len(got.arrays) != len(want.arrays):
        yield f"got arrays of {len(got.arrays)} layer groups, expected {len(want.arrays)}"
        return
    for group, arrays, expected in zip(config.groups, got.arrays, want.arrays, strict=bool(want.arrays)):
        label = group.kind.label
        if arrays.keys() != expected.keys():
            yield f"got the arrays {sorted(arrays)}, expected {sorted(expected)} of {label} layers"
            continue
        for name, array in group.arrays:
            shape, wanted = arrays[name].shape[2:], expected[name].shape[2:]
            if len(shape) != len(wanted):
                yield f"got {len(shape) - 1} axes of {name!r}, expected {len(wanted) - 1} of {label} layers"
                continue
            what = {axis: f"as axis {axis - 1} of {name!r}" for axis in range(len(wanted))}
            what |= {0: "layers"}
            if array.token_axis is not None:
                what[1 + array.token_axis] = "tokens a block"
            if array.head_axis is not None:
                what[1 + array.head_axis] = "heads"
            for axis, (size, wanted_size) in enumerate(zip(shape, wanted, strict=True)):
                if size != wanted_size:
                    yield f"got {size} {what[axis]}, expected {wanted_size} of {label}"
            dtypes = [jnp.dtype(x[name].dtype).name for x in (arrays, expected)]
            if dtypes[0] != dtypes[1]:
                yield f"got {name!r} in {dtypes[0]}, expected {dtypes[1]} of {label}"
    if got.tokens.shape[1:] != want.tokens.shape[1:]:
        yield f"got room for {got.tokens.shape[-1]} tokens of a text, expected {want.tokens.shape[-1]}"


@jax.jit
def _import(cache: Cache, contents: BlockContents) -> tuple[Cache, jax.Array]:
    cache, contents = as_varied((cache, contents))
    config = cache.config
    order = jnp.argsort(contents.num_tokens, stable=True)
    entries = contents.tokens, contents.num_tokens, contents.namespace, contents.is_held
    entries = jax.tree.map(lambda x: x[order], entries)
    control, published = _publish(cache.control, *entries, config=config)
    control = _let_go(control, cache.control, published, config)
    in_place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    published = jax.tree.map(lambda x: x[in_place], published)
    pools = []
    for g, (pool, arrays) in enumerate(zip(cache.pools, contents.arrays, strict=True)):
        pool, arrays = refuse_derivatives(config.groups[g], (pool, arrays))
        pools.append(write_blocks(config, config.groups[g], pool, published.block_ids[g], arrays))
    return dataclasses.replace(cache, control=control, pools=tuple(pools)), published.status


class _Published(NamedTuple):
    """The outcome for n blocks."""

    status: jax.Array  # i32[n]
    block_ids: tuple[jax.Array, ...]  # per group i32[n, m], the blocks that each got, or nowhere
    chain: jax.Array  # i32[n, columns], the indexed group's blocks up to it; nowhere if it was not entered


def _let_go(control: Control, before: Control, published: _Published, config: CacheConfig) -> Control:
    """Makes the new blocks cached, and those before them more recent than they are.

    As if rows that held the whole prefixes had ended: a block must be in the queue after its successors,
    or it would be evicted first and leave them unreachable.
    """
    pools = []
    for g, (pool, ids) in enumerate(zip(control.block_pools, published.block_ids, strict=True)):
        ids = ids.reshape(-1)
        if g == config.indexed_group:
            pool, _ = block_pool.revive(pool, published.chain)
            ids = jnp.concatenate([ids, published.chain[:, ::-1].reshape(-1)])
        pool = block_pool.sweep_queue(pool, (ids < pool.num_blocks).any())
        pool = block_pool.release(pool, ids)
        pools.append(dataclasses.replace(pool, peak_used=before.block_pools[g].peak_used))
    return dataclasses.replace(control, block_pools=tuple(pools))


def _publish(
    control: Control,
    tokens: jax.Array,
    num_tokens: jax.Array,
    namespace: jax.Array,
    is_held: tuple[jax.Array, ...],
    config: CacheConfig,
) -> tuple[Control, _Published]:
    """Publishes blocks, of which each comes after the one before it; they are held until `_let_go`."""
    index, group_id = control.prefix_index, config.indexed_group
    assert index is not None
    nowhere, block_size = index.block_tokens.shape
    found = _look_up(control, index, tokens, num_tokens, namespace)
    is_held = (*is_held[:group_id], jnp.ones_like(is_held[group_id]), *is_held[group_id + 1 :])
    # Blocks are given in order: where a group has none for one, it has none for those after it.
    is_short = jnp.zeros_like(found.is_good)
    for held, pool in zip(is_held, control.block_pools, strict=True):
        needs = jnp.sum(held & found.is_good[:, None], axis=1, dtype=jnp.int32)
        is_short |= (needs > 0) & (jnp.cumsum(needs, dtype=jnp.int32) > pool.num_free)
    enters = _with_those_before(found.is_good & ~is_short, found.before, jnp.logical_and)
    pools, block_ids = [], []
    found, index = read_first(found, index)
    for pool, held in zip(control.block_pools, is_held, strict=True):
        pool, ids = block_pool.take(pool, held & enters[:, None])
        pools.append(block_pool.mark_published(pool, ids))
        block_ids.append(ids)
    new = block_ids[group_id][:, 0]
    content = found.content
    follows = get_at(new, found.before, nowhere)
    content = content._replace(parent=jnp.minimum(content.parent, follows))
    index = prefix_index.insert(index, enters, new, found.way, content)
    index = dataclasses.replace(index, block_tokens=set_at(index.block_tokens, new, content.tokens))
    if index.history is not None:
        priority = jnp.zeros_like(new)
        history = block_metadata.note_published(index.history, new, control.clock, priority, found.column)
        index = dataclasses.replace(index, history=history)
    links = []
    for group_links, ids in zip(index.group_links, block_ids, strict=True):
        if group_links is not None:
            owners = jnp.broadcast_to(new[:, None], ids.shape)
            group_links = dataclasses.replace(
                group_links,
                block_ids=set_at(group_links.block_ids, new, ids),
                indexed_ids=set_at(group_links.indexed_ids, ids, owners),
            )
            if group_links.is_wanted is not None:
                is_wanted = set_at(group_links.is_wanted, ids, False)
                group_links = dataclasses.replace(group_links, is_wanted=is_wanted)
        links.append(group_links)
    index = dataclasses.replace(index, group_links=tuple(links))
    control = dataclasses.replace(control, prefix_index=index, block_pools=tuple(pools))
    control = config.hooks.note_published(config.keeper.publish(control, new, config), new)
    status = first_failure(
        (num_tokens == 0, Status.SKIPPED),
        (~found.is_length, Status.BAD_LENGTH),
        (found.is_there, Status.OK),
        ((found.column > 0) & (content.parent == nowhere), Status.NO_PARENT),
        (~found.has_place, Status.INDEX_FULL),
        (is_short, Status.OUT_OF_BLOCKS),
    )
    status = jnp.where(found.is_first, status, get_at(status, found.leader, Status.INDEX_FULL))
    # Of those before a block, this call's own are in their columns of their chains.
    chain = set_at(found.chain, (jnp.arange(new.size, dtype=jnp.int32), found.column), new)
    chain = _with_those_before(chain, found.before, jnp.minimum)
    return control, _Published(status, tuple(block_ids), jnp.where(enters[:, None], chain, nowhere))


class _Found(NamedTuple):
    """All that is known of n blocks before they enter; `before` and `leader` are places among them, or n."""

    content: Content  # parents are published ones
    column: jax.Array  # i32[n]
    chain: jax.Array  # i32[n, columns], the published blocks of the prefix, nowhere from a miss on
    way: jax.Array  # i32[n]
    before: jax.Array  # i32[n], the block before it, where that is not published yet
    leader: jax.Array  # i32[n], the first one with these contents, which it has the status of
    is_length: jax.Array  # bool[n], and so are the following
    is_there: jax.Array
    is_first: jax.Array  # no other one leads it
    has_place: jax.Array  # in the index
    is_good: jax.Array  # all of it is as it should be, and all before it is


def _look_up(
    control: Control, index: PrefixIndex, tokens: jax.Array, num_tokens: jax.Array, namespace: jax.Array
) -> _Found:
    """Looks up blocks at the ends of `num_tokens` i32[n] tokens, in the index and among each other."""
    nowhere, block_size = index.block_tokens.shape
    num, width = tokens.shape
    order = jnp.arange(num, dtype=jnp.int32)
    chain = prefix_index.find_prefixes(
        index,
        control.hash_key,
        prefix_index.reader_of(tokens),
        width // block_size,
        num_tokens + 1,
        namespace,
    )

    def hashed(tokens: jax.Array, namespace: jax.Array) -> tuple[jax.Array, jax.Array]:
        return prefix_index.prefix_blocks(control.hash_key, tokens, namespace, block_size)

    blocks, hashes = jax.vmap(hashed)(tokens, namespace)
    is_length = (num_tokens >= 0) & (num_tokens <= width) & (remainder(num_tokens, block_size) == 0)
    is_entry = is_length & (num_tokens > 0)
    column = quotient(jnp.maximum(num_tokens, block_size), block_size) - 1
    own, parent = get_at(hashes, (order, column)), get_at(chain, (order, column - 1), nowhere)
    is_there = is_entry & (get_at(chain, (order, column)) < nowhere)

    def first_like(hashes: jax.Array, lengths: jax.Array) -> jax.Array:
        """Finds the first block with a hash u32[n, 2] that has the same `lengths` i32[n] tokens, or n."""
        is_same = (own[None] == hashes[:, None]).all(axis=-1) & is_entry[None]
        first = first_true(is_same)
        # Hashes only say where to look: all tokens are compared.
        at = jnp.arange(width, dtype=jnp.int32)[None]
        is_like = ((get_at(tokens, first) == tokens) | (at >= lengths[:, None])).all(axis=1)
        is_like &= (get_at(namespace, first) == namespace).all(axis=1)
        return jnp.where(is_like & (get_at(num_tokens, first, -1) == lengths), first, num)

    leader = first_like(own, num_tokens)
    is_first = (leader == order) | ~is_entry
    before = first_like(get_at(hashes, (order, column - 1)), num_tokens - block_size)
    before = jnp.where((column > 0) & (parent == nowhere), before, num)
    buckets = prefix_index.bucket_of(index, own)
    # A block that is refused for want of another before it takes no place of a bucket.
    has_parent = (column == 0) | (parent < nowhere) | (before < num)
    is_new = is_entry & is_first & ~is_there & _with_those_before(has_parent, before, jnp.logical_and)
    in_bucket = index.buckets[buckets]
    goes_before = (order[:, None] > order[None]) & (buckets[:, None] == buckets[None]) & is_new[None]
    way, has_place = prefix_index.free_way(index, in_bucket, jnp.sum(goes_before, axis=1, dtype=jnp.int32))
    has_place &= prefix_index.candidates(index, in_bucket, own) == nowhere
    is_good = is_new & has_place
    return _Found(
        content=Content(get_at(blocks, (order, column)), own, parent, namespace),
        column=column,
        chain=chain,
        way=way,
        before=before,
        leader=leader,
        is_length=is_length,
        is_there=is_there,
        is_first=is_first,
        has_place=has_place,
        is_good=_with_those_before(is_good, before, jnp.logical_and),
    )


def _with_those_before(
    values: jax.Array, before: jax.Array, merge: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Merges the values [n, ...] of blocks with those before them of this call, in steps of powers of two."""
    order = jnp.arange(before.size, dtype=jnp.int32)
    jump = jnp.where(before < before.size, before, order)
    for _ in range(max(before.size - 1, 1).bit_length()):
        values, jump = merge(values, get_at(values, jump)), get_at(jump, jump)
    return values
