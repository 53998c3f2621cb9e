"""Matrix states: outputs, changes and folds are those of the recurrence in float64, however tokens come."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcache_jax.recurrence import matrix_state
from kvcache_jax.recurrence.matrix_state import Entries
from tests.recurrence.exact import HEADS, KEY_DIM, RULES, VALUE_DIM, exact, make_tokens, off, run

BLOCK = 16
every_rule = pytest.mark.parametrize("name", RULES)


def some_state(seed=0):
    return np.random.default_rng(seed).normal(size=(HEADS, VALUE_DIM, KEY_DIM)).astype(np.float32)


def held_before(tokens, changes, count):
    """The entries of the first `count` of 16 tokens, the others 0."""
    is_held = np.arange(BLOCK) < count

    def masked(x):
        return np.where(is_held.reshape(-1, *[1] * (x.ndim - 1)), x[:BLOCK], 0).astype(np.float32)

    return Entries(masked(tokens[1]), masked(changes), masked(tokens[3]))


def part(tokens, start, end):
    return tuple(None if x is None else x[start:end] for x in tokens)


@pytest.mark.quick_cases("1-gated-delta", "16-gated-delta", "7-kimi-delta", "7-mamba-2")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_new", [1, 2, 7, 16])
def test_tokens_in_pieces_of_any_size_give_the_recurrence(num_new, name):
    """Pieces run past the ends of blocks, which fold, and the last piece is padded with zeros."""
    tokens = make_tokens(RULES[name], 1024)
    state = some_state()
    outs, changes, states = exact(state, *tokens)
    got = run(state, tokens, num_new, BLOCK)
    for found, expected in zip(got, (outs, changes, states[-1]), strict=True):
        assert off(found, expected) < 1e-5


@every_rule
def test_tokens_after_any_number_of_held_ones(name):
    tokens, state = make_tokens(RULES[name], BLOCK + 7, seed=1), some_state(1)
    outs, changes, _ = exact(state, *tokens)
    counts = range(BLOCK + 1)
    held = jax.tree.map(lambda *x: np.stack(x), *[held_before(tokens, changes, n) for n in counts])
    new = jax.tree.map(lambda *x: np.stack(x), *[part(tokens, n, n + 7) for n in counts])
    got, added = jax.jit(jax.vmap(functools.partial(matrix_state.advance, state)))(held, *new)
    for n in counts:
        assert off(got[n], outs[n : n + 7]) < 1e-5 and off(added[n], changes[n : n + 7]) < 1e-5


@every_rule
def test_tokens_of_zeros_change_nothing(name):
    tokens, state = make_tokens(RULES[name], BLOCK + 7, seed=2), some_state(2)
    _, changes, states = exact(state, *tokens)
    held = held_before(tokens, changes, 5)
    padded = jax.tree.map(lambda x: np.concatenate([x[5:8], np.zeros_like(x[:4])]), tokens)
    advance = jax.jit(matrix_state.advance)
    out, u = advance(state, held, *padded)
    whole_out, whole_u = advance(state, held, *part(tokens, 5, 12))
    np.testing.assert_array_equal(out[:3], whole_out[:3])
    np.testing.assert_array_equal(u[:3], whole_u[:3])
    assert np.isfinite(out).all() and not np.any(u[3:])
    fold = jax.jit(matrix_state.fold)
    assert off(fold(state, held), states[4]) < 1e-6
    # A row without any token, whose state is of zeros.
    zeros = jax.tree.map(np.zeros_like, (state, held, padded))
    for x in (*advance(zeros[0], zeros[1], *zeros[2]), fold(zeros[0], zeros[1])):
        assert not np.any(x)


@every_rule
def test_strong_decays_end_what_was_before_them(name):
    """Between some that hardly decay: differences of sums would be off, and quotients of decays infinite."""
    tokens, state = make_tokens(RULES[name], BLOCK + 16, seed=3), some_state(3)
    g = tokens[3].copy()
    g[2::6], g[4::6], g[11] = -5e3, 0, -np.inf
    g[BLOCK + 8] = -np.inf
    tokens = (*tokens[:3], g, tokens[4])
    outs, changes, states = exact(state, *tokens)
    got, u = jax.jit(matrix_state.advance)(
        state, held_before(tokens, changes, BLOCK), *part(tokens, BLOCK, None)
    )
    assert off(got, outs[BLOCK:]) < 1e-5 and off(u, changes[BLOCK:]) < 1e-5
    entries = Entries(*(np.float32(x[BLOCK:]) for x in (tokens[1], changes, g)))
    assert off(jax.jit(matrix_state.fold)(states[BLOCK - 1].astype(np.float32), entries), states[-1]) < 1e-5


@every_rule
def test_tokens_that_equal_one_another_are_corrected(name):
    """Equal keys without decay, corrected wholly: how tokens change one another is as strong as it gets."""
    q, k, v, g, beta = make_tokens(RULES[name], 16, seed=4)
    beta = None if beta is None else np.ones_like(beta)
    tokens = q, np.broadcast_to(k[:1], k.shape), v, np.zeros_like(g), beta
    outs, changes, _ = exact(some_state(4), *tokens)
    held = held_before(tokens, changes, 0)
    got, u = jax.jit(matrix_state.advance)(some_state(4), held, *tokens)
    assert off(got, outs) < 1e-5 and off(u, changes) < 1e-5


@pytest.mark.quick_cases("gated-delta")
@every_rule
def test_gradients_are_those_of_one_token_after_the_other(name):
    tokens, state = make_tokens(RULES[name], BLOCK + 7, seed=5), some_state(5)
    held = held_before(tokens, exact(state, *tokens)[1], 5)
    new = jax.tree.map(lambda x: np.concatenate([x[5:10], np.zeros_like(x[:2])]), tokens)
    rng = np.random.default_rng(6)
    shares = rng.normal(size=(7, HEADS, VALUE_DIM)).astype(np.float32)

    def at_once(state, held, new):
        out, u = matrix_state.advance(state, held, *new)
        return jnp.sum(shares * out), u

    def one_by_one(state, held, new):
        state = matrix_state.fold(state, held)
        none = jax.tree.map(lambda x: jnp.zeros_like(x[:1]), held)

        def body(state, token):
            out, u = matrix_state.advance(state, none, *jax.tree.map(lambda x: x[None], token))
            added = Entries(token[1][None], u, token[3][None])
            return matrix_state.fold(state, added), (out[0], u[0])

        _, (out, u) = jax.lax.scan(body, state, new)
        return jnp.sum(shares * out), u

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: function(*x)[0], argnums=(0, 1, 2)))(state, held, new)

    for got, expected in zip(*map(jax.tree.leaves, map(gradients, (at_once, one_by_one))), strict=True):
        assert np.isfinite(got).all() and off(got, np.asarray(expected, np.float64)) < 1e-5


def test_a_state_of_nan_stays_within_its_row():
    tokens, state = make_tokens(RULES["gated-delta"], BLOCK + 7, seed=7), some_state(7)
    held = held_before(tokens, exact(state, *tokens)[1], BLOCK)
    new = part(tokens, BLOCK, None)
    states = np.stack([state, np.full_like(state, np.nan), state])
    out, u = jax.jit(jax.vmap(lambda state: matrix_state.advance(state, held, *new)))(states)
    for x in (out, u):
        np.testing.assert_array_equal(x[0], x[2])
        assert np.isfinite(x[0]).all() and np.isnan(x[1]).all()
