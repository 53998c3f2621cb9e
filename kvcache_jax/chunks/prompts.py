"""Prompts that are put together from chunks: the missing are stored, all composed, some computed again."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import set_at
from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.gather import gather
from kvcache_jax.chunks.chunk_attention import chunk_attention
from kvcache_jax.chunks.chunk_reuse import ChunkReuse, Observe, Span, prompt_spans
from kvcache_jax.chunks.chunk_selector import (
    ChunkMetadata,
    chunk_metadata,
    num_of_share,
    select_tokens,
    selectors,
)
from kvcache_jax.chunks.chunk_store import chunks_of
from kvcache_jax.chunks.compose_chunks import compose
from kvcache_jax.chunks.store_chunk import find_chunks, store_chunk
from kvcache_jax.core.donate import donate
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status, raise_for_status
from kvcache_jax.decoding.forward import Forward, width_of
from kvcache_jax.decoding.prefill import FeedResult, feed, one_call_len
from kvcache_jax.decoding.prompts import PromptCall, PromptRows, PromptSource
from kvcache_jax.decoding.sampling import are_numbers
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.free import free
from kvcache_jax.operations.rewrite import rewrite
from kvcache_jax.operations.truncate import truncate

# Prompts of fewer chunks share their programs.
_FEWEST_CHUNKS = 4


class _Placed(NamedTuple):
    """The chunks of one row and their places, in numpy."""

    chunk_ids: np.ndarray  # i32[1, K], `num_chunks` for none
    starts: np.ndarray  # i32[1, K], first places
    lengths: np.ndarray  # i32[1, K], tokens, 0 for none
    is_composed: np.ndarray  # bool[max_seq_len], places of their tokens


class ChunkRows(PromptRows):
    """A call's prompts that are put together from chunks. A prompt without spans is left to ordinary prefill.

    A missing chunk is computed alone, at position 0 of an idle row, and nothing beside it. So a prompt's
    result is its own: it depends neither on chunks stored before nor on the other prompts, unless a caller
    stores chunks otherwise. After composed chunks, none could be stored from a prompt's own row.

    `num_reused_tokens` counts the tokens of chunks that were not computed again.
    """

    def __init__(self, call: PromptCall, spans: list[list[Span]], reuse: ChunkReuse):
        super().__init__(call)
        self.spans, self.reuse = spans, reuse

    def prefix_len(self, prompt_id: int) -> int:
        """Counts the tokens before a prompt's first chunk."""
        spans = self.spans[prompt_id]
        return spans[0][0] if spans else super().prefix_len(prompt_id)

    def hold(self, cache: Cache, prompt_id: int, row: int) -> tuple[Cache, list[int] | None]:
        """Finds a prompt's chunks, one per span; computes and stores those that are missing.

        One that cannot be computed, for its logits hold NaN, is `num_chunks`.
        """
        prompt, words = self.call.tokens[prompt_id], self.call.namespaces[prompt_id]
        texts = [prompt[start:end] for start, end in self.spans[prompt_id]]
        held = {}
        for tokens in texts:
            if (chunk_id := self._find(cache, tokens, words)) is not None:
                held[tokens.tobytes()] = chunk_id
        for tokens in texts:
            if tokens.tobytes() not in held:
                cache, chunk_id = self._store(cache, tokens, words, row, [*held.values()])
                if chunk_id is None:
                    return cache, None
                held[tokens.tobytes()] = chunk_id
        return cache, [held[tokens.tobytes()] for tokens in texts]

    def _find(self, cache: Cache, tokens: np.ndarray, words: np.ndarray) -> int | None:
        chunk_id = int(find_chunks(cache, chunk_name(cache, tokens), [len(tokens)], words)[0])
        return chunk_id if chunk_id < chunks_of(cache.control).num_chunks else None

    def _store(
        self, cache: Cache, tokens: np.ndarray, words: np.ndarray, row: int, kept: Sequence[int]
    ) -> tuple[Cache, int | None]:
        """Computes a chunk alone in an idle row and stores it; returns its id as `hold` does."""
        name, length = chunk_name(cache, tokens), np.array([len(tokens)])
        # Tokens that a window releases between two calls are missing where tokens are computed again.
        has_windows = not all(group.span.keeps_all for group in cache.config.groups)
        prefill_len = self.call.prefill_len
        if has_windows:
            prefill_len = max(prefill_len, min(one_call_len(name.shape[1]), cache.config.query_len_limit))

        def start(cache: Cache) -> tuple[Cache, int | None]:
            started, admission = allocate(
                cache, [row], length, tokens=name, namespace=words, reuse=not has_windows
            )
            return (started, int(admission.num_cached[0])) if _is_ok(admission.status) else (cache, None)

        def store(cache: Cache) -> tuple[Cache, int | None]:
            cache, stored = store_donated(cache, np.array([row]), np.array([0]), length, name)
            return cache, int(stored.chunk_ids[0]) if _is_ok(stored.status) else None

        cache, num_cached = self.with_room(cache, start, kept)
        if num_cached is None:
            return cache, None
        cache, fed = self._feed(cache, row, tokens, prefill_len)
        chunk_id = None
        if _is_ok(fed.status[row]):
            self.num_stored_tokens += len(tokens) - num_cached
            chunk_id = chunks_of(cache.control).num_chunks
            if are_numbers(fed.logits[row]):
                cache, chunk_id = self.with_room(cache, store, kept)
        cache, _ = free(cache, [row])
        return cache, chunk_id

    def _feed(self, cache: Cache, row: int, tokens: np.ndarray, prefill_len: int) -> tuple[Cache, FeedResult]:
        """Feeds a row, and no other, to the last of `tokens`."""
        history = np.zeros((cache.max_seqs, len(tokens)), np.int32)
        length = np.zeros(cache.max_seqs, np.int32)
        history[row], length[row] = tokens, len(tokens)
        call = self.call
        return feed(call.forward, call.params, cache, history, length, prefill_len=prefill_len)

    def fill(self, cache: Cache, prompt_id: int, row: int, parts: Sequence[int]) -> Cache:
        """Computes a row that was allocated for a prompt as far as its last chunk, but not its last token.

        The tokens before the first chunk are fed, all chunks are composed, and then everything that is
        to be computed after that is rewritten in order: texts between chunks, and tokens that were selected.
        """
        if not any(chunk_id < chunks_of(cache.control).num_chunks for chunk_id in parts):
            return cache
        prompt, rows, placed = (
            self.call.tokens[prompt_id],
            np.array([row]),
            self._placed(cache, prompt_id, parts),
        )
        first, last = np.flatnonzero(placed.is_composed)[[0, -1]].tolist()
        end = min(last + 1, len(prompt) - 1)  # the last token is always fed, for its logits
        cache, fed = self._feed(cache, row, prompt[:first], self.call.prefill_len)
        raise_for_status(fed.status[row], "computing the text in front of chunks")
        rotate = self.reuse.rotate
        cache, status = _compose_donated(cache, rows, placed.chunk_ids, placed.starts, rotate=rotate)
        raise_for_status(status, "composing chunks")
        cache, is_selected = self._select(cache, row, prompt, placed, first, end)
        is_again = (is_selected | ~placed.is_composed)[first:end]
        self.num_reused_tokens += int((~is_again).sum())
        outcomes = []
        for tokens, indices in self._pieces(cache, prompt, first + np.flatnonzero(is_again)):
            forward, params = self.call.forward, self.call.params
            cache, status = _rewrite_donated(forward, params, cache, rows, tokens, indices)
            outcomes.append(status)
        for status in outcomes:
            raise_for_status(status, "computing tokens of chunks again")
        if last == end:
            cache, status = truncate(cache, rows, [end])
            raise_for_status(status, "taking back the last token")
        return cache

    def _select(
        self,
        cache: Cache,
        row: int,
        prompt: np.ndarray,
        placed: _Placed,
        first: int,
        end: int,
    ) -> tuple[Cache, np.ndarray]:
        """Chooses the tokens of chunks that are computed again, bool[max_seq_len].

        Where the selector looks at more than places, all places from `first` to `end` that are not right are
        computed by the model's first layers before.
        """
        chunks = chunk_metadata(cache, placed.chunk_ids, placed.starts)
        reuse = self.reuse
        if reuse.is_observed:
            is_right = placed.is_composed & ~np.asarray(chunks.is_token[0])
            pieces = self._pieces(cache, prompt, first + np.flatnonzero(~is_right[first:end]))
            cache, observed = observe_chunks(
                reuse, self.call.params, cache, row, pieces, placed.starts, placed.lengths
            )
            chunks = chunks._replace(**observed)
        share, seed = np.float32(reuse.share), np.uint32(reuse.seed)
        is_selected = selected(chunks, placed.lengths, share, seed, selector=reuse.selector)
        return cache, np.asarray(is_selected)

    def _placed(self, cache: Cache, prompt_id: int, chunk_ids: Sequence[int]) -> _Placed:
        """Lists the chunks of a prompt that there are, as `compose` takes them."""
        nowhere = chunks_of(cache.control).num_chunks
        width = max(1 << (len(chunk_ids) - 1).bit_length(), _FEWEST_CHUNKS)
        placed = _Placed(
            chunk_ids=np.full((1, width), nowhere, np.int32),
            starts=np.zeros((1, width), np.int32),
            lengths=np.zeros((1, width), np.int32),
            is_composed=np.zeros(cache.config.max_seq_len, bool),
        )
        for i, (chunk_id, (start, end)) in enumerate(zip(chunk_ids, self.spans[prompt_id], strict=True)):
            if chunk_id < nowhere:
                placed.chunk_ids[0, i], placed.starts[0, i] = chunk_id, start
                placed.lengths[0, i] = end - start
                placed.is_composed[start:end] = True
        return placed

    def _pieces(
        self, cache: Cache, prompt: np.ndarray, places: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Splits ascending `places` of a prompt into tokens and places i32[1, prefill_len], for `rewrite`."""
        width = self.call.prefill_len
        for first in range(0, len(places), width):
            piece = places[first : first + width]
            tokens, indices = np.zeros((2, 1, width), np.int32)
            indices[:] = cache.config.max_seq_len
            tokens[0, : len(piece)], indices[0, : len(piece)] = prompt[piece], piece
            yield tokens, indices


def chunk_name(cache: Cache, tokens: np.ndarray) -> np.ndarray:
    """Pads the tokens of a chunk, i32[1, max_chunk_len]: chunks of any length share their programs."""
    name = np.zeros((1, chunks_of(cache.control).tokens.shape[1]), np.int32)
    name[0, : len(tokens)] = tokens
    return name


def _is_ok(status: jax.Array) -> bool:
    return int(np.asarray(status).reshape(())) == Status.OK


@functools.partial(jax.jit, static_argnames="selector")
def selected(
    chunks: ChunkMetadata, lengths: jax.Array, share: jax.Array, seed: jax.Array, *, selector: str
) -> jax.Array:
    """Chooses the tokens of one row's chunks that are computed again, bool[max_seq_len]."""
    chunks, width = chunks._replace(key=jax.random.key(seed)), chunks.is_token.shape[1]
    places = select_tokens(selector, chunks, num_of_share(share, lengths), max_select=width)[0]
    return set_at(jnp.zeros(width, bool), places, True)


store_donated = donate(store_chunk)
_compose_donated = jax.jit(compose, static_argnames="rotate", donate_argnames="cache")


@functools.partial(jax.jit, static_argnames="forward", donate_argnames="cache")
def _rewrite_donated(
    forward: Forward, params: Any, cache: Cache, rows: jax.Array, tokens: jax.Array, indices: jax.Array
) -> tuple[Cache, jax.Array]:
    """Computes tokens i32[1, T] of a row again; returns the status, i32[1]."""
    cache, step = rewrite(cache, rows, indices)
    result = forward(params, tokens, cache, step)
    width_of(result, cache, *tokens.shape)
    return result[1], step.status


@dataclasses.dataclass(frozen=True)
class Prompts(PromptSource):
    """Prompts that are put together from chunks: the `prompts` of `generate`, or the `context` of `score`.

    Each passage is computed once, alone, and kept in the cache's `Store`. A chunk that never finds room
    beside its prompt is computed as other text is.

    Attributes:
      tokens: Token ids of each prompt; one for `score`.
      spans: For each prompt the pairs `(start, end)` of its passages, at any place, in any order.
      reuse: Says how chunks are composed, and how much of them is computed again.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> composed = kv.chunks.Prompts([range(40)], [[(0, 20), (20, 35)]], kv.chunks.Reuse(rotate=rotate))
    """

    spans: Sequence[Sequence[tuple[int, int]]]
    reuse: ChunkReuse

    def rows(self, call: PromptCall) -> ChunkRows:
        """Checks the spans, and returns the prompts as rows are started for them.

        Raises:
          ValueError, TypeError: spans that are none, or a cache without a store of chunks.
        """
        return ChunkRows(call, prompt_spans(call, self.spans, self.reuse), self.reuse)


def observe_chunks(
    reuse: ChunkReuse,
    params: Any,
    cache: Cache,
    row: int,
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    starts: np.ndarray,
    lengths: np.ndarray,
) -> tuple[Cache, dict[str, jax.Array]]:
    """Computes composed tokens through a model's first layers, whose keys and values are right from then on.

    `pieces` are tokens i32[1, T] and their places i32[1, T], all of the row that are not right, in order;
    `starts` and `lengths` i32[1, K] are the places of its chunks. Returns fields of `chunks.Metadata` by
    name, f32[1, max_seq_len] each: deviations of the last layer's keys and values, and, if the selector asks
    for it, the attention that tokens give there to the tokens before their chunk.
    """
    observe, layer = reuse.observe, reuse.observed_layer
    assert observe is not None
    with_attention = "attention" in selectors.find(reuse.selector).needs
    before = gather(cache, row, layer)[:2]
    found, outcomes = {}, []
    if with_attention:
        found["attention"] = jnp.zeros((1, cache.config.max_seq_len), jnp.float32)
    for tokens, indices in pieces:
        cache, outside, status = _observe_piece(
            observe, params, cache, np.array([row]), tokens, indices, starts, lengths, layer, with_attention
        )
        outcomes.append(status)
        if with_attention:
            found["attention"] += outside
    for status in outcomes:
        raise_for_status(status, "observing chunks")
    after = gather(cache, row, layer)[:2]
    for name, old, new in zip(("k_deviation", "v_deviation"), before, after, strict=True):
        found[name] = _deviation(old, new)
    return cache, found


@functools.partial(jax.jit, static_argnames=("observe", "layer", "with_attention"), donate_argnames="cache")
def _observe_piece(
    observe: Observe,
    params: Any,
    cache: Cache,
    rows: jax.Array,
    tokens: jax.Array,
    indices: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    layer: int,
    with_attention: bool,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Computes one piece; returns also f32[1, max_seq_len], attention to earlier tokens, and the status."""
    cache, step = rewrite(cache, rows, indices)
    queries, cache = _checked(observe(params, tokens, cache, step))
    if not with_attention:
        return cache, jnp.zeros((1, cache.config.max_seq_len), jnp.float32), step.status
    scores = attention_scores(cache, layer, queries, step)
    return cache, chunk_attention(scores, indices, starts, lengths), step.status


def _checked(result: Any) -> tuple[jax.Array, Cache]:
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and isinstance(result[0], jax.Array) and isinstance(result[1], Cache)):
        kind = ", ".join(type(part).__name__ for part in result) if is_pair else type(result).__name__
        raise TypeError(f"observe returned ({kind}), expected (queries, cache)")
    return result


@jax.jit
def _deviation(old: jax.Array, new: jax.Array) -> jax.Array:
    """Sums squared differences of keys or values [max_seq_len, heads, features], f32[1, max_seq_len]."""
    difference = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.sum(difference**2, axis=(1, 2))[None]
