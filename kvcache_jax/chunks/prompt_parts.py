"""Passages of an engine's requests: chunks, as parts of prompts that its program puts together."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.chunks.chunk_reuse import ChunkReuse, request_spans
from kvcache_jax.chunks.chunk_selector import chunk_metadata
from kvcache_jax.chunks.chunk_store import chunks_of, make_room, require_store
from kvcache_jax.chunks.compose_chunks import compose
from kvcache_jax.chunks.prompts import selected
from kvcache_jax.chunks.store_chunk import store_chunk
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.status import Status
from kvcache_jax.decoding.prompt_parts import NO_PART, PromptParts


def keep_span(
    cache: Cache, row: jax.Array, start: jax.Array, length: jax.Array, tokens: jax.Array, kept: jax.Array
) -> Cache:
    """Stores `length` i32[1] tokens of a row i32[1] from `start` i32[1] on, for which chunks not `kept` go.

    `tokens` i32[1, max_chunk_len] are their name.
    """
    first, end, needs = start[0], start[0] + length[0], []
    for group in cache.config.groups:
        size = group.block_size
        num_columns = (end + size - 1) // size - first // size
        # Full blocks are the row's and the chunk's, unless they may be published.
        is_shared = not cache.config.enable_prefix_caching
        num_whole = jnp.maximum(end // size - (first + size - 1) // size, 0) if is_shared else 0
        needs.append(jnp.where(length[0] > 0, num_columns - num_whole, 0))
    num_places = (length[0] > 0).astype(jnp.int32)
    control = make_room(cache.control, kept, num_places, needs)
    cache = dataclasses.replace(cache, control=control)
    return store_chunk(cache, row, start, length, tokens)[0]


def refuse_windows(what: str, config: CacheConfig) -> None:
    """Refuses layers that let go of tokens."""
    for group in config.groups:
        if not group.span.keeps_all:
            raise ValueError(
                f"{what} and layers[{group.layer_ids[0]}] is {group.kind.label}, expected layers that keep "
                "all tokens; passages that requests name, kv.chunks.Prompts or Parts, may have these"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkParts(PromptParts):
    """Passages of an engine's requests, at any place: `kv.engine.Inputs(parts=kv.chunks.Parts(reuse=...))`.

    A request names them, `GenerationRequest(prompt, 9, inputs={"parts": [(3, 23)]})`, and its tokens are as
    with `generate` and `chunks.Prompts`. Each is computed once, alone, and kept in the cache's `Store`; one
    at a time, while other rows go on. Beside windows a request's passages lie within `max_query_len` tokens.

    Attributes:
      reuse: Says how chunks are composed, and how much of them is computed again; by a selector that looks at
        places or chance.
      max_parts: Most passages of a request.

    Raises:
      ValueError, TypeError: another selector, no number.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> passages = kv.chunks.Parts(reuse=kv.chunks.Reuse(rotate=rotate), max_parts=4)
      >>> inputs = kv.engine.Inputs(parts=passages)
    """

    reuse: ChunkReuse
    max_parts: int = 8

    def __post_init__(self):
        if not isinstance(self.reuse, ChunkReuse):
            raise TypeError(f"reuse is {self.reuse!r}, expected kv.chunks.Reuse(rotate=..., share=...)")
        if self.reuse.is_observed:
            raise ValueError(
                f"reuse has the selector {self.reuse.selector!r}, which looks at the model's first layers, "
                "expected one that an engine knows, such as 'first'; `generate` takes all"
            )
        object.__setattr__(self, "max_parts", static_count("max_parts", self.max_parts))

    def check(self, config: CacheConfig) -> None:
        """Refuses a cache without a store."""
        require_store("Engine", config)

    def spans(
        self, prompt: np.ndarray, parts: Sequence[tuple[int, int]], num_tokens: int, config: CacheConfig
    ) -> list[tuple[int, int]]:
        """Checks the passages of a request."""
        return request_spans(prompt, parts, num_tokens, config)

    def max_len(self, config: CacheConfig) -> int:
        """Counts the most tokens of a chunk."""
        return require_store("Engine", config).max_chunk_len

    def find(self, control: Control, tokens: jax.Array, length: jax.Array, namespace: jax.Array) -> jax.Array:
        """Finds chunks by name."""
        chunks = chunks_of(control)
        found = chunks.find(tokens, length, namespace)
        return jnp.where(found < chunks.num_chunks, found, NO_PART)

    def give_up(self, cache: Cache, num_blocks: jax.Array, kept: jax.Array) -> Cache:
        """Forgets the chunks of least value."""
        return dataclasses.replace(
            cache, control=make_room(cache.control, kept, jnp.int32(0), list(num_blocks))
        )

    def keep(
        self, cache: Cache, row: jax.Array, tokens: jax.Array, length: jax.Array, kept: jax.Array
    ) -> Cache:
        """Stores a chunk."""
        return keep_span(cache, row, jnp.zeros_like(length), length, tokens, kept)

    def put(
        self, cache: Cache, row: jax.Array, ids: jax.Array, starts: jax.Array, tokens: jax.Array
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Composes a row; the selector says which tokens are computed again."""
        chunks = chunks_of(cache.control)
        ids = jnp.where(ids == NO_PART, chunks.num_chunks, ids)
        length = jnp.where(ids < chunks.num_chunks, chunks.length[ids], 0)
        cache, status = compose(cache, row, ids, starts, rotate=self.reuse.rotate)
        share, seed = jnp.float32(self.reuse.share), jnp.uint32(self.reuse.seed)
        described = chunk_metadata(cache, ids, starts)
        is_again = selected(described, length, share, seed, selector=self.reuse.selector)
        return cache, status[0] == Status.OK, is_again
