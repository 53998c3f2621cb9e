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
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.masked_updates import add_at, get_at, min_at, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import Extra, HeldBlocks
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import check_positive
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.operations.rows import on_control


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


def forget_chunks(control: Control, chunk_ids: jax.Array) -> Control:
    """Forgets chunks i32[n], which differ; nowhere is skipped."""
    chunks, pools, block_ids = chunks_of(control), [], []
    for pool, ids in zip(control.block_pools, chunks.block_ids, strict=True):
        pools.append(block_pool.release(pool, get_at(ids, chunk_ids, pool.num_blocks)))
        block_ids.append(set_at(ids, chunk_ids, pool.num_blocks))
    cleared = {name: set_at(getattr(chunks, name), chunk_ids, 0) for name in _PER_CHUNK}
    chunks = dataclasses.replace(chunks, block_ids=tuple(block_ids), **cleared)
    return with_chunks(control, chunks, block_pools=tuple(pools))


@takes_one
@jax.named_scope("kvcache.free_chunks")
def free_chunks(cache: Cache, chunk_ids: IntRows) -> tuple[Cache, jax.Array]:
    """Forgets chunks; their blocks are free again where no row holds them, too.

    Rows that were composed of them stay as they are.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      chunk_ids: i32[n], `num_chunks` where there is none.

    Returns:
      The cache and status i32[n]: BAD_CHUNK_ID (no chunk is stored there, or an earlier entry names it),
      SKIPPED.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or ids that are no list of integers.
    """
    require_chunks("free_chunks", cache)
    chunk_ids = arguments.int_column("chunk_ids", chunk_ids)
    return on_control(_free, cache, chunk_ids)  # a list of chunks is not padded with rows' nowhere


def _free(control: Control, chunk_ids: jax.Array, *, config: CacheConfig) -> tuple[Control, jax.Array]:
    chunks = chunks_of(control)
    order = jnp.arange(chunk_ids.shape[0], dtype=jnp.int32)
    named = jnp.where(chunk_ids < 0, chunks.num_chunks, chunk_ids)
    first = min_at(jnp.full_like(chunks.length, order.size), named, order)
    is_chunk = (get_at(chunks.length, chunk_ids, 0) > 0) & (get_at(first, chunk_ids, 0) == order)
    status = first_failure((chunk_ids == chunks.num_chunks, Status.SKIPPED), (~is_chunk, Status.BAD_CHUNK_ID))
    return forget_chunks(control, jnp.where(status == Status.OK, chunk_ids, chunks.num_chunks)), status


@takes_one
@jax.named_scope("kvcache.evict_chunks")
def evict_chunks(
    cache: Cache, num_places: Any, *, num_blocks: Any = 0, keep: Any = ()
) -> tuple[Cache, jax.Array]:
    """Makes room for chunks: forgets the chunks with the least uses times tokens, as few as suffice.

    A use is a `compose`; of equal chunks the one stored or used longest ago is forgotten first. Where all
    that may go would not suffice, none goes.

    Args:
      cache: Not changed; built with `CacheConfig(extras=[Store(...)])`.
      num_places: i32[], places of the store to be empty.
      num_blocks: i32[], blocks to be free or cached in each layer group.
      keep: i32[any], chunks that are not forgotten, such as chunks that a row is about to be composed of.

    Returns:
      The cache and i32[], the number of chunks that were forgotten.

    Raises:
      ValueError, TypeError: a cache without a store of chunks, or shapes or dtypes that do not fit.

    Example: see `chunks.store`.

    References:
      Cache-Craft (Agarwal et al.; arXiv:2502.15734), for use times tokens saved.
    """
    require_chunks("evict_chunks", cache)
    asked = [
        arguments.int_scalar(name, x) for name, x in (("num_places", num_places), ("num_blocks", num_blocks))
    ]
    keep = arguments.as_array("keep", keep)
    keep = arguments.int_column("keep", keep) if keep.shape != (0,) else np.zeros(0, np.int32)
    return on_control(_evict, cache, keep, *asked)


def _evict(
    control: Control, keep: jax.Array, num_places: jax.Array, num_blocks: jax.Array, *, config: CacheConfig
) -> tuple[Control, jax.Array]:
    num_going, going = _going(control, keep, num_places, [num_blocks] * len(config.groups))
    return forget_chunks(control, going), num_going


def make_room(
    control: Control, keep: jax.Array, num_places: jax.Array, num_blocks: Sequence[jax.Array]
) -> Control:
    """Forgets chunks as `evict_chunks`, for `num_blocks` i32[] of each group."""
    return forget_chunks(control, _going(control, keep, num_places, num_blocks)[1])


def _going(
    control: Control, keep: jax.Array, num_places: jax.Array, num_blocks: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Chooses the chunks to forget: their number, and their ids i32[num_chunks]."""
    chunks = chunks_of(control)
    may_go = set_at(chunks.length > 0, keep, False)
    rank = _ranks(chunks, may_go, control.clock)
    num_going = jnp.arange(chunks.num_chunks + 1, dtype=jnp.int32)
    suffices = jnp.sum(chunks.length == 0, dtype=jnp.int32) + num_going >= num_places
    for pool, ids, num in zip(control.block_pools, chunks.block_ids, num_blocks, strict=True):
        freed = jnp.cumsum(_num_freed(pool, ids, rank), dtype=jnp.int32)
        suffices &= block_pool.num_available(pool) + jnp.pad(freed, (1, 0)) >= num
    suffices &= num_going <= jnp.sum(may_go, dtype=jnp.int32)
    num_evicted = jnp.min(jnp.where(suffices, num_going, chunks.num_chunks + 1))
    num_evicted = jnp.where(num_evicted > chunks.num_chunks, 0, num_evicted)
    return num_evicted, jnp.where(rank < num_evicted, num_going[:-1], chunks.num_chunks)


def _ranks(chunks: Chunks, mask: jax.Array, clock: jax.Array) -> jax.Array:
    """Ranks the masked chunks by value, the least first, i32[num_chunks]; of others `num_chunks`."""
    ids = jnp.arange(chunks.num_chunks, dtype=jnp.int32)
    value = chunks.num_uses.astype(jnp.float32) * chunks.length.astype(jnp.float32)
    age = clock - chunks.last_used  # modulo 2**32
    *_, order = lax.sort(((~mask).astype(jnp.int32), value, ~age, ids), num_keys=4)
    rank = set_at(ids, order, ids)
    return jnp.where(mask, rank, chunks.num_chunks)


def _num_freed(pool: BlockPool, block_ids: jax.Array, rank: jax.Array) -> jax.Array:
    """Counts the blocks that become free as the chunk of each rank is forgotten, i32[num_chunks].

    Chunks with `block_ids` i32[num_chunks, columns] are forgotten in the order of `rank` i32[num_chunks],
    where `num_chunks` is for those that stay.
    """
    ranks = jnp.broadcast_to(rank[:, None], block_ids.shape).reshape(-1)
    ids, ranks = lax.sort((block_ids.reshape(-1), ranks), num_keys=2)
    # Equal ids are a run, whose last entry is the last chunk forgotten and counts the chunks of the run.
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)
    is_first = (ids != jnp.roll(ids, 1)) | (places == 0)
    is_last = jnp.roll(is_first, -1)
    num_holding = places + 1 - lax.cummax(jnp.where(is_first, places, 0))
    is_theirs = is_last & (num_holding == block_pool.ref_counts(pool, ids))
    return add_at(jnp.zeros_like(rank), jnp.where(is_theirs, ranks, rank.shape[0]), 1)


@dataclasses.dataclass(frozen=True)
class Store(Extra):
    """A store of chunks in a cache, whose layers must all store keys that can be rotated.

    Attributes:
      num_chunks: Chunks that are kept at the same time.
      max_chunk_len: Most tokens of a chunk.

    Example:
      >>> import kvcache_jax as kv
      >>> store = kv.chunks.Store(num_chunks=32, max_chunk_len=256)
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], extras=[store])
    """

    name: ClassVar[str] = NAME

    num_chunks: int
    max_chunk_len: int

    def __post_init__(self):
        check_positive(self, "num_chunks", "max_chunk_len")

    def check(self, config: CacheConfig) -> None:
        """Refuses chunks longer than rows, and layers whose keys cannot be rotated."""
        if self.max_chunk_len > config.max_seq_len:
            raise ValueError(
                f"max_chunk_len is {self.max_chunk_len}, expected at most max_seq_len = {config.max_seq_len}"
            )
        for group in config.groups:
            if group.layer_ids and group.kind.rotated_features is None:
                raise NotImplementedError(
                    f"num_chunks is given and layers[{group.layer_ids[0]}] is {group.kind.label}, expected "
                    "layers whose keys can be rotated to another position, as FullAttention, SlidingWindow "
                    "and LatentAttention"
                )

    def empty(self, config: CacheConfig, numpy: Any) -> Chunks:
        """Builds a store without chunks."""

        def block_ids(group: LayerGroup) -> Any:
            shape = self.num_chunks, num_chunk_columns(group, self.max_chunk_len)
            return numpy.full(shape, group.num_blocks, jnp.int32)

        return Chunks(
            tokens=numpy.zeros((self.num_chunks, self.max_chunk_len), jnp.int32),
            length=numpy.zeros(self.num_chunks, jnp.int32),
            start=numpy.zeros(self.num_chunks, jnp.int32),
            namespace=numpy.zeros((self.num_chunks, 4), jnp.uint32),
            block_ids=tuple(block_ids(group) for group in config.groups),
            num_uses=numpy.zeros(self.num_chunks, jnp.uint32),
            last_used=numpy.zeros(self.num_chunks, jnp.uint32),
            first_composed=numpy.zeros(config.max_seqs, jnp.int32),
        )

    def inherit(self, control: Control, rows: jax.Array, parent_ids: jax.Array) -> Control:
        """Gives `rows` the places at which their parents were composed."""
        return _with_first(control, rows, get_at(chunks_of(control).first_composed, parent_ids))

    def forget(self, control: Control, rows: jax.Array) -> Control:
        """Forgets that `rows` were composed."""
        return _with_first(control, rows, jnp.zeros_like(rows))

    def truncate(self, control: Control, rows: jax.Array, new_len: jax.Array) -> Control:
        """Forgets that `rows` were composed where only tokens before their chunks are left."""
        first = get_at(chunks_of(control).first_composed, rows, 0)
        return _with_first(control, rows, jnp.where(new_len < first, 0, first))

    def move(self, control: Control, rows: jax.Array, prefix_len: jax.Array) -> Control:
        """Counts the tokens of composed rows after the first `prefix_len` as composed."""
        first = get_at(chunks_of(control).first_composed, rows, 0)
        return _with_first(control, rows, jnp.minimum(first, prefix_len + 1))  # 0 stays 0

    def prefix_len(self, control: Control, seq_ids: jax.Array, length: jax.Array) -> jax.Array:
        """Counts the tokens of rows before their first chunk."""
        first = get_at(chunks_of(control).first_composed, seq_ids, 0)
        return jnp.where(first > 0, jnp.minimum(length, first - 1), length)

    def forget_namespace(self, control: Control, namespace: jax.Array) -> Control:
        """Forgets the chunks of a namespace u32[4]."""
        chunks = chunks_of(control)
        order = jnp.arange(chunks.num_chunks, dtype=jnp.int32)
        is_its = (chunks.namespace == namespace[None]).all(axis=-1) & (chunks.length > 0)
        return forget_chunks(control, jnp.where(is_its, order, chunks.num_chunks))

    def held_blocks(self, control: Control, group_id: int) -> HeldBlocks:
        """Lists the blocks of chunks in a layer group."""
        chunks = chunks_of(control)
        return HeldBlocks("chunks", chunks.block_ids[group_id], chunks.namespace, is_of_rows=False)

    def give_up(self, cache: Cache, kept: Sequence[int]) -> tuple[Cache, bool]:
        """Forgets the chunk of least value, but none of those `kept`."""
        chunks = chunks_of(cache.control)
        keep = np.full(chunks.num_chunks, chunks.num_chunks)
        keep[: len(kept)] = kept
        num_empty = int(np.asarray(chunks.length == 0).sum())
        cache, num_forgotten = evict_chunks(cache, num_empty + 1, keep=keep)
        return cache, int(num_forgotten) > 0

    def violations(self, cache: Cache) -> list[str]:
        """Finds violations in the chunks' names and blocks, and in the places that rows note."""
        return check_chunks(cache)


def num_chunk_columns(group: LayerGroup, max_chunk_len: int) -> int:
    """Counts the most blocks that a chunk has tokens in, wherever in a block it begins."""
    return min(ceil_div(max_chunk_len + group.block_size - 1, group.block_size), group.max_blocks_per_seq)


def require_store(caller: str, config: CacheConfig) -> Store:
    """Returns the store among a config's extras; refuses a config without one."""
    for extra in config.extras:
        if isinstance(extra, Store):
            return extra
    raise ValueError(
        f"{caller} got a cache without a store of chunks, expected one built with "
        "CacheConfig(extras=[kv.chunks.Store(num_chunks=..., max_chunk_len=...)])"
    )


def require_chunks(operation: str, cache: Cache) -> Chunks:
    """Returns the chunks of a cache; refuses one without a store."""
    require_store(operation, cache.config)
    return chunks_of(cache.control)


def _with_first(control: Control, rows: jax.Array, first: jax.Array) -> Control:
    chunks = chunks_of(control)
    first_composed = set_at(chunks.first_composed, rows, first)
    return with_chunks(control, dataclasses.replace(chunks, first_composed=first_composed))


def check_chunks(cache: Cache) -> list[str]:
    """Finds violations in the names and blocks of chunks, and in the places that rows note."""
    chunks, violations = chunks_of(cache.control), []
    tokens, namespaces = np.asarray(chunks.tokens), np.asarray(chunks.namespace)
    names: dict[tuple, int] = {}
    for chunk, length in enumerate(np.asarray(chunks.length).tolist()):
        start = int(chunks.start[chunk])
        if not 0 <= length <= tokens.shape[1] or not 0 <= start <= cache.config.max_seq_len - length:
            violations.append(f"chunk {chunk} has {length} tokens from {start}, which do not fit")
            continue
        if tokens[chunk, length:].any() or not length and (start or namespaces[chunk].any()):
            violations.append(f"chunk {chunk} of {length} tokens has more in its name")
        name = namespaces[chunk].tobytes(), tokens[chunk, :length].tobytes()
        if length and names.setdefault(name, chunk) != chunk:
            violations.append(f"chunks {names[name]} and {chunk} have the same name")
        for known in ("num_uses", "last_used"):
            if not length and int(getattr(chunks, known)[chunk]):
                violations.append(f"place {chunk} holds no chunk and has {known}")
        for g, (pool, group) in enumerate(zip(cache.control.block_pools, cache.config.groups, strict=True)):
            is_held = np.asarray(chunks.block_ids[g][chunk]) < pool.num_blocks
            first, end = start // group.block_size, -(-(start + length) // group.block_size)
            columns = first + np.arange(len(is_held))
            may_hold = must_hold = columns < (end if length else first)
            if group.window is not None:  # it may have released blocks that the next token does not read
                first_read = start + length + 1 - group.window
                must_hold = may_hold & ((columns + 1) * group.block_size > first_read)
            if (is_held & ~may_hold).any() or (must_hold & ~is_held).any():
                violations.append(
                    f"group {g}: chunk {chunk} holds blocks {np.flatnonzero(is_held).tolist()}, expected "
                    f"{np.flatnonzero(must_hold).tolist()}"
                )
    for g, pool in enumerate(cache.control.block_pools):
        held = np.asarray(chunks.block_ids[g])
        held = held[held < pool.num_blocks]
        is_published = np.zeros(pool.num_blocks, bool)
        if pool.cached is not None:
            is_published = np.asarray(pool.cached.is_published)
        for block in held[is_published[held]]:
            violations.append(f"group {g}: block {block} of a chunk is published")
    lengths, firsts = np.asarray(cache.context_len).tolist(), np.asarray(chunks.first_composed).tolist()
    for row, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        if first and not cache.is_active[row]:
            violations.append(f"row {row} is idle and its first_composed is not 0")
        if first and not 0 <= first - 1 <= length:
            violations.append(f"row {row} of {length} tokens is composed from {first - 1} on")
    return violations
