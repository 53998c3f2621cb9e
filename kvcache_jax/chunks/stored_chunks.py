"""The store of chunks: passages that were computed once and can be put into rows at any position.

A chunk is named by its namespace and its tokens, all of which are compared: there is no hash to collide.
Invariants, which `check_invariants` looks for:

* A chunk of `length` tokens that began at `start` holds the blocks of columns `start // block_size` to
  `(start + length - 1) // block_size` of its row as they were, in the same order and with the same offsets.
  The keys in them are the original ones, rotated by the positions from `start` on. `compose` rotates
  these, never keys that were rotated before.
* Each entry counts as an owner in `ref_count`, so that a row that writes into a shared block copies it
  first. No call writes into the blocks of chunks.
* No two chunks have the same name.
* With prefix caching no block of a chunk is published: a published block must follow its parent, which a
  chunk does not hold. Chunks then hold copies alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.state import Cache, Control


@pytree_dataclass()
class Chunks:
    """Chunks by id; nowhere is `num_chunks`.

    Attributes:
      tokens: i32[num_chunks, max_chunk_len], 0 after the last one.
      length: i32[num_chunks], tokens; 0 where no chunk is stored.
      start: i32[num_chunks], position of the first token when it was computed.
      namespace: u32[num_chunks, 4], of the row that the chunk came from.
      block_ids: per group i32[num_chunks, columns], blocks that hold the tokens, from the first one's on;
        then nowhere.
      num_uses: u32[num_chunks], how often `compose` put the chunk into a row.
      last_used: u32[num_chunks], clock of the last of these, or of `chunks.store`.
      first_composed: i32[max_seqs], first place of a row that `compose` wrote, counted from 1; 0 for rows
        without chunks.
    """

    tokens: jax.Array
    length: jax.Array
    start: jax.Array
    namespace: jax.Array
    block_ids: tuple[jax.Array, ...]
    num_uses: jax.Array
    last_used: jax.Array
    first_composed: jax.Array

    @property
    def num_chunks(self) -> int:
        """Places for chunks; also the id that means nowhere."""
        return self.length.shape[-1]

    def find(self, tokens: jax.Array, length: jax.Array, namespace: jax.Array) -> jax.Array:
        """Finds chunks by name, i32[n], or nowhere.

        Args:
          tokens: i32[n, max_chunk_len], 0 after the last one.
          length: i32[n].
          namespace: u32[n, 4].
        """
        is_equal = (self.tokens[None] == tokens[:, None]).all(axis=-1)
        is_equal &= (self.namespace[None] == namespace[:, None]).all(axis=-1)
        is_equal &= (self.length[None] == length[:, None]) & (self.length > 0)[None]
        ids = jnp.arange(self.num_chunks, dtype=jnp.int32)
        return jnp.min(jnp.where(is_equal, ids[None], self.num_chunks), axis=1)

    def used(self, chunk_ids: jax.Array, clock: jax.Array) -> "Chunks":
        """Counts a use of each of `chunk_ids` i32[...] at `clock` u32[]; nowhere is skipped."""
        return dataclasses.replace(
            self,
            num_uses=self.num_uses.at[chunk_ids].add(jnp.uint32(1), mode="drop"),
            last_used=set_at(self.last_used, chunk_ids, clock),
        )

    def owned_by(self, chunk_ids: jax.Array, namespace: jax.Array) -> jax.Array:
        """Masks the `chunk_ids` i32[n, ...] that are chunks of `namespace` u32[n, 4], bool like them."""
        of_chunks = get_at(self.namespace, chunk_ids)
        namespace = namespace.reshape(namespace.shape[0], *[1] * (chunk_ids.ndim - 1), 4)
        return (get_at(self.length, chunk_ids, 0) > 0) & (of_chunks == namespace).all(axis=-1)


NAME = "chunks"
"""The key of the chunks in `Control.extras`."""
_PER_CHUNK = "tokens", "length", "start", "namespace", "num_uses", "last_used"


@pytree_dataclass()
class StoredChunks:
    """The result of `chunks.store`, per entry of the call.

    Attributes:
      status: i32[n], see `Status`.
      chunk_ids: i32[n], the chunk with these tokens, which may have been there before; `num_chunks` for an
        entry that failed.
    """

    status: jax.Array
    chunk_ids: jax.Array


def chunks_of(control: Control) -> Chunks:
    """Returns the chunks of a cache that has a store."""
    return control.extras[NAME]


def with_chunks(control: Control, chunks: Chunks, **fields: Any) -> Control:
    """Sets the chunks, and further fields of the control state."""
    return dataclasses.replace(control, extras=control.extras | {NAME: chunks}, **fields)


def require_chunks(operation: str, cache: Cache) -> Chunks:
    """Refuses a cache without a store of chunks."""
    if NAME not in cache.control.extras:
        raise ValueError(
            f"{operation} got a cache without a store of chunks, expected one built with "
            "CacheConfig(extras=[kv.chunks.Store(num_chunks=..., max_chunk_len=...)])"
        )
    return chunks_of(cache.control)


def forget_chunks(control: Control, chunk_ids: jax.Array) -> Control:
    """Forgets chunks i32[n], which differ; nowhere is skipped."""
    chunks, pools, block_ids = chunks_of(control), [], []
    for pool, ids in zip(control.block_pools, chunks.block_ids, strict=True):
        pools.append(block_pool.release(pool, get_at(ids, chunk_ids, pool.num_blocks)))
        block_ids.append(set_at(ids, chunk_ids, pool.num_blocks))
    cleared = {name: set_at(getattr(chunks, name), chunk_ids, 0) for name in _PER_CHUNK}
    chunks = dataclasses.replace(chunks, block_ids=tuple(block_ids), **cleared)
    return with_chunks(control, chunks, block_pools=tuple(pools))
