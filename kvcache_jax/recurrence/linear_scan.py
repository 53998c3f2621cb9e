"""Linear recurrences of vectors, by an associative scan."""

import jax
import jax.numpy as jnp
from jax import lax


def linear_scan(initial: jax.Array, log_decay: jax.Array, added: jax.Array) -> jax.Array:
    """Computes `h <- exp(log_decay) h + added`, token by token.

    Args:
      initial: `[...]`, before the first token.
      log_decay: `[T, ...]`, at most 0; -inf begins anew.
      added: `[T, ...]`.

    Returns:
      f32[T, ...], after each token.
    """

    def joined(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]):
        return first[0] * second[0], second[0] * first[1] + second[1]

    decay, added = jnp.exp(log_decay.astype(jnp.float32)), added.astype(jnp.float32)
    added = added.at[0].add(decay[0] * initial.astype(jnp.float32))
    return lax.associative_scan(joined, (decay, added))[1]


def rg_lru(initial: jax.Array, log_decay: jax.Array, x: jax.Array) -> jax.Array:
    """Computes the gated linear recurrence `h <- a h + sqrt(1 - a^2) x` of `a = exp(log_decay)`.

    Arguments and result are as in `linear_scan`.

    References:
      Griffin (De et al.; arXiv:2402.19427).
    """
    share = -jnp.expm1(2 * log_decay.astype(jnp.float32))  # 1 - a^2
    # The gradient of a root of 0 is infinite: a token that changes nothing gets one of 0.
    is_positive = share > 0
    share = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, share, 1)), 0)
    return linear_scan(initial, log_decay, share * x.astype(jnp.float32))
