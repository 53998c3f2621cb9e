"""The index of published blocks: find, insert, remove. Pure functions on a `PrefixIndex`.

A lookup compares all entries of one bucket at once; there is no probing and no tombstone. Hashes only say
where to look: a block counts as found when its tokens, its parent and its namespace are those asked for.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    first_true,
    get_at,
    last_of_equal,
    quotient,
    remainder,
    set_at,
)
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.core.backends import by_platform
from kvcache_jax.core.state import PrefixIndex
from kvcache_jax.prefix import block_metadata
from kvcache_jax.prefix.content_hash import block_hashes, root_hash

_TOKENS_ON_CPUS = 256
"""Of a prompt, hashed and looked for at once."""


class Content(NamedTuple):
    """Content of a block."""

    tokens: jax.Array  # i32[..., block_size]
    hashes: jax.Array  # u32[..., 2], of the tokens up to the block's end
    parent: jax.Array  # i32[...], the published block before it, or nowhere
    namespace: jax.Array  # u32[..., 4]


def bucket_of(index: PrefixIndex, hashes: jax.Array) -> jax.Array:
    """Computes the bucket i32[...] for `hashes u32[..., 2]`."""
    folded = hashes[..., 0] ^ (hashes[..., 1] * jnp.uint32(0x9E3779B1))
    return remainder(folded, index.buckets.shape[0]).astype(jnp.int32)


def candidates(index: PrefixIndex, in_bucket: jax.Array, hashes: jax.Array) -> jax.Array:
    """Finds the published block of `in_bucket` i32[..., ways] with the hash u32[..., 2], or nowhere.

    `matches` then compares contents.
    """
    stored = get_at(index.block_hash, in_bucket, 0)
    is_same = (in_bucket < index.parent.shape[0]) & (stored == hashes[..., None, :]).all(axis=-1)
    # No two published blocks have the same hash, see `insert`.
    return jnp.min(jnp.where(is_same, in_bucket, index.parent.shape[0]), axis=-1)


def matches(index: PrefixIndex, block_ids: jax.Array, content: Content) -> jax.Array:
    """Tests whether the published blocks represent exactly this content, bool[...]."""
    nowhere = index.parent.shape[0]
    is_same = block_ids < nowhere
    is_same &= (get_at(index.block_tokens, block_ids) == content.tokens).all(axis=-1)
    is_same &= get_at(index.parent, block_ids) == content.parent
    namespace = lax.broadcast_to_rank(content.namespace, block_ids.ndim + 1)
    return is_same & (get_at(index.namespace, block_ids) == namespace).all(axis=-1)


ReadTokens = Callable[[jax.Array, int], jax.Array]
"""`(first i32[], num) -> i32[n, num]`: so many tokens of prompts from a place on, any after their ends."""


def reader_of(tokens: jax.Array) -> ReadTokens:
    """Makes a reader of `tokens` i32[n, P]."""

    def read(first: jax.Array, num: int) -> jax.Array:
        return get_at(tokens.T, first + jnp.arange(num, dtype=jnp.int32)).T

    return read


def find_prefixes(
    index: PrefixIndex,
    hash_key: jax.Array,
    read: ReadTokens,
    num_columns: int,
    num_tokens: jax.Array,
    namespace: jax.Array,
) -> jax.Array:
    """Finds the longest published prefix of prompts, in whole blocks, at least one token short of each.

    On CPUs a prompt is read and hashed no further than its hits reach, on accelerators at once.

    Args:
      index: The index.
      hash_key: u32[2], of the cache.
      read: Reads the prompts' tokens.
      num_columns: Blocks of a prompt that are looked for.
      num_tokens: i32[n], lengths of the prompts.
      namespace: u32[n, 4].

    Returns:
      i32[n, num_columns] block ids, nowhere from the first miss on.
    """
    nowhere, block_size = index.block_tokens.shape
    most = max(_TOKENS_ON_CPUS // block_size, 1)
    num_at_once = min(by_platform(cpu=most, accelerator=num_columns), num_columns)
    # No more than there are, for a longer prompt is refused, and the others' hits stay.
    num_whole = jnp.minimum(quotient(jnp.maximum(num_tokens - 1, 0), block_size), num_columns)
    order = jnp.arange(num_at_once, dtype=jnp.int32)

    def find_some(search: _Search) -> _Search:
        first, found, before, parent, _ = search
        blocks = read(first * block_size, num_at_once * block_size).reshape(-1, num_at_once, block_size)
        places = lax.broadcast_in_dim((first + order) * block_size, blocks.shape[:2], (1,))
        added = block_hashes(hash_key, blocks, places)
        hashes = before[:, None] + jnp.cumsum(added, axis=1, dtype=jnp.uint32)
        ids = candidates(index, index.buckets[bucket_of(index, hashes)], hashes)
        parents = jnp.concatenate([parent[:, None], ids[:, :-1]], axis=1)
        is_hit = matches(index, ids, Content(blocks, hashes, parents, namespace[:, None]))
        is_hit &= (first + order)[None] < num_whole[:, None]
        is_hit = (jnp.cumsum(~is_hit, axis=1) == 0) & search.goes_on[:, None]
        found = lax.dynamic_update_slice(found, jnp.where(is_hit, ids, nowhere), (first & 0, first))
        return _Search(first + num_at_once, found, hashes[:, -1], ids[:, -1], is_hit[:, -1])

    num_padded = num_columns + -num_columns % max(num_at_once, 1)
    root = root_hash(hash_key, namespace)
    # Of the index's type, which `full_like` forgets: its mesh need not be set, and prompts may be on none.
    nothing = (root[:, 0] & 0).astype(jnp.int32) + nowhere
    found = jnp.broadcast_to(nothing[:, None], (nothing.size, num_padded))
    search = _Search(jnp.int32(0), found, root, nothing, nothing == nowhere)
    if num_at_once == num_columns:
        return find_some(search).found if num_columns else found

    search = as_varied(search, (index, read(search.first, 1)))

    def is_left(search: _Search) -> jax.Array:
        return (search.goes_on & (search.first < num_whole)).any()

    return lax.while_loop(is_left, find_some, search).found[:, :num_columns]


class _Search(NamedTuple):
    """A look at some blocks after the other."""

    first: jax.Array  # i32[], column to look at next
    found: jax.Array  # i32[n, any]
    before: jax.Array  # u32[n, 2], hashes of the tokens before it
    parent: jax.Array  # i32[n], the block before it, or nowhere
    goes_on: jax.Array  # bool[n], all blocks so far were found


def prefix_blocks(
    hash_key: jax.Array, tokens: jax.Array, namespace: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Splits a prompt i32[P] into its K whole blocks.

    Returns:
      Their tokens i32[K, block_size], and the hashes u32[K, 2] of the tokens up to the end of each.
    """
    num_blocks = tokens.shape[0] // block_size
    blocks = tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
    order = jnp.arange(num_blocks, dtype=jnp.int32)
    added = block_hashes(hash_key, blocks, order * block_size)
    return blocks, root_hash(hash_key, namespace)[None] + jnp.cumsum(added, axis=0, dtype=jnp.uint32)


def free_way(index: PrefixIndex, in_bucket: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the `rank[i]`-th empty place, i32[n], of a bucket that holds `in_bucket[i]`; bool[n], if any."""
    is_empty = in_bucket == index.parent.shape[0]
    is_it = is_empty & (jnp.cumsum(is_empty, axis=-1, dtype=jnp.int32) == rank[:, None] + 1)
    return first_true(is_it), is_it.any(axis=-1)


def insert(
    index: PrefixIndex, mask: jax.Array, block_ids: jax.Array, ways: jax.Array, content: Content
) -> PrefixIndex:
    """Enters masked blocks i32[n], whose hashes are new and differ, at the free `ways` of their buckets."""
    nowhere = index.parent.shape[0]
    target = jnp.where(mask, block_ids, nowhere)
    buckets = jnp.where(mask, bucket_of(index, content.hashes), index.buckets.shape[0])
    return dataclasses.replace(
        index,
        buckets=set_at(index.buckets, (buckets, ways), block_ids),
        block_hash=set_at(index.block_hash, target, content.hashes),
        parent=set_at(index.parent, target, content.parent),
        namespace=set_at(index.namespace, target, content.namespace),
        history=block_metadata.add_children(index.history, jnp.where(mask, content.parent, nowhere), 1),
    )


def note_hits(index: PrefixIndex, block_ids: jax.Array, clock: jax.Array, priority: jax.Array) -> PrefixIndex:
    """Counts a use of published blocks i32[n, C] by rows of `priority` i32[n]; the last row's stays."""
    if index.history is None:
        return index
    history = block_metadata.note_used(index.history, block_ids, clock)
    if history.priority is not None:
        nowhere = index.parent.shape[0]
        is_last, _ = last_of_equal(jnp.zeros_like(index.parent), block_ids < nowhere, block_ids)
        last_ids = jnp.where(is_last, block_ids, nowhere)
        priorities = jnp.broadcast_to(priority[:, None], block_ids.shape)
        history = block_metadata.note_priority(history, last_ids, priorities)
    return dataclasses.replace(index, history=history)


def remove(index: PrefixIndex, block_ids: jax.Array) -> PrefixIndex:
    """Takes published blocks i32[n], which differ, out of their buckets; nowhere is skipped."""
    nowhere = index.parent.shape[0]
    buckets = bucket_of(index, get_at(index.block_hash, block_ids))
    ways = first_true(index.buckets[buckets] == block_ids[:, None])
    buckets = jnp.where(block_ids < nowhere, buckets, index.buckets.shape[0])
    parents = get_at(index.parent, block_ids, nowhere)
    return dataclasses.replace(
        index,
        buckets=set_at(index.buckets, (buckets, ways), nowhere),
        history=block_metadata.add_children(index.history, parents, -1),
    )
