"""Groups of answers that share their prompt: drawn, and scored again with a gradient, both through the cache.

A prompt is computed in one row, which is forked to the rows of its group. Whole blocks are shared; the last,
which a prompt fills in part, is copied when a row writes after it. Gradients come back through forks and
copies, so what a trainer computes of a prompt is computed once too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from experiments.rollouts.task import MAX_ANSWER, STOP, Prompts
from models.decoder import Decoder, DecoderConfig, cache_config, forward

BLOCK_SIZE = 16


class Rollouts(NamedTuple):
    """Answers to `n` prompts, `G` to each, side by side.

    Attributes:
      tokens: i32[n * G, MAX_ANSWER]; 0 where there is none.
      logprobs: f32[n * G, MAX_ANSWER], of each token when it was drawn; 0 where there is none.
      mask: bool[n * G, MAX_ANSWER], the tokens up to `STOP`, which is one of them.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array


def cache_sizes(config: DecoderConfig, prompts: Prompts, group_size: int) -> kv.CacheConfig:
    """Sizes a cache for these prompts: their blocks once, and those that answers are written to."""
    num_prompts, max_prompt = prompts.tokens.shape
    num_rows = num_prompts * group_size
    shared = -(-max_prompt // BLOCK_SIZE) if group_size > 1 else 0
    longest = max_prompt + MAX_ANSWER
    # After a fork a row has the copy of a last block, and what answers add to it.
    own = 1 + -(-MAX_ANSWER // BLOCK_SIZE) if group_size > 1 else -(-longest // BLOCK_SIZE)
    sizes = dict(block_size=BLOCK_SIZE, max_seqs=num_rows, max_seq_len=longest)
    return cache_config(config, **sizes, num_blocks=num_prompts * shared + num_rows * own)


def read_prompts(
    decoder: Decoder, prompts: Prompts, group_size: int
) -> tuple[kv.Cache, jax.Array, jax.Array]:
    """Computes each prompt once and forks it to its group.

    Returns:
      The cache of `n * group_size` rows, f32[n * group_size, vocab], the logits after the prompts, and
      bool[], whether every row got its blocks.
    """
    num_prompts, max_prompt = prompts.tokens.shape
    rows = jnp.arange(num_prompts * group_size, dtype=jnp.int32)
    first = rows // group_size * group_size
    cache = kv.init(cache_sizes(decoder.config, prompts, group_size))
    cache, admitted = kv.allocate(cache, first[::group_size], prompts.length)
    cache, step = kv.extend(cache, prompts.length, max_new=max_prompt, seq_ids=first[::group_size])
    logits, cache = forward(decoder, jnp.asarray(prompts.tokens), cache, step)
    last = jnp.asarray(prompts.length)[:, None, None] - 1
    logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
    is_ok = (admitted.status == kv.Status.OK).all() & (step.status == kv.Status.OK).all()
    if group_size > 1:
        others = jnp.where(rows == first, cache.max_seqs, rows)
        cache, status = kv.fork(cache, first, others)
        is_ok &= ((status == kv.Status.OK) | (rows == first)).all()
    return cache, jnp.repeat(logits, group_size, axis=0), is_ok


def roll_out(decoder: Decoder, prompts: Prompts, key: jax.Array, group_size: int) -> Rollouts:
    """Draws `group_size` answers to each prompt; log-probabilities are NaN if blocks were short."""
    cache, logits, is_ok = read_prompts(decoder, prompts, group_size)
    is_open = jnp.ones(len(logits), bool)
    token, logprob = _draw(key, 0, logits)

    def go_on(carry: tuple, place: jax.Array) -> tuple:
        cache, token, is_open, is_ok = carry
        is_open &= token != STOP
        cache, step = kv.extend(cache, is_open.astype(jnp.int32), max_new=1)
        logits, cache = forward(decoder, token[:, None], cache, step)
        token, logprob = _draw(key, place, logits[:, 0])
        is_ok &= (step.status == kv.Status.OK).all()
        return (cache, token, is_open, is_ok), (token, logprob, is_open)

    carry = cache, token, is_open, is_ok
    (*_, is_ok), behind = jax.lax.scan(go_on, carry, jnp.arange(1, MAX_ANSWER))
    first = token, logprob, is_open
    tokens, logprobs, mask = (
        jnp.concatenate([one[None], more]).T for one, more in zip(first, behind, strict=True)
    )
    logprobs = jnp.where(is_ok, logprobs, jnp.nan)
    return Rollouts(jnp.where(mask, tokens, 0), jnp.where(mask, logprobs, 0), mask)


def score(decoder: Decoder, prompts: Prompts, rollouts: Rollouts) -> jax.Array:
    """Computes the log-probabilities f32[n * G, MAX_ANSWER] of answers, all at once; differentiable."""
    group_size = len(rollouts.tokens) // len(prompts.tokens)
    cache, first, is_ok = read_prompts(decoder, prompts, group_size)
    tokens = rollouts.tokens[:, :-1]
    num_new = jnp.sum(rollouts.mask[:, 1:], axis=1, dtype=jnp.int32)
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1])
    logits, _ = forward(decoder, tokens, cache, step)
    logits = jnp.concatenate([first[:, None], logits], axis=1)
    is_ok &= (step.status == kv.Status.OK).all()
    # A row says nothing after its answer, and no number comes of it.
    logits = jnp.where(rollouts.mask[..., None], logits, 0)
    logprobs = jnp.where(is_ok, _of_tokens(logits, rollouts.tokens), jnp.nan)
    return jnp.where(rollouts.mask, logprobs, 0)


def without_sharing(prompts: Prompts, group_size: int) -> Prompts:
    """Repeats each prompt, so that every row of its group computes it by itself."""
    return Prompts(*(jnp.repeat(jnp.asarray(x), group_size, axis=0) for x in prompts))


def _draw(key: jax.Array, place: jax.typing.ArrayLike, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    token = jax.random.categorical(jax.random.fold_in(key, place), logits).astype(jnp.int32)
    return token, _of_tokens(logits, token)


def _of_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
