"""Prompts and next tokens in one call of the model: what it computes, and that it is one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.attention.attention_plan import plan_attention
from kvcache_jax.engine.joined_step import can_join, join, without_rows
from kvcache_jax.operations.reserve import extend_reserved
from tests.engine.exact_model import config, forward, make_params


def test_a_model_of_another_width_is_refused():
    def wrong(params, tokens, cache, step, logits_at=None):
        logits, cache = forward(params, tokens, cache, step)
        return logits[: max(1, tokens.shape[0] - 1)], cache

    engine = kv.Engine(wrong, make_params(), config(), token_budget=12)
    with pytest.raises(TypeError, match="forward returned logits"):
        engine.compile()


def test_states_and_models_that_do_not_ask_take_two_calls():
    """A model that reads the cache by itself would not see what its own call stores."""

    def own_attention(params, tokens, cache, step):
        return forward(params, tokens, cache, step)

    assert can_join(config(), forward) and can_join(config(), kv.decoding.PreparedForward(forward, tuple))
    assert can_join(config(num_layers=2), forward) and not can_join(config(), own_attention)
    tight = config(num_layers=2, max_query_len=5)
    assert can_join(tight, forward, width=2) and not can_join(tight, forward, width=3)
    assert can_join(config(max_query_len=5), forward, width=3)
    states = kv.GatedDeltaNet(num_kv_heads=1, head_dim=4, key_dim=4)
    with_states = kv.CacheConfig([kv.FullAttention(1, 8), states], max_seqs=2, max_seq_len=32)
    assert not can_join(with_states, forward)


@functools.partial(jax.jit, static_argnames="is_joined")
def _attended(cache, steps, arrays, is_joined):
    """Stores and attends by one step or by two; outputs of both, flat."""
    planned = [plan_attention(cache, step) for step in steps]
    if is_joined:
        q, k, v = (jnp.concatenate([x.reshape(-1, 1, *x.shape[2:]) for x in pair]) for pair in arrays)
        _, (out, lse) = kv.attention(cache, 0, q, k, v, join(cache, *planned), return_lse=True)
        return out[:, 0], lse[:, 0]
    for step, (k, v) in zip(planned, zip(*arrays[1:], strict=True), strict=True):
        cache = kv.write(cache, 0, k, v, step)
    found = [
        kv.attend(cache, 0, q, step, return_lse=True)[1] for q, step in zip(arrays[0], planned, strict=True)
    ]
    return tuple(
        jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in pair]) for pair in zip(*found, strict=True)
    )


def test_attention_of_parts_is_as_by_themselves():
    """Pieces of 3 tokens of two rows, and then a token of each of three rows; one piece is left out."""
    layer = kv.FullAttention(2, 8)
    cache = kv.init(kv.CacheConfig([layer], num_blocks=12, block_size=4, max_seqs=3, max_seq_len=16))
    cache, _ = kv.allocate(cache, [0, 1, 2], [9, 9, 9])
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    cache, first = kv.extend(cache, [4, 2, 5], max_new=5)
    cache = kv.write(cache, 0, random(3, 5, 2, 8), random(3, 5, 2, 8), first)
    cache, pieces = kv.extend(cache, [3, 2], max_new=3, seq_ids=[2, 0])
    cache, following = kv.extend(cache, [1, 1, 0], max_new=1)
    pieces, following = (dataclasses.replace(step, plans=()) for step in (pieces, following))
    arrays = [(random(2, 3, heads, 8), random(3, 1, heads, 8)) for heads in (4, 2, 2)]
    for is_left in ([True, True, True], [True, True, False]):
        steps = jax.jit(without_rows)(cache, pieces, jnp.asarray(is_left)), following
        joined, apart = (_attended(cache, steps, arrays, is_joined=each) for each in (True, False))
        for found, expected in zip(joined, apart, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="scores got a step of several parts, .* no parameter logits_at"):
        kv.attention_scores(cache, 0, arrays[0][1], join(cache, *steps))
    assert np.isneginf(joined[1][:3]).all() and np.isfinite(joined[1][3:5]).all()


def test_a_window_keeps_what_pieces_read_while_the_next_token_gets_its_place():
    """Beside a row of a piece alone, one of a piece and the token after it, as in two calls."""
    layer = kv.SlidingWindow(2, 8, window=5)
    sizes = dict(num_blocks=20, block_size=4, max_seqs=2, max_seq_len=40, max_query_len=8)
    cache, _ = kv.allocate(kv.init(kv.CacheConfig([layer], **sizes)), [0, 1], [20, 20])
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    for num_new in ([8, 7], [3, 0]):
        cache, step = kv.extend(cache, num_new, max_new=8)
        cache = kv.write(cache, 0, random(2, 8, 2, 8), random(2, 8, 2, 8), step)
    arrays = [(random(2, 6, heads, 8), random(2, 1, heads, 8)) for heads in (4, 2, 2)]
    kept_len, (pieces, following) = cache.control.context_len, zip(*arrays, strict=True)
    cache, of_pieces = kv.extend(cache, [6, 2], max_new=6)
    apart, first = kv.attention(cache, 0, *pieces, of_pieces)
    apart, step = kv.extend(apart, [1, 0], max_new=1)
    _, second = kv.attention(apart, 0, *following, step)
    cache, step = jax.jit(extend_reserved)(
        cache, jnp.array([1, 0], jnp.int32), jnp.zeros((2, 1), jnp.int32), kept_len=kept_len
    )
    steps = [dataclasses.replace(each, plans=()) for each in (of_pieces, step)]
    found, _ = _attended(cache, steps, arrays, is_joined=True)
    expected = jnp.concatenate([first.reshape(-1, 4, 8), second.reshape(-1, 4, 8)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (np.abs(expected).max(axis=(1, 2)) > 0).tolist() == [True] * 8 + [False] * 4 + [True, False]
