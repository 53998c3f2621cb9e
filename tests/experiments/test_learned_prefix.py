"""A prefix learned through the cache: gradients equal a dense reference, memory stays, the loss falls."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

import kvcache_jax as kv
from experiments import learned_prefix
from experiments.common import byte_model
from experiments.learned_prefix import Prefix
from tests.experiments import tiny

pytestmark = pytest.mark.slow

TINY = tiny.config(head_dim=4)
PREFIX_LEN, NUM_ROWS, LENGTH = 19, 3, 14  # the prefix ends within its second block, the rows in their third
TEXT = np.frombuffer(b"THE QUICK BROWN FOX. " * 20, np.uint8)


@pytest.fixture(scope="module")
def windows():
    return jnp.asarray(learned_prefix.corpus.windows(TEXT, 0, 0, NUM_ROWS, LENGTH))


@pytest.fixture(scope="module")
def cache():
    return learned_prefix.empty_cache(TINY, PREFIX_LEN, NUM_ROWS, LENGTH)


@pytest.fixture(scope="module")
def prefix():
    k, v = jax.random.normal(jax.random.key(1), (2, TINY.num_layers, PREFIX_LEN, 2, 4))
    return Prefix(k, v)


def test_the_gradient_is_that_of_the_dense_reference(decoder, prefix, windows, cache):
    poisoned = kv.testing.poison(cache)
    assert learned_prefix.gradient_error(decoder, prefix, windows, poisoned) <= 1e-4


def test_every_token_of_the_prefix_matters(decoder, prefix, windows, cache):
    """Those in the shared first block, and those in the last one, which every row copies."""
    gradient = jax.jit(jax.grad(lambda *x: learned_prefix.losses(*x).sum()))(prefix, decoder, windows, cache)
    for part in gradient:
        assert np.abs(part).max(axis=(0, 2, 3)).min() > 1e-3


def test_rows_share_the_prefix_and_need_every_block_of_the_pool(decoder, prefix, windows, cache):
    (pool,) = cache.control.block_pools
    assert pool.num_blocks == 2 + NUM_ROWS * 2  # apart they would be 1 + NUM_ROWS rows of 3
    losses = jax.jit(learned_prefix.losses)
    assert np.isfinite(losses(prefix, decoder, windows, cache)).all()
    block = dataclasses.replace(pool, num_free=pool.num_free - 1)
    smaller = dataclasses.replace(cache, control=dataclasses.replace(cache.control, block_pools=(block,)))
    assert np.isnan(
        losses(prefix, decoder, windows, smaller)
    ).all()  # a row that fails does not pass for a loss


def test_a_prefix_starts_as_what_the_cache_keeps_of_a_text(decoder, windows, cache):
    """After the keys and values of a text, the loss is the same as of reading it."""
    tokens = jnp.asarray(TEXT[:PREFIX_LEN], jnp.int32)
    whole = jnp.concatenate([jnp.broadcast_to(tokens, (NUM_ROWS, len(tokens))), windows], axis=1)
    learned = jax.jit(learned_prefix.prefix_of)(decoder, tokens)
    got = jax.jit(learned_prefix.losses)(learned, decoder, windows, cache)
    empty = learned_prefix.bits_per_byte.empty_cache(TINY, NUM_ROWS, whole.shape[1] - 1)
    want = jax.jit(learned_prefix.bits_per_byte.losses)(decoder, whole, empty)[:, len(tokens) :]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_learning_lowers_the_loss(decoder, prefix, cache):
    losses = jax.jit(learned_prefix.losses)

    def bits(prefix):
        windows = learned_prefix.corpus.windows(TEXT, 9, 0, NUM_ROWS, LENGTH)
        return float(losses(prefix, decoder, windows, cache).mean()) / math.log(2)

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(decoder)]
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer
        learned, training_bits = learned_prefix.learn(decoder, TEXT, cache, prefix, seed=0, num_steps=30)
    assert len(training_bits) == 30 and training_bits[-1] < training_bits[0]
    assert bits(learned) < bits(prefix) - 0.05
    for leaf, before in zip(jax.tree.leaves(decoder), leaves, strict=True):
        np.testing.assert_array_equal(leaf, before)


def test_the_text_to_measure_on_is_not_learned_from():
    learn_from, held_out = learned_prefix.read_texts()
    assert bytes(learn_from).upper() == bytes(learn_from)
    assert len(held_out) > 10_000 and bytes(held_out[:5000]) not in bytes(learn_from)


def test_the_command_reports_what_it_measured(monkeypatch, capsys, report_of, decoder):
    seeds = [{"seed": seed, "before": 2.1, "after": 1.9 + seed / 10, "seconds": 1.0} for seed in range(3)]
    measured = {"num_steps": 7, "without": 2.0, "seeds": seeds, "error": 1e-6}
    monkeypatch.setattr(byte_model.checkpoint, "load", lambda folder, dtype: decoder)
    monkeypatch.setattr(learned_prefix, "measure", lambda decoder, num_steps: measured)
    report = report_of(learned_prefix)
    assert [bar["holds"] for bar in report["bars"]] == [True, True, True, False]
    assert {**report, **measured} == report
    assert learned_prefix.main([]) == 0
    assert "1 of 4 bars do not hold" in capsys.readouterr().out
