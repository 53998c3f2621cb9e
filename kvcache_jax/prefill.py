"""Prompts, and other tokens that are known: fed to anybody's model in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.cache import extend
from kvcache_jax.forward import Forward, vocab_size
from kvcache_jax.indexing import get_at
from kvcache_jax.prefix_cache import commit
from kvcache_jax.sampling import are_numbers
from kvcache_jax.state import Cache, Step
from kvcache_jax.status import Status


def prefill(
    forward: Forward,
    params: Any,
    cache: Cache,
    prompts: ArrayLike,
    prompt_len: ArrayLike,
    seq_ids: ArrayLike,
    *,
    chunk_len: int,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Feeds rows from their `context_len` to their `prompt_len`, at most `chunk_len` tokens at a time.

    With prefix caching it commits them, but for those whose logits hold NaN or +inf.

    Args:
      forward: The model.
      params: Its parameters.
      cache: Donated.
      prompts: i32[n, P].
      prompt_len: i32[n]; rows that are already there do not take part.
      seq_ids: i32[n]; `max_seqs` for none.
      chunk_len: Most tokens of a row in one call.

    Returns:
      The cache; logits f32[n, vocab] of each row's last prompt token, 0 for rows that take no part; and
      status i32[n]: of the `extend` that failed, OK for all other rows.
    """
    held = np.append(np.asarray(cache.context_len), np.iinfo(np.int32).max)[np.asarray(seq_ids)]
    chunk_len = fitting_chunk(chunk_len, np.asarray(prompt_len) - held)
    return prefill_in_chunks(forward, params, cache, prompts, prompt_len, seq_ids, chunk_len=chunk_len)


def fitting_chunk(chunk_len: int, num_tokens: np.ndarray) -> int:
    """`chunk_len`, or a quarter of it if no row has more tokens: what a chunk leaves empty is computed too.

    What is left of a prompt behind a cached prefix is short, and so are most continuations to be scored.
    """
    quarter = chunk_len // 4
    return quarter if 0 < num_tokens.max() <= quarter else chunk_len


@functools.partial(jax.jit, static_argnames=("forward", "chunk_len"), donate_argnames="cache")
def prefill_in_chunks(
    forward: Forward,
    params: Any,
    cache: Cache,
    prompts: jax.Array,
    prompt_len: jax.Array,
    seq_ids: jax.Array,
    *,
    chunk_len: int,
) -> tuple[Cache, jax.Array, jax.Array]:
    """`prefill` with chunks of just `chunk_len` tokens."""

    def keep_last(last_logits: jax.Array, logits: jax.Array, step: Step) -> jax.Array:
        is_last = (step.query_len > 0) & (step.context_len == prompt_len)
        last = jnp.maximum(step.query_len - 1, 0)
        ends = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
        return jnp.where(is_last[:, None], ends, last_logits)

    no_logits = jnp.zeros((seq_ids.shape[0], vocab_size(forward, params, cache)), jnp.float32)
    cache, last_logits, status = feed_rows(
        forward, params, cache, prompts, prompt_len, seq_ids, keep_last, no_logits, chunk_len=chunk_len
    )
    if cache.config.enable_prefix_caching:
        cache, _ = commit(cache, jnp.where(are_numbers(last_logits), seq_ids, cache.max_seqs))
    return cache, last_logits, status


def feed_rows[T](
    forward: Forward,
    params: Any,
    cache: Cache,
    history: jax.Array,
    length: jax.Array,
    seq_ids: jax.Array,
    note: Callable[[T, jax.Array, Step], T],
    notes: T,
    *,
    chunk_len: int,
) -> tuple[Cache, T, jax.Array]:
    """Feeds rows from their `context_len` to `length`, `chunk_len` tokens at a time; within jit.

    Args:
      forward: The model.
      params: Its parameters.
      cache: The rows'.
      history: i32[n, P], tokens of each row from its beginning.
      length: i32[n]; rows that are already there take no part.
      seq_ids: i32[n]; `max_seqs` for none.
      note: `(notes, logits [n, chunk_len, vocab], step) -> notes`, what to keep of each chunk.
      notes: To begin with, a pytree of arrays.
      chunk_len: Tokens of a row in one call.

    Returns:
      The cache; the notes; and status i32[n]: of the `extend` that failed, OK for all other rows.
    """

    def num_left(cache: Cache, status: jax.Array) -> jax.Array:
        held = get_at(cache.context_len, seq_ids, np.iinfo(np.int32).max)
        return jnp.where(status == Status.OK, jnp.maximum(length - held, 0), 0)

    def feed(state):
        cache, notes, status = state
        num_new = jnp.minimum(num_left(cache, status), chunk_len)
        first = get_at(cache.context_len, seq_ids, 0)
        at = first[:, None] + jnp.arange(chunk_len, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(history, jnp.minimum(at, history.shape[1] - 1), axis=1)
        cache, step = extend(cache, num_new, max_new=chunk_len, seq_ids=seq_ids, tokens=tokens)
        logits, cache = forward(params, tokens, cache, step)
        return cache, note(notes, logits, step), jnp.where(num_new > 0, step.status, status)

    def is_left(state):
        cache, _, status = state
        return (num_left(cache, status) > 0).any()

    return lax.while_loop(is_left, feed, (cache, notes, jnp.full(seq_ids.shape, Status.OK, jnp.int32)))
