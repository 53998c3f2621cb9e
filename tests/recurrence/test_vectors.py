"""Convolutions and linear scans against loops in float64."""

import jax
import numpy as np
import pytest

from kvcache_jax.recurrence.convolution import convolve, last_of
from kvcache_jax.recurrence.linear_scan import linear_scan, rg_lru
from tests.recurrence.exact import off

CHANNELS = 5


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("kernel", "num_new"), [(4, 1), (4, 7), (2, 16), (4, 2)])
def test_a_token_reads_the_inputs_before_it(kernel, num_new, has_bias):
    inputs, weights = draw(kernel - 1 + num_new, CHANNELS), draw(kernel, CHANNELS, seed=1)
    bias = draw(CHANNELS, seed=2) if has_bias else None
    expected = [
        sum(weights[i].astype(np.float64) * inputs[t + i] for i in range(kernel)) + (bias if has_bias else 0)
        for t in range(num_new)
    ]
    got = jax.jit(convolve)(inputs[: kernel - 1], inputs[kernel - 1 :], weights, bias)
    assert off(got, np.array(expected)) < 1e-6


def test_the_last_inputs_after_any_number_of_new_ones():
    past, new = draw(3, CHANNELS), draw(5, CHANNELS, seed=1)
    all_of = np.concatenate([past, new])
    for count in range(6):
        np.testing.assert_array_equal(jax.jit(last_of)(past, new, count), all_of[count : count + 3])


def looped(state, log_decay, added):
    state, states = np.asarray(state, np.float64), []
    for log_a, b in zip(np.asarray(log_decay, np.float64), added, strict=True):
        state = np.exp(log_a) * state + b
        states.append(state)
    return np.array(states)


@pytest.mark.parametrize("num_new", [1, 2, 7, 16])
def test_a_linear_scan_is_its_loop(num_new):
    """With decays from none to all, and a state that begins anew."""
    state, log_decay = draw(CHANNELS), -np.exp(3 * draw(num_new, CHANNELS, seed=1))
    log_decay[0, 1], log_decay[-1, 2] = 0, -np.inf
    x = draw(num_new, CHANNELS, seed=2)
    assert off(jax.jit(linear_scan)(state, log_decay, x), looped(state, log_decay, x)) < 1e-6
    exact_decay = np.asarray(log_decay, np.float64)
    added = np.sqrt(-np.expm1(2 * exact_decay)) * x
    assert off(jax.jit(rg_lru)(state, log_decay, x), looped(state, log_decay, added)) < 1e-6


def test_states_hold_for_a_thousand_tokens():
    log_decay = -np.exp(2 * draw(1024, CHANNELS) - 4)
    x = draw(1024, CHANNELS, seed=1)
    exact_decay = np.asarray(log_decay, np.float64)
    expected = looped(np.zeros(CHANNELS), log_decay, np.sqrt(-np.expm1(2 * exact_decay)) * x)

    def body(state, piece):
        states = rg_lru(state, *piece)
        return states[-1], states

    pieces = log_decay.reshape(-1, 16, CHANNELS), x.reshape(-1, 16, CHANNELS)
    _, got = jax.jit(lambda *pieces: jax.lax.scan(body, np.zeros(CHANNELS, np.float32), pieces))(*pieces)
    assert off(np.reshape(got, (1024, CHANNELS)), expected) < 1e-5


def test_padding_and_states_begun_anew_have_gradients():
    state, log_decay, x = draw(CHANNELS), -np.exp(draw(6, CHANNELS, seed=1)), draw(6, CHANNELS, seed=2)
    log_decay[3:], x[3:] = 0, 0
    log_decay[1] = -np.inf

    def total(*arguments):
        return rg_lru(*arguments).sum()

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(state, log_decay, x)
    assert all(np.isfinite(grad).all() for grad in grads)
    # What begins anew is read by no gradient of what was before; what it adds counts once per later token.
    a = np.exp(log_decay[2])
    np.testing.assert_allclose(grads[2][1], 1 + 4 * a, rtol=1e-5)
    np.testing.assert_allclose(grads[0], np.exp(log_decay[0]), rtol=1e-5)
    assert np.all(np.asarray(grads[2][0]) > 0)
