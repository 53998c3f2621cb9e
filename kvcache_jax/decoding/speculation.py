"""Speculative decoding: drafts from the row's own text, and their verification.

Arrays in, arrays out; nothing here knows of a cache.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.decoding.sampling import (
    SamplingColumns,
    are_numbers,
    filtered_logprobs,
    row_keys,
    with_shape,
)

# Folded into a key to verify drafts with: callers draw the drafts from the key itself, or from its splits and
# small folds, which are the same (`split(key)[1]` is `fold_in(key, 1)`), and must not share their bits.
_VERIFICATION = 0x5BEC0DE


@jax.jit
def accept_drafts(
    target_logprobs: jax.Array,
    draft_tokens: jax.Array,
    num_drafts: jax.Array,
    draft_logprobs: jax.Array | None,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Verifies drafts such that emitted tokens are distributed as if drawn from the target, token by token.

    A draft is accepted with probability min(1, p/q), where p is its probability under the target and q under
    the draft model. At the first rejection the next token is drawn from max(p - q, 0), normalised; if all are
    accepted, from the target's next distribution. A one-hot target accepts its own token and no other.

    Drafts that are not random have q = 1. For such drafts the target's token is drawn at every place as
    `sample` draws it, and drafts are accepted as far as they agree: the emitted tokens equal plain
    decoding.

    Args:
      target_logprobs: f32[n, D + 1, vocab], entry d the target's distribution after d drafts: from
        `sampling.filtered_logprobs`.
      draft_tokens: i32[n, D]; an id outside the vocabulary is rejected.
      num_drafts: i32[n], how many of a row's drafts count, at most D.
      draft_logprobs: f32[n, D, vocab], the distributions that the drafts were drawn from, filters included;
        None if they are not random (`ngram_drafts`).
      keys: keys[n, D + 1], from `sampling.row_keys` with the position of each draft and of the token after
        them. Random drafts may be drawn from the same keys: the bits used here are others.

    Returns:
      num_accepted i32[n], and the token that follows them, i32[n].

    References:
      Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
      arXiv:2211.17192.
      Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper, "Accelerating Large Language Model Decoding with
      Speculative Sampling", arXiv:2302.01318.

    Example:
      >>> from kvcache_jax.decoding.sampling import row_keys, sampling_columns
      >>> target = jnp.log(jnp.array([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]))
      >>> keys = row_keys(sampling_columns(3), jnp.array([4, 5, 6]))[None]
      >>> accept_drafts(target, jnp.array([[1, 0]]), jnp.array([2]), None, keys)
      (Array([1], dtype=int32), Array([2], dtype=int32))
    """
    target, drafts = jnp.asarray(target_logprobs), jnp.asarray(draft_tokens)
    if target.ndim != 3 or not drafts.size or target.shape[:2] != (len(drafts), drafts.shape[-1] + 1):
        raise ValueError(
            f"target_logprobs has shape {target.shape} and draft_tokens {drafts.shape}, expected "
            "(n, D + 1, vocab) and (n, D), D at least 1; without drafts, use `sample`"
        )
    (n, most), vocab = drafts.shape, target.shape[2]
    num_drafts = with_shape("num_drafts", num_drafts, (n,), "one per row of draft_tokens")
    keys = with_shape("keys", keys, (n, most + 1), "one typed key per token, as `row_keys` makes them")
    columns = [target.astype(jnp.float32), drafts.astype(jnp.int32), num_drafts.astype(jnp.int32), keys]
    if draft_logprobs is not None:
        draft = with_shape("draft_logprobs", draft_logprobs, (n, most, vocab), "(n, D, vocab)")
        columns.append(draft.astype(jnp.float32))
    return jax.vmap(_accept_row)(*columns)


class Verified(NamedTuple):
    """The tokens that rows emit in a step with drafts, at most `D + 1`."""

    tokens: jax.Array  # i32[n, D + 1], accepted drafts, then the token drawn after them
    logprobs: jax.Array  # f32[n, D + 1], under the model's own distribution
    num_accepted: jax.Array  # i32[n], drafts
    num_drawn: jax.Array  # i32[n], places before the first that no token can be drawn at


def verify_drafts(
    logits: jax.Array,
    params: SamplingColumns,
    length: jax.Array,
    draft_tokens: jax.Array,
    num_drafts: jax.Array,
    draft_logprobs: jax.Array | None = None,
) -> Verified:
    """Draws the tokens of rows from logits f32[n, D + 1, vocab] after each row's last token and its drafts.

    Drafts are accepted as by `accept_drafts`; the first place to draw at is `length` i32[n]. A draw has the
    key of its seed and position, so that drafts do not change a row's tokens.
    """
    num_rows, width, vocab = logits.shape
    wide = jax.tree.map(lambda field: jnp.repeat(field, width, axis=0), params)
    target = filtered_logprobs(logits.reshape(num_rows * width, vocab), wide).reshape(logits.shape)
    positions = length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    keys = row_keys(wide, positions.reshape(-1)).reshape(num_rows, width)
    num_accepted, token = accept_drafts(target, draft_tokens, num_drafts, draft_logprobs, keys)
    tokens = jnp.concatenate([draft_tokens, jnp.zeros_like(token)[:, None]], axis=1)
    tokens = set_at(tokens, (jnp.arange(num_rows, dtype=jnp.int32), num_accepted), token)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=2)[..., 0]
    num_drawn = jnp.sum(jnp.cumprod(are_numbers(logits), axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return Verified(tokens, logprobs, num_accepted, num_drawn)


def _accept_row(
    target: jax.Array,
    drafts: jax.Array,
    num_drafts: jax.Array,
    keys: jax.Array,
    draft: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Verifies the drafts of one row; `draft` are the log-probabilities, `drafts` the tokens."""
    most, vocab = drafts.shape[0], target.shape[1]
    place = jnp.arange(most, dtype=jnp.int32)
    if draft is None:
        drawn = jax.vmap(jax.random.categorical)(keys, target).astype(jnp.int32)
        num_accepted = _num_leading((drawn[:-1] == drafts) & (place < num_drafts))
        return num_accepted, drawn[num_accepted]

    accept_key, draw_key = jax.random.split(jax.random.fold_in(keys[0], _VERIFICATION))
    ratio = target[place, drafts] - draft[place, drafts]
    is_accepted = jax.random.uniform(accept_key, (most,), jnp.float32) < jnp.exp(ratio)
    num_accepted = _num_leading(is_accepted & (place < num_drafts) & (drafts >= 0) & (drafts < vocab))
    # The place of the rejected draft; one past the end, where nothing is subtracted, if there is none.
    rejected = jnp.where(num_accepted < num_drafts, num_accepted, most)
    logprobs = target[num_accepted]
    residual = jnp.log(jnp.maximum(jnp.exp(logprobs) - jnp.exp(get_at(draft, rejected, -jnp.inf)), 0))
    # Only by rounding can a draft be rejected and leave nothing: p and q are then equal, and p is the answer.
    residual = jnp.where(jnp.isneginf(residual).all(), logprobs, residual)
    return num_accepted, jax.random.categorical(draw_key, residual).astype(jnp.int32)


def _num_leading(mask: jax.Array) -> jax.Array:
    """Counts the true entries before the first false one, i32[]."""
    return jnp.sum(jnp.cumprod(mask, dtype=jnp.int32), dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("num_drafts", "ngram"))
def ngram_drafts(
    tokens: jax.Array, length: jax.Array, num_drafts: int, ngram: int = 3
) -> tuple[jax.Array, jax.Array]:
    """Proposes the tokens i32[n, num_drafts] that followed the last occurrence of the row's ending.

    Looks for the most recent earlier occurrence of the row's last `ngram` tokens, which may overlap the end;
    if there is none, of its last `ngram - 1`, down to 1. A row has `length` i32[n] of `tokens` i32[n, T].
    Counts the tokens that are proposed, i32[n]; the others are 0.

    References:
      Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding.

    Example:
      >>> ngram_drafts(jnp.array([[5, 6, 7, 8, 9, 5, 6, 0]]), jnp.array([7]), 4)
      (Array([[7, 8, 9, 5]], dtype=int32), Array([4], dtype=int32))
    """
    num_drafts, ngram = static_count("num_drafts", num_drafts), static_count("ngram", ngram)
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}, expected integers [n, T] not empty")
    length = with_shape("length", length, tokens.shape[:1], "one per row of tokens").astype(jnp.int32)

    def find(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        # How many tokens before each place, up to `ngram`, are those before the end.
        run = jnp.zeros_like(place)
        for back in range(1, ngram + 1):
            ending = get_at(tokens, jnp.maximum(length - back, 0))
            is_longer = (run == back - 1) & (place >= back) & (jnp.roll(tokens, back) == ending)
            run += is_longer.astype(jnp.int32)
        run = jnp.where(place < length, run, 0)
        start = jnp.max(jnp.where((run > 0) & (run == jnp.max(run)), place, 0))
        count = jnp.where(start > 0, jnp.minimum(length - start, num_drafts), 0)
        ahead = jnp.arange(num_drafts, dtype=jnp.int32)
        drafts = get_at(tokens, start + ahead).astype(jnp.int32)
        return jnp.where(ahead < count, drafts, 0), count

    return jax.vmap(find)(tokens, length)
