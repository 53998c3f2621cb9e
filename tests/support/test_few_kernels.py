"""Programs that are compiled into few kernels compute what their operations do one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import few_kernels


def _loops(x, y):
    def body(carry):
        step, x, total = carry
        x = x.at[step].add(y[step % 4])  # a scatter, between operations that become a kernel
        return step + 1, jnp.where(x > 5, x - 3, x), total + jnp.max(x * y[0])

    return jax.lax.while_loop(lambda carry: (carry[0] < 6) & (carry[2] < 1000), body, (0, x, 0))


def _branches(x, y):
    known = jax.lax.cond(x[0] > 2, lambda: jnp.cumsum(x) * 2 - y[1], lambda: x[::-1] + 1)
    sorted_first = jax.lax.cond(y[0] > 2, lambda: jnp.sort(x), lambda: jnp.clip(x, 1, 3))
    return jnp.concatenate([known, sorted_first]) ^ 3


@jax.jit
def _shared(x, y):
    return jnp.where(x[:, None] == y[None], x[:, None], -1).max(axis=1)


def _functions(x, y):
    return _shared(x, y) + _shared(y, x) * jnp.argsort(_shared(x + 1, y))


def _needless(x, y):
    """XLA would abort on the parameter, of which it finds that no number is needed."""
    first = jnp.sort(y)
    zero = first - first
    return jnp.where(zero == 0, zero + 1, zero - 1) * 2


def _known(x, y):
    known = jnp.arange(8) * 3 + jnp.arange(8) % 2
    return known, (known - known) * x, jnp.minimum(y, y)


def _wide(x, y):
    numbers = (jnp.arange(6000) * jnp.repeat(x[:4], 1500)).astype(jnp.float32)
    halves = (numbers[:9].astype(jnp.bfloat16) * 2).astype(jnp.float32)
    return (
        numbers.sum(),
        halves.sum() / (1 + halves.max()),
        jnp.exp(-numbers[:64]).reshape(8, 8) @ y.astype(jnp.float32),
    )


@pytest.mark.parametrize("function", [_loops, _branches, _functions, _needless, _known, _wide])
def test_few_kernels_compute_what_the_operations_do(function):
    x = jnp.array([3, 1, 4, 1, 5, 9, 2, 6])
    y = jnp.array([2, 7, 1, 8, 2, 8, 1, 8])
    lowered = jax.jit(function).lower(x, y)
    compiled = lowered.compile()
    with jax.disable_jit():
        expected = function(x, y)
    for got, right in zip(jax.tree.leaves(compiled(x, y)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5)
    assert few_kernels.PREFIX in compiled.as_text()
    assert 'inlineable="false",xla_cpu_small_call="true"' in compiled.as_text()
    assert few_kernels.PREFIX not in lowered.as_text()
