"""Sampling of tokens from logits: filters, and draws that depend on one row alone.

Arrays in, arrays out; nothing here knows of a cache. A draw depends on its row's seed and position alone,
so a row draws the same in any batch. Everything is float32 inside, whatever the dtype of the logits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import num_true
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.pytree import pytree_dataclass

_FLOAT32 = np.finfo(np.float32)

# Not the user's default: under vmap, the bits of an "rbg" key depend on the other rows.
_PRNG = "threefry2x32"


@pytree_dataclass()
class SamplingColumns:
    """Parameters by which each row draws its tokens; made by `sampling_columns`, which checks the values."""

    temperature: jax.Array  # f32[n], divides the logits; 0 takes the most probable token
    top_k: jax.Array  # i32[n], keeps that many tokens; 0 keeps all
    top_p: jax.Array  # f32[n], keeps the fewest tokens that have this mass; 1 keeps all
    min_p: jax.Array  # f32[n], keeps tokens at least this probable relative to the most probable; 0 keeps all
    seed: jax.Array  # u32[n], the row's stream of random numbers


def sampling_columns(
    num_rows: int,
    *,
    temperature: ArrayLike | Sequence[float] = 0.0,
    top_k: ArrayLike | Sequence[int] = 0,
    top_p: ArrayLike | Sequence[float] = 1.0,
    min_p: ArrayLike | Sequence[float] = 0.0,
    seed: ArrayLike | Sequence[int] = 0,
) -> SamplingColumns:
    """Makes the parameters of `num_rows` rows; each is one value for all rows, or one per row.

    A scalar `seed` gives row i the seed `bits(seed) + i` modulo 2**32, `bits` being 32 random bits drawn from
    `seed`: rows differ, consecutive seeds share no row in practice, and `num_rows` does not matter. Seeds
    given per row are taken as they are: equal ones draw equally. Values of tracers are not checked.

    Example:
      >>> params = sampling_columns(3, temperature=[0.0, 0.7, 1.0], top_p=0.9)
      >>> params.top_k
      Array([0, 0, 0], dtype=int32)
    """
    column = functools.partial(_column, static_count("num_rows", num_rows))
    seeds = column("seed", seed, np.uint32, "integers in [0, 2**32)", lambda x: (x >= 0) & (x < 2**32))
    if np.ndim(seed) == 0:
        first = jax.random.bits(jax.random.key(seeds[0], impl=_PRNG), dtype=jnp.uint32)
        seeds = first + jnp.arange(num_rows, dtype=jnp.uint32)
    return SamplingColumns(
        temperature=column(
            "temperature",
            temperature,
            np.float32,
            "0 to 8e37",  # XLA may multiply by the reciprocal, which above is too small for a float32
            lambda x: (x >= 0) & (x <= 8e37),
        ),
        top_k=column("top_k", top_k, np.int32, "integers in [0, 2**31)", lambda x: (x >= 0) & (x < 2**31)),
        top_p=column("top_p", top_p, np.float32, "above 0, at most 1", lambda x: (x > 0) & (x <= 1)),
        min_p=column("min_p", min_p, np.float32, "in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
        seed=seeds,
    )


@jax.jit
def filtered_logprobs(logits: jax.Array, params: SamplingColumns) -> jax.Array:
    """Computes the distribution that a row draws from: temperature, top-k, min-p and top-p, in this order.

    Each filter sees the tokens that the one before left, renormalised. Of equal tokens those with the lowest
    ids stay: top-k keeps exactly k, top-p the fewest with mass at least `top_p`, the one that crosses it
    included. One token always remains; at temperature 0, the first of the most probable. NaN logits count as
    -inf, and a row without any other keeps token 0. Logits are [n, vocab], of any floating dtype; the result
    is f32[n, vocab], log-probabilities, -inf for excluded tokens.

    References:
      Top-k: Fan, Lewis, Dauphin, "Hierarchical Neural Story Generation", arXiv:1805.04833.
      Top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
      Min-p: Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs",
      arXiv:2407.01082.

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.1, 0.1]]))
      >>> logprobs = filtered_logprobs(logits, sampling_columns(1, temperature=1.0, top_k=2))
      >>> [round(float(p), 3) for p in jnp.exp(logprobs[0])]
      [0.625, 0.375, 0.0, 0.0]
    """
    logits = _checked_logits(logits, params)
    is_greedy = (params.temperature < _FLOAT32.tiny)[:, None]
    top = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), _FLOAT32.min)
    # How far below the most probable token: 0 or more, and exactly 0 there however small the temperature.
    distance = (top - logits) / jnp.where(is_greedy, 1, params.temperature[:, None])
    is_kept = distance <= -jnp.log(params.min_p)[:, None]
    # 8 rows of 32,000 tokens on 2 cores: 15 ms with the sort, 1.3 ms without.
    is_kept = lax.cond(
        jnp.any((params.top_k > 0) | (params.top_p < 1)),
        lambda: is_kept & jax.vmap(_top_k_top_p)(distance, is_kept, params.top_k, params.top_p),
        lambda: is_kept,
    )
    filtered = jax.nn.log_softmax(jnp.where(is_kept, -distance, -jnp.inf))
    is_first = vocabulary(logits)[None] == _first_argmax(logits)[:, None]
    # A row of -inf alone is greedy too: it has no distribution.
    is_greedy |= jnp.isneginf(logits).all(axis=1, keepdims=True)
    return jnp.where(is_greedy, jnp.where(is_first, 0, -jnp.inf), filtered)


def _top_k_top_p(distance: jax.Array, is_kept: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Selects the tokens of one row that top-k, then `is_kept` (min-p), then top-p leave, bool[vocab]."""
    # Floats that are not negative sort as their bits do, and XLA sorts integers 3 to 6 times faster on a CPU.
    bits = lax.sort(lax.bitcast_convert_type(distance, jnp.int32), is_stable=False)
    ranked = lax.bitcast_convert_type(bits, jnp.float32)
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, ranked.size), ranked.size)
    has_mass = vocabulary(ranked) < jnp.minimum(top_k, num_true(is_kept))
    mass = jnp.cumsum(jnp.where(has_mass, jnp.exp(-ranked), 0))
    # Compared before normalising: equal tokens sum up without rounding. Rounding must not cut at top_p = 1.
    is_before = (mass < top_p * mass[-1]) | (top_p >= 1)
    num_kept = jnp.minimum(top_k, 1 + num_true(is_before[:-1]))
    last = ranked[num_kept - 1]
    is_tie = distance == last
    tie_rank = jnp.cumsum(is_tie, dtype=jnp.int32)
    return (distance < last) | (is_tie & (tie_rank <= num_kept - num_true(distance < last)))


@jax.jit
def row_keys(params: SamplingColumns, position: jax.Array) -> jax.Array:
    """Derives a random key per row from its seed and the position i32[n] of the token to draw, keys[n]."""
    position = with_shape("position", position, params.seed.shape, "one per row of params")
    keys = jax.vmap(functools.partial(jax.random.key, impl=_PRNG))(params.seed)
    return jax.vmap(jax.random.fold_in)(keys, position)


@jax.jit
def sample(logits: jax.Array, params: SamplingColumns, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws the next token i32[n] of each row from `filtered_logprobs` of logits [n, vocab].

    The row's seed and the token's `position` i32[n] in it decide the draw. If all rows are greedy, nothing is
    filtered and no random number is made. Returns also the token's log-probability f32[n] under the model's
    own distribution, at temperature 1 and unfiltered, as serving APIs report it; NaN where the row's logits
    hold NaN or +inf.

    Example:
      >>> logits = jnp.array([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]])
      >>> token, logprob = sample(logits, sampling_columns(2), jnp.array([4, 4]))
      >>> token
      Array([1, 2], dtype=int32)
    """
    checked = _checked_logits(logits, params)

    def draw() -> jax.Array:
        keys = row_keys(params, position)
        return jax.vmap(jax.random.categorical)(keys, filtered_logprobs(checked, params)).astype(jnp.int32)

    is_greedy = jnp.all(params.temperature < _FLOAT32.tiny)
    token = lax.cond(is_greedy, lambda: _first_argmax(checked), draw)
    logits = jnp.asarray(logits).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=1)


def are_numbers(logits: jax.Array) -> jax.Array:
    """Tests whether logits can be drawn from, bool[...]: no NaN, no +inf, and not all of them -inf."""
    # Not by their maximum: XLA's of many numbers passes over NaN on a CPU.
    return (logits < jnp.inf).all(axis=-1) & (logits > -jnp.inf).any(axis=-1)


def vocabulary(values: jax.Array) -> jax.Array:
    """Returns the ids along the last axis of `values`, i32[vocab]."""
    return jnp.arange(values.shape[-1], dtype=jnp.int32)


def _first_argmax(logits: jax.Array) -> jax.Array:
    """Finds the first greatest logit, i32[n].

    `jnp.argmax`, which also looks for NaN, takes three times as long on a CPU.
    """
    is_top = logits == jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_top, vocabulary(logits), logits.shape[1]), axis=1)


def _checked_logits(logits: Any, params: SamplingColumns) -> jax.Array:
    """Converts logits to f32[n, vocab] without NaN and +inf."""
    logits = jnp.asarray(logits)
    n = params.temperature.shape[0]
    if logits.ndim != 2 or logits.shape[0] != n or not logits.shape[1]:
        raise ValueError(f"logits has shape {logits.shape}, expected ({n}, vocab): a row per row of params")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits has dtype {logits.dtype}, expected a floating dtype")
    return without_nan(logits)


def without_nan(logits: jax.Array) -> jax.Array:
    """Replaces NaN by -inf and +inf by the largest number, f32[...]."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, _FLOAT32.max))


def with_shape(name: str, values: Any, shape: tuple[int, ...], what: str) -> jax.Array:
    """Converts `values` to an array of that shape, which `what` explains."""
    values = jnp.asarray(values)
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}, expected {shape}: {what}")
    return values


def _column(
    num_rows: int, name: str, values: Any, dtype: Any, expected: str, is_valid: Callable[[Any], Any]
) -> jax.Array:
    """Converts `values`, a scalar or one per row, to an array [num_rows] of `dtype`."""
    values = values if isinstance(values, Tracer) else np.asarray(values)
    is_number = jnp.issubdtype(values.dtype, np.integer) or jnp.issubdtype(values.dtype, np.floating)
    if not is_number or (np.issubdtype(dtype, np.integer) and not jnp.issubdtype(values.dtype, np.integer)):
        got = f"dtype {values.dtype}" if values.dtype != object else f"{values.tolist()!r}"
        raise TypeError(f"{name} has {got}, expected numbers: {expected}")
    if values.shape not in ((), (num_rows,)):
        raise ValueError(f"{name} has shape {values.shape}, expected one for all rows or ({num_rows},)")
    if not isinstance(values, Tracer) and not np.all(is_valid(values)):
        raise ValueError(f"{name} is {values[~is_valid(values)][0]}, expected {expected}")
    return jnp.broadcast_to(jnp.asarray(values.astype(dtype)), (num_rows,))
