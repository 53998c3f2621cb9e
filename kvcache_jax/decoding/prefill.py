"""Prefill for any model: one program feeds it prompts, or other known tokens, whatever their number.

A call of the model takes `P` pieces of `T` tokens. Rows lie end to end in it: each has as many pieces as its
tokens fill, one after the other, and only its last piece has room left. `extend` reserves their slots as one
packed step. The model is handed the pieces as a padded step `[P, T]`, so that any `forward` serves.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.core.status import Status
from kvcache_jax.decoding.forward import Forward, width_of
from kvcache_jax.decoding.own_prompts import drop_unseen
from kvcache_jax.decoding.prompts import KEEP_ALL, Retention
from kvcache_jax.decoding.sampling import are_numbers
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.operations.commit import commit
from kvcache_jax.operations.extend import extend

_PIECES = 4
"""Per call, at least: a row leaves less than a quarter of a call empty."""


class Pieces(NamedTuple):
    """The tokens of one call of the model, in numpy: `P` pieces of `T`."""

    tokens: np.ndarray  # i32[P, T]; 0 where there is none
    targets: np.ndarray  # i32[P, T], the token after each
    rows: np.ndarray  # i32[P], row of each piece; `max_seqs` for a piece without row
    first: np.ndarray  # i32[P], position of its first token
    nth: np.ndarray  # i32[P], its number among the row's pieces in this call
    num_tokens: np.ndarray  # i32[P]
    last_of: np.ndarray  # i32[P], the row whose last token ends the piece; `max_seqs` for none


class Scores(NamedTuple):
    """Log-probabilities of the tokens that follow the tokens of a call."""

    logprobs: jax.Array  # f32[P, T], log-probability of each target
    is_greedy: jax.Array  # bool[P, T], whether no token is more probable than the target
    is_scored: jax.Array  # bool[P, T], whether its logits are numbers


class FeedResult(NamedTuple):
    """Results of `feed`, by row."""

    # f32[max_seqs, vocab], after each row's last token; 0 for rows that were fed nothing. If no row was fed
    # anything, `vocab` is 0.
    logits: jax.Array
    status: jax.Array  # i32[max_seqs], of the `extend` that failed; OK for other rows
    scores: list[tuple[Pieces, Scores]]  # of each call, if they were asked for


def prefill(
    forward: Forward,
    params: Any,
    cache: Cache,
    history: np.ndarray,
    length: np.ndarray,
    *,
    prefill_len: int,
    is_scoring: bool = False,
    retention: Retention = KEEP_ALL,
) -> tuple[Cache, FeedResult]:
    """Feeds prompts as `feed` does; with prefix caching commits after each call.

    In the next one windows and states leave. What gave logits that are no numbers is not published.
    """
    options: dict[str, Any] = dict(prefill_len=prefill_len, is_scoring=is_scoring, retention=retention)
    is_caching = cache.config.enable_prefix_caching
    return feed(forward, params, cache, history, length, commits=is_caching, **options)


def feed(
    forward: Forward,
    params: Any,
    cache: Cache,
    history: np.ndarray,
    length: np.ndarray,
    *,
    prefill_len: int,
    is_scoring: bool = False,
    retention: Retention = KEEP_ALL,
    commits: bool = False,
) -> tuple[Cache, FeedResult]:
    """Feeds rows from their `context_len` to their `length` i32[max_seqs]; the cache is donated.

    A call of the model takes at most `prefill_len` tokens of `history` i32[max_seqs, P], each row's tokens
    from its beginning. With `is_scoring` each is scored by the logits before it. Rows that drop tokens start
    empty.
    """
    max_seqs = cache.max_seqs
    status, logits, scores = np.zeros(max_seqs, np.int32), jnp.zeros((max_seqs, 0), jnp.float32), []
    for pieces in _calls(np.asarray(cache.context_len), history, length, _empty_pieces(prefill_len, cache)):
        cache, status, ends, scored = _feed_pieces(
            forward, params, cache, status, pieces, is_scoring=is_scoring, retention=retention
        )
        if not logits.size:
            logits = np.zeros((max_seqs, ends.shape[1]), np.float32)
        logits = _with_ends(logits, ends, pieces.last_of)
        if scored is not None:
            scores.append((pieces, scored))
        if commits:
            goes_on = np.append(pieces.rows[:-1] == pieces.rows[1:], False)
            rows = np.where(goes_on, max_seqs, pieces.rows)
            cache, _ = commit(cache, _with_numbers(ends, rows, max_seqs), is_end=False)
    return cache, FeedResult(jnp.asarray(logits), jnp.asarray(status), scores)


def one_call_len(num_tokens: int) -> int:
    """Returns the least `prefill_len` with which one call takes so many tokens of a row."""
    return ceil_div(num_tokens, _PIECES) * _PIECES


def vocab_size(forward: Forward, params: Any, cache: Cache, prefill_len: int) -> int:
    """Returns the width of the model's logits; `feed` reuses the program traced here."""
    pieces = _empty_pieces(prefill_len, cache)
    status = np.zeros(cache.max_seqs, np.int32)
    options: dict[str, Any] = dict(is_scoring=False, retention=KEEP_ALL)
    return _feed_pieces.eval_shape(forward, params, cache, status, pieces, **options)[2].shape[1]


def _calls(
    context_len: np.ndarray, history: np.ndarray, length: np.ndarray, empty: Pieces
) -> Iterator[Pieces]:
    """Splits every row's tokens from `context_len` to `length` into calls, in numpy; lower rows first."""
    num_pieces, piece_len = empty.tokens.shape
    cuts = [
        (row, first)
        for row in np.flatnonzero(context_len < length).tolist()
        for first in range(context_len[row], length[row], piece_len)
    ]
    for start in range(0, len(cuts), num_pieces):
        pieces = Pieces(*(x.copy() for x in empty))
        for i, (row, first) in enumerate(cuts[start : start + num_pieces]):
            tokens, targets = (
                history[row, first : length[row]][:piece_len],
                history[row, first + 1 :][:piece_len],
            )
            pieces.tokens[i, : len(tokens)], pieces.targets[i, : len(targets)] = tokens, targets
            pieces.rows[i], pieces.first[i], pieces.num_tokens[i] = row, first, len(tokens)
            follows = i > 0 and pieces.rows[i - 1] == row
            pieces.nth[i] = pieces.nth[i - 1] + 1 if follows else 0
            if first + len(tokens) == length[row]:
                pieces.last_of[i] = row
        yield pieces


def _empty_pieces(prefill_len: int, cache: Cache) -> Pieces:
    """Makes empty pieces for a call of at most `prefill_len` tokens."""
    piece_len = cache.config.piece_len(ceil_div(prefill_len, _PIECES))
    num_pieces = prefill_len // piece_len
    tokens, zeros = np.zeros((num_pieces, piece_len), np.int32), np.zeros(num_pieces, np.int32)
    no_rows = np.full(num_pieces, cache.max_seqs, np.int32)
    return Pieces(tokens, tokens, no_rows, zeros, zeros, zeros, no_rows)


@functools.partial(jax.jit, static_argnames=("forward", "is_scoring", "retention"), donate_argnames="cache")
def _feed_pieces(
    forward: Forward,
    params: Any,
    cache: Cache,
    status: jax.Array,
    pieces: Pieces,
    *,
    is_scoring: bool,
    retention: Retention,
) -> tuple[Cache, jax.Array, jax.Array, Scores | None]:
    """Calls the model once on pieces; rows whose `status` i32[max_seqs] is not OK are left out.

    Returns also the new status, and the logits f32[P, vocab] after each piece's last token.
    """
    num_pieces, piece_len = pieces.tokens.shape
    # A packed step's entries: at each piece the row that begins there, with the tokens of all its pieces, and
    # the piece's padding, which belongs to no row.
    begins = (pieces.nth == 0) & (get_at(status, pieces.rows, Status.SKIPPED) == Status.OK)
    order = jnp.arange(num_pieces, dtype=jnp.int32)
    num_new = jnp.zeros(num_pieces, jnp.int32).at[order - pieces.nth].add(pieces.num_tokens)
    rows = jnp.where(begins, pieces.rows, cache.max_seqs)
    entries = jnp.stack([rows, jnp.full_like(rows, cache.max_seqs)], axis=1).reshape(-1)
    lens = jnp.stack([num_new, piece_len - pieces.num_tokens], axis=1).reshape(-1)
    cache = drop_unseen(retention, cache, rows)
    cache, step = extend(
        cache, lens, num_tokens=pieces.tokens.size, seq_ids=entries, tokens=pieces.tokens.reshape(-1)
    )
    status = jnp.asarray(status).at[rows].set(step.status[::2], mode="drop")

    step = padded_step(step, 2 * (order - pieces.nth), pieces.first, pieces.num_tokens, pieces.tokens.shape)
    # Of the first token's window the others of a call do not see all.
    step = plan_attention(cache, step, within=retention.span)
    result = forward(params, jnp.asarray(pieces.tokens), cache, step)
    width_of(result, cache, num_pieces, piece_len)
    logits, cache = result
    last = jnp.maximum(step.query_len - 1, 0)[:, None, None]
    ends = jnp.take_along_axis(logits, last, axis=1)[:, 0].astype(jnp.float32)
    ends = jnp.where(step.query_len[:, None] > 0, ends, 0)
    if not is_scoring:
        return cache, status, ends, None
    of_all = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    logprobs = jnp.take_along_axis(of_all, jnp.asarray(pieces.targets)[..., None], axis=2)[..., 0]
    return cache, status, ends, Scores(logprobs, logprobs >= of_all.max(axis=-1), are_numbers(logits))


def padded_step(
    step: Step, entry: jax.Array, first: ArrayLike, num_tokens: ArrayLike, shape: tuple[int, ...]
) -> Step:
    """Converts a packed step, the pieces' rows end to end, to a padded one of pieces, without plans.

    Each piece, of `shape` `(P, T)`, has `num_tokens` i32[P] from the position `first` i32[P] of the text on;
    its row is the `entry` i32[P] of the packed step.
    """
    query_len = jnp.where(step.query_len[entry] > 0, jnp.asarray(num_tokens), 0)
    follows = jnp.concatenate([jnp.zeros_like(entry[:1], bool), entry[1:] == entry[:-1]])
    shift = None if step.shift is None else step.shift.reshape(shape)
    place = jnp.asarray(first)
    if shift is not None:
        place -= shift[:, 0]
    return dataclasses.replace(
        step,
        status=step.status[entry],
        seq_ids=step.seq_ids[entry],
        query_len=query_len,
        context_len=jnp.where(query_len > 0, place + query_len, step.context_len[entry]),
        positions=step.positions.reshape(shape),
        shift=shift,
        slots=tuple(slots.reshape(shape) for slots in step.slots),
        plans=(),
        cu_query_lens=None,
        follows=follows,
    )


@jax.jit
def _with_ends(logits: jax.Array, ends: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.asarray(logits).at[rows].set(ends, mode="drop")


@functools.partial(jax.jit, static_argnames="max_seqs")
def _with_numbers(logits: jax.Array, rows: jax.Array, max_seqs: int) -> jax.Array:
    """Keeps the `rows` i32[n] whose logits f32[n, vocab] are numbers; `max_seqs` replaces the others."""
    return jnp.where(are_numbers(logits), rows, max_seqs).astype(jnp.int32)
