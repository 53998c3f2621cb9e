"""The extra that gives a cache a store of chunks, and the checks of its invariants."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.chunks.forget_chunks import evict_chunks
from kvcache_jax.chunks.stored_chunks import NAME, Chunks, chunks_of, forget_chunks, with_chunks
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import Extra, HeldBlocks
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import check_positive
from kvcache_jax.layers.span import ceil_div


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
            if group.kind.rotated_features is None:
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


def store_of(config: CacheConfig) -> Store | None:
    """Returns the store among a config's extras, or None."""
    return next((extra for extra in config.extras if isinstance(extra, Store)), None)


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
