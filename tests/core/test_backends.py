"""Backends that users register: which of their functions serve which call, and what XLA does for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.backends import computed_once
from tests.support.few_kernels import compile_for_users

CALLS = []
SIZES = dict(num_blocks=6, block_size=4, max_seqs=2, max_seq_len=16)


def everywhere(pool, group, group_size, device):
    return None


def noted(name, value):
    """An attention that gives `value` and what its step was planned to add."""

    def attend(q, pool, block_table, plan, group, *, layer, scale, soft_cap, sink_logits):
        CALLS.append((name, q.shape[1], len(plan.work)))
        out = jnp.full_like(q, value, dtype=jnp.float32)
        return out + sum(plan.work), out[..., 0]

    return attend


def write(pool, new, slots, group, *, layer):
    CALLS.append(("write", new["k"].shape[0]))
    return jax.tree.map(lambda x: x.at[layer].set(7), pool)


def copy_blocks(pool, src, dst, num_copies, group):
    CALLS.append(("copy_blocks", src.shape[0]))
    return jax.tree.map(lambda x: x + num_copies.astype(x.dtype), pool)


def plan(plan, pool, block_table, group, *, num_queries):
    CALLS.append(("plan", num_queries, block_table.shape[1]))
    return (jnp.float32(0.5),)


OWN = kv.backends.Backend(
    "test: own", everywhere, noted("decode", 1), noted("prefill", 2), write, copy_blocks, plan
)
OTHER = kv.backends.Backend("test: other", everywhere, noted("other", 3))
NOTHING = kv.backends.Backend("test: nothing", everywhere)
NOWHERE = kv.backends.Backend("test: nowhere", lambda *_: "no device runs it")
for each in (OWN, OTHER, NOTHING, NOWHERE):
    kv.backends.register_backend(each)


def config_of(name, num_layers=2):
    return kv.CacheConfig([kv.FullAttention(1, 4)] * num_layers, **SIZES, implementation=name)


def run(config, num_new, width):
    """A step of all layers; the cache and the outputs."""
    cache, _ = kv.allocate(kv.init(config), [0, 1], [0, 0])
    cache, step = kv.extend(cache, num_new, max_new=width)
    x = jnp.arange(2 * width * 4, dtype=jnp.float32).reshape(2, width, 1, 4) % 7
    outputs = []
    for layer in range(config.num_layers):
        cache, out = kv.attention(cache, layer, x, x, -x, step)
        outputs.append(out)
    return cache, outputs


@pytest.mark.quick_cases("8-decode-1.5", "9-prefill-2.5")
@pytest.mark.parametrize(
    ("width", "name", "value"), [(1, "decode", 1.5), (8, "decode", 1.5), (9, "prefill", 2.5)]
)
def test_a_step_of_more_tokens_than_eight_is_prefilled(width, name, value):
    """Planned once for both layers; pools and outputs are what the functions made them."""
    CALLS.clear()
    cache, outputs = run(config_of("test: own"), [1, 1], width)
    assert CALLS.count(("plan", width, 4)) == 1
    # Whatever was traced for one layer serves the other.
    expected = {("plan", width, 4), (name, width, 1), ("write", 2 * width), ("copy_blocks", 2)}
    assert {*CALLS} == expected
    for out in outputs:
        np.testing.assert_array_equal(out, np.full(out.shape, value, np.float32))
    for pool in jax.tree.leaves(cache.pools):
        assert (pool[:2] == 7).all() and not pool[2:].any()


def test_packed_tokens_are_decoded_one_by_one():
    CALLS.clear()
    cache, _ = kv.allocate(kv.init(config_of("test: own", 1)), [0, 1], [0, 0])
    cache, step = kv.extend(cache, [9, 2], num_tokens=11)
    out = kv.attend(cache, 0, jnp.ones((11, 1, 4)), step)[1]
    assert ("plan", 1, 4) in CALLS and ("decode", 1, 1) in CALLS
    assert (out == 1.5).all()


def test_xla_does_what_a_backend_leaves_to_it():
    found, expected = (run(config_of(name), [3, 2], 3) for name in ("test: nothing", "xla"))
    for one, other in zip(
        jax.tree.leaves((found[0].pools, found[1])),
        jax.tree.leaves((expected[0].pools, expected[1])),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert any(np.asarray(out).any() for out in expected[1])


@pytest.mark.slow
def test_a_call_may_name_another_backend_than_the_cache():
    """Whose plan it does not get."""
    cache, _ = kv.allocate(kv.init(config_of("test: nothing", 1)), [0, 1], [0, 0])
    cache, step = kv.extend(cache, [1, 1], max_new=1)
    q = jnp.ones((2, 1, 1, 4))
    assert (kv.attend(cache, 0, q, step, implementation="test: own")[1] == 1).all()
    assert not kv.attend(cache, 0, q, step, implementation="xla")[1].any()
    CALLS.clear()
    cache, _ = kv.allocate(kv.init(config_of("test: own", 1)), [0, 1], [0, 0])
    cache, step = kv.extend(cache, [1, 1], max_new=1)
    assert not kv.attend(cache, 0, q, step, implementation="xla")[1].any()
    assert (kv.attend(cache, 0, q, step, implementation="test: other")[1] == 3).all()
    assert not [call for call in CALLS if call[0] == "decode"]


def test_a_backend_that_does_not_serve_is_refused_by_name():
    message = "implementation 'test: nowhere' does not run here: no device runs it; use 'xla' or None"
    with pytest.raises(NotImplementedError, match=message):
        run(config_of("test: nowhere"), [1, 1], 1)
    with pytest.raises(ValueError, match="implementation is 'test: unknown', expected None or one of xla, "):
        config_of("test: unknown")


def test_registration_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="there is a backend 'test: own' already, expected a new name"):
        kv.backends.register_backend(kv.backends.Backend("test: own", everywhere))
    for name in ("xla", "mosaic_gpu", "mosaic_tpu"):
        with pytest.raises(ValueError, match=f"there is a backend '{name}' already"):
            kv.backends.register_backend(kv.backends.Backend(name, everywhere))
    with pytest.raises(TypeError, match="backend is a str, expected a kvcache_jax.backends.Backend"):
        kv.backends.register_backend("test: other")
    with pytest.raises(TypeError, match="supports of backend 'test: unmade' is None, expected a function"):
        kv.backends.Backend("test: unmade", None)
    with pytest.raises(TypeError, match="write of backend 'test: unmade' is 3, expected a function"):
        kv.backends.Backend("test: unmade", everywhere, write=3)
    of_xla = "decode, prefill, write, copy_blocks, read_blocks, write_blocks"
    assert str(NOTHING) == f"test: nothing: nothing; xla: {of_xla}"


def test_what_has_many_readers_is_computed_once_on_cpus():
    def num_computed(once):
        def run(x):
            values = once((x ^ 5) * 3)
            return values + x, values * x, x[::-1] - values

        lowered = jax.jit(run).lower(jnp.arange(5, dtype=jnp.int32))
        return compile_for_users(lowered).as_text().count(" xor(")

    assert (num_computed(lambda x: x), num_computed(computed_once)) == (3, 1)
