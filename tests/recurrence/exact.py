"""Matrix states in float64, token by token; and how far each form of `matrix_state` is off them.

python -m tests.recurrence.exact   # prints the errors, entries in bfloat16 too
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.recurrence import matrix_state
from kvcache_jax.recurrence.matrix_state import Entries

HEADS, KEY_DIM, VALUE_DIM = 4, 16, 24


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recurrence.

    Attributes:
      num_key_heads: Of its `HEADS` heads.
      is_per_channel: Whether each key channel decays on its own.
      is_corrected: Whether changes are corrected by what the state holds.
    """

    num_key_heads: int
    is_per_channel: bool = False
    is_corrected: bool = True


RULES = {
    "gated-delta": Rule(2),
    "kimi-delta": Rule(HEADS, is_per_channel=True),
    "mamba-2": Rule(1, is_corrected=False),
}


def make_tokens(rule: Rule, num_tokens: int, seed: int = 0) -> tuple[np.ndarray | None, ...]:
    """Draws q, k, v, g and beta with the decays of checkpoints: from a few tokens to thousands."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, num_tokens, rule.num_key_heads, KEY_DIM))
    k = k + 0.7 * rng.normal(size=k.shape[1:])  # tokens resemble one another, as a model's do
    v = rng.normal(size=(num_tokens, HEADS, VALUE_DIM))
    # As checkpoints begin: rates of 1 to 16 and steps of 0.001 to 0.1, which then depend on tokens.
    shape = (HEADS, KEY_DIM) if rule.is_per_channel else (HEADS,)
    rates = rng.uniform(1, 16, size=(HEADS, 1) if rule.is_per_channel else HEADS)
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
    steps = np.log1p(np.expm1(steps) * np.exp(1.5 * rng.normal(size=(num_tokens, *shape))))
    g, beta = -rates * steps, 1 / (1 + np.exp(-rng.normal(size=(num_tokens, HEADS))))
    if rule.is_corrected:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    else:
        k, v, beta = k * KEY_DIM**-0.5, v * steps[..., None], None
    return tuple(None if x is None else np.asarray(x, np.float32) for x in (q * KEY_DIM**-0.5, k, v, g, beta))


def exact(state, q, k, v, g, beta):
    """Computes outputs, changes and the state after each token, in float64."""
    state, outs, changes, states = np.asarray(state, np.float64), [], [], []
    num_heads = len(state)
    for t in range(len(q)):
        q_t, k_t = (np.asarray(x[t], np.float64).repeat(num_heads // x.shape[1], axis=0) for x in (q, k))
        g_t = np.asarray(g[t], np.float64).reshape(num_heads, 1, -1)
        state = np.exp(g_t) * state
        u = np.asarray(v[t], np.float64)
        if beta is not None:
            u = np.asarray(beta[t], np.float64)[:, None] * (u - np.einsum("hk,hvk->hv", k_t, state))
        state = state + u[:, :, None] * k_t[:, None, :]
        for found, values in ((outs, np.einsum("hk,hvk->hv", q_t, state)), (changes, u), (states, state)):
            found.append(values)
    return np.array(outs), np.array(changes), np.array(states)


def off(got, expected) -> float:
    """The greatest error over the root mean square of what is expected."""
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / np.sqrt((expected**2).mean()))


@functools.partial(jax.jit, static_argnames=("num_new", "block_size", "dtype"))
def run(state, tokens, num_new, block_size, dtype="float32"):
    """Computes tokens `num_new` at a time, and folds each block that gets full.

    Returns:
      Outputs, changes, and the state after the last token.
    """
    num_tokens = len(tokens[0])
    num_pieces = -(-num_tokens // num_new)

    def pieces(x):
        padded = jnp.pad(x, ((0, num_pieces * num_new - num_tokens), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(num_pieces, num_new, *x.shape[1:])

    def empty(x, dtype):
        return jnp.zeros((block_size + num_new, *x.shape[1:]), dtype)

    _, k, v, g, _ = tokens
    buffer = Entries(empty(k, dtype), empty(v, dtype), empty(g, jnp.float32))

    def body(carry, new):
        state, buffer, count = carry
        held = jax.tree.map(lambda x: x[:block_size], buffer)
        out, u = matrix_state.advance(state, held, *new)
        entries = Entries(new[1], u, new[3])
        buffer = jax.tree.map(
            lambda all, some: jax.lax.dynamic_update_slice_in_dim(all, some.astype(all.dtype), count, 0),
            buffer,
            entries,
        )
        count += num_new
        full = jax.tree.map(lambda x: x[:block_size], buffer)
        left = jax.tree.map(lambda x: jnp.roll(x, -block_size, 0).at[num_new:].set(0), buffer)
        is_full = count >= block_size
        state = jnp.where(is_full, matrix_state.fold(state, full), state)
        buffer = jax.tree.map(functools.partial(jnp.where, is_full), left, buffer)
        return (state, buffer, jnp.where(is_full, count - block_size, count)), (out, u)

    carry = state, buffer, jnp.int32(0)
    (state, buffer, _), results = jax.lax.scan(body, carry, jax.tree.map(pieces, tokens))
    return *(x.reshape(-1, *x.shape[2:])[:num_tokens] for x in results), matrix_state.fold(state, buffer)


def main():
    num_tokens = 1024
    print(f"{num_tokens} tokens, {HEADS} heads of {KEY_DIM} x {VALUE_DIM}, blocks of 16: error of outputs")
    print("over their root mean square, greatest (and root mean square), by tokens computed at a time\n")
    columns = [(num_new, dtype) for dtype in ("float32", "bfloat16") for num_new in (1, 2, 7, 16)]
    print(" " * 11 + " ".join(f"{f'{n}, {dtype}':>17s}" for n, dtype in columns))
    for name, rule in RULES.items():
        tokens = make_tokens(rule, num_tokens)
        state = np.zeros((HEADS, VALUE_DIM, KEY_DIM), np.float32)
        outs, _, _ = exact(state, *tokens)
        cells = []
        for num_new, dtype in columns:
            out, _, _ = run(state, tokens, num_new, 16, dtype)
            mean = np.sqrt(((np.asarray(out, np.float64) - outs) ** 2).mean() / (outs**2).mean())
            cells.append(f"{off(out, outs):.1e} ({mean:.1e})")
        print(f"{name:11s}" + " ".join(f"{cell:>17s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
