"""Matrix states of linear attention, which new tokens read and fold into, without a state per token.

A head's state is a matrix `S [value_dim, key_dim]`. A token has a query and a key `q, k [key_dim]`, a change
`u [value_dim]`, and a log decay `g` of at most 0, one number or one per key channel:

    S <- exp(g) S + u (x) k,    o = S q

Mamba-2 gives `u`. Gated DeltaNet and Kimi Delta Attention correct what the state says of the key already:
`u = beta (v - exp(g) S k)`.

The entries `(k, u, g)` of the tokens since a state `S_0` say what the state is after each of them:

    S_i = exp(g_1 + ... + g_i) S_0 + sum over j <= i of exp(g_j+1 + ... + g_i) u_j (x) k_j

So new tokens read `S_0` and the entries held since, and how they correct one another follows from one
triangular system. An exponent is a sum over a range of tokens, never a difference of two sums: it is at most
0, it is exact after strong decays, and -inf is a decay too.

References:
  Gated Delta Networks (Yang et al.; arXiv:2412.06464), Kimi Linear (Kimi Team; arXiv:2510.26692),
  Transformers are SSMs (Dao and Gu; arXiv:2405.21060).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Entries(NamedTuple):
    """Changes of a state, one per token; a token of zeros changes nothing.

    Attributes:
      k: `[tokens, key_heads, key_dim]`; a key head serves `heads // key_heads` consecutive heads.
      u: `[tokens, heads, value_dim]`.
      g: `[tokens, heads]`, or `[tokens, heads, key_dim]` for a decay per channel; at most 0.
    """

    k: jax.Array
    u: jax.Array
    g: jax.Array


def advance(
    state: jax.Array,
    held: Entries,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes what new tokens read and change after the held ones; the state stays as it is.

    Args:
      state: f32[heads, value_dim, key_dim], before the held tokens.
      held: Of the tokens since then, in order; zeros anywhere for none.
      q: `[T, key_heads, key_dim]`, scaled.
      k: `[T, key_heads, key_dim]`.
      v: `[T, heads, value_dim]`: the values; without `beta`, the changes.
      g: As in `Entries`, of the new tokens.
      beta: `[T, heads]`, the shares by which the state is corrected; None for changes as given.

    Returns:
      Outputs and changes, f32[T, heads, value_dim].
    """
    q, k, v, g, held_k, held_u, held_g = _in_float32(q, k, v, g, *held)
    g, held_g = _with_channels(g), _with_channels(held_g)  # [tokens, heads, 1 or key_dim]
    # Keys and queries read side by side, so that the state is read once.
    x = q[None] if beta is None else jnp.stack([k, q])
    since_held = jnp.cumsum(g, axis=0)
    read = _read(x, state, since_held + held_g.sum(axis=0, keepdims=True))
    read += _einsum("nhtj,jhv->nthv", _products(x, held_k, since_held, _sums_after(held_g)), held_u)
    own = _own_products(x, k, g)  # [n, heads, T, T]
    u = v
    if beta is not None:
        beta = beta.astype(jnp.float32)[..., None]
        u = beta * (v - read[0])
        if len(u) > 1:
            u = _einsum("htj,jhv->thv", _inverse(jnp.swapaxes(beta, 0, 1) * own[0]), u)
    return read[-1] + _einsum("htj,jhv->thv", own[-1], u), u


def fold(state: jax.Array, entries: Entries) -> jax.Array:
    """Computes the state after the entries, f32[heads, value_dim, key_dim], as `advance` takes them."""
    k, u, g = _in_float32(*entries)
    g = _with_channels(g)
    k = _per_head(k, g.shape[1]) * jnp.exp(_sums_after(g))
    return jnp.exp(g.sum(axis=0))[:, None] * state + _einsum("jhk,jhv->hvk", k, u)


def _read(x: jax.Array, state: jax.Array, log_decay: jax.Array) -> jax.Array:
    """Multiplies `x [n, T, key_heads, key_dim]` by a state that decayed: `[n, T, heads, value_dim]`."""
    return _einsum("nthk,hvk->nthv", _per_head(x, len(state)) * jnp.exp(log_decay)[None], state)


def _products(x: jax.Array, k: jax.Array, since: jax.Array, until: jax.Array) -> jax.Array:
    """Multiplies tokens by keys of earlier ones, which decay until a point between them and since then.

    Args:
      x: `[n, T, key_heads, key_dim]`.
      k: `[J, key_heads, key_dim]`.
      since: `[T, heads, 1 or key_dim]`, sums of log decays.
      until: `[J, heads, 1 or key_dim]`.

    Returns:
      `[n, heads, T, J]`.
    """
    num_heads, num_channels = since.shape[1:]
    if num_channels == 1:  # the decay follows the product, which key heads share
        products = _einsum("ntgk,jgk->ngtj", x, k)
        products = jnp.repeat(products, num_heads // products.shape[1], axis=1)
        decay = jnp.exp(since[:, None, :, 0] + until[None, :, :, 0])  # [T, J, heads]
        return products * jnp.moveaxis(decay, 2, 0)[None]
    x, k = (_per_head(each, num_heads) for each in (x, k))
    return _einsum("nthk,jhk->nhtj", x * jnp.exp(since)[None], k * jnp.exp(until))


def _own_products(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """Multiplies tokens by their own key and by earlier ones, as `_products`: `[n, heads, T, T]`.

    Above the diagonal it is 0.

    Tokens of the second half meet keys of the first at the point between, and each half is halved again.
    """
    num_tokens = len(g)
    if num_tokens == 1:
        return jnp.repeat(_einsum("ntgk,tgk->ngt", x, k), g.shape[1] // k.shape[1], axis=1)[..., None]

    def halved(x: jax.Array) -> jax.Array:
        padding = jnp.zeros_like(x[: num_tokens % 2])
        return jnp.concatenate([x, padding]).reshape(2, -1, *x.shape[1:])

    x, k, g = jnp.moveaxis(halved(jnp.moveaxis(x, 1, 0)), 2, 1), halved(k), halved(g)
    first, second = jax.vmap(_own_products)(x, k, g)
    across = _products(x[1], k[0], jnp.cumsum(g[1], axis=0), _sums_after(g[0]))
    return _lower_triangular(first, across, second)[..., :num_tokens, :num_tokens]


def _inverse(lower: jax.Array) -> jax.Array:
    """Inverts lower triangular matrices `[..., T, T]` of ones on their diagonals, which are not read.

    The inverses of the two halves give the block between them, by products alone: solves of many small
    systems are slow on CPUs. It is as exact as a solve here, where no token's correction enlarges a state.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = -(-size // 2)
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, size % 2)] * 2)
    first, second = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    across = -_matmul(_matmul(second, lower[..., half:, :half]), first)
    return _lower_triangular(first, across, second)[..., :size, :size]


def _lower_triangular(first: jax.Array, across: jax.Array, second: jax.Array) -> jax.Array:
    """Joins matrices `[[first, 0], [across, second]]`, each `[..., n, n]`."""
    upper = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([across, second], axis=-1)], axis=-2)


def _einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes an einsum; where `x` is of one token "t" as a sum of products.

    XLA fuses that with the gather that took `y` from a pool, where a product of matrices wants a copy. So the
    states, which are most of what a decode step reads, are read once, also for all "n", and never written.
    """
    operands, result = spec.split("->")
    of_x, of_y = operands.split(",")
    if "t" not in of_x or x.shape[of_x.index("t")] > 1:
        return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)
    if of_x[0] == "n":
        return jnp.stack([_einsum(f"{of_x[1:]},{of_y}->{result[1:]}", each, y) for each in x])
    order = result + "".join(sorted({*of_x} - {*result}))

    def spread(values: jax.Array, letters: str) -> jax.Array:
        values = values.transpose([letters.index(letter) for letter in order if letter in letters])
        return jnp.expand_dims(values, [i for i, letter in enumerate(order) if letter not in letters])

    products = spread(x, of_x) * spread(y, of_y)
    return products.sum(axis=range(len(result), len(order)))


def _sums_after(g: jax.Array) -> jax.Array:
    """Computes for each token the sum over all later ones, like `g [tokens, ...]`."""
    later = jnp.concatenate([g[1:], jnp.zeros_like(g[:1])])
    return lax.cumsum(later, axis=0, reverse=True)


def _per_head(x: jax.Array, num_heads: int) -> jax.Array:
    """Repeats key heads `[..., key_heads, d]` over the heads that they serve."""
    return jnp.repeat(x, num_heads // x.shape[-2], axis=-2)


def _with_channels(g: jax.Array) -> jax.Array:
    return g[..., None] if g.ndim == 2 else g


def _in_float32(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array.astype(jnp.float32) for array in arrays)
