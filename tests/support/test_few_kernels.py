"""Programs that are compiled into few kernels compute what users' programs compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import few_kernels
from tests.support.few_kernels import compile_for_users


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


def _scatters(x, places, twice):
    """Of windows, batches and single numbers; twice at one place; outside in part or as a whole."""
    dims = jax.lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    windows = jnp.arange(24).reshape(4, 2, 3).astype(x.dtype)
    flags = (x > 7).at[places[:, 0], places[:, 1]]
    of_rows = jax.vmap(lambda row, at: row.at[at].add(at.astype(x.dtype), mode="drop"))
    return [
        [scatter(x, places, windows, dims) for scatter in (jax.lax.scatter, jax.lax.scatter_add)],
        [scatter(x, places - 2, windows, dims) for scatter in (jax.lax.scatter_max, jax.lax.scatter_mul)],
        x.at[:, twice].set(windows[:3, 0, :1], mode="drop"),
        x.at[twice].min(windows[0, :1, :1]),
        x.at[twice[0], twice[1]].set(3),
        of_rows(x, places[:3]),
        jax.vmap(of_rows, (None, 0))(x, jnp.stack([places[:3], places[1:]])),
        jax.vmap(lambda row, at: row.at[at].set(at.astype(x.dtype)), (1, 1), 1)(
            x, places[:, [0, 1, 0, 1, 0]]
        ),
        [flags.set(True), (x > 7).astype(x.dtype).at[twice].mul(2), flags.max(True), flags.min(False)],
        x.at[2, 1:4].add(5),
    ]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_scatter_is_a_loop_over_its_updates(dtype):
    x = jnp.arange(15).reshape(3, 5).astype(dtype)
    places = jnp.array([[0, 0], [1, -1], [2, 3], [1, 0]])
    twice = jnp.array([1, -1, 4, 1])
    lowered = jax.jit(_scatters).lower(x, places, twice)
    for_users = compile_for_users(lowered)
    compiled = jax.jit(lambda *args: _scatters(*args)).lower(x, places, twice).compile()
    assert "stablehlo.scatter" in lowered.as_text() and " scatter(" not in compiled.as_text()
    for got, right in zip(
        *map(jax.tree.leaves, (compiled(x, places, twice), for_users(x, places, twice))), strict=True
    ):
        np.testing.assert_array_equal(got, right)


def test_a_scatter_with_a_function_of_its_own_stays_one():
    """As does one without updates."""
    x, at = jnp.arange(6.0), jnp.array([[1], [1], [4]])
    dims = jax.lax.ScatterDimensionNumbers((), (0,), (0,))

    def program(x, at):
        functions = [lambda n: n + n, lambda n: n, lambda n: n + n * 2]
        applied = [jax.lax.scatter_apply(x, at, function, dims, update_shape=(3,)) for function in functions]
        return *applied, jax.lax.scatter(x, at[:0], x[:0], dims)

    got = jax.jit(program).lower(x, at).compile()(x, at)
    np.testing.assert_array_equal(got[0], [0, 4, 2, 3, 8, 5])
    np.testing.assert_array_equal(got[1], x)
    np.testing.assert_array_equal(got[2], [0, 9, 2, 3, 12, 5])
    np.testing.assert_array_equal(got[3], x)
