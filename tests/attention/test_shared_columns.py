"""Rows that begin with the same blocks and read these once: by XLA, on CPUs, in tiles of no fixed length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.attention.attention_plan import each_alone, find_shared, plan_rows
from kvcache_jax.decoding import loop
from tests.attention.prompt_rows import (
    BLOCK,
    DIM,
    FULL,
    HEADS,
    SIZES,
    driver_of,
    fill,
    fill_packed,
    step_of_forks_packed,
    wide_driver,
)
from tests.support import tiny_model


def companies(step, group=0):
    """By sets of rows, the tokens that these read together."""
    shared = step.plans[group].shared
    members, columns = np.asarray(shared.members), np.asarray(shared.num_columns)
    size = shared.num_of_row.shape[0]
    found = {
        frozenset(x[x < size].tolist()): int(n) * BLOCK for x, n in zip(members, columns, strict=True) if n
    }
    of_row = np.zeros(size, np.int32)
    for rows, tokens in found.items():
        of_row[list(rows)] = tokens // BLOCK
    np.testing.assert_array_equal(shared.num_of_row, of_row)
    return found


def test_rows_that_begin_alike_read_it_together_and_others_alone():
    """Two prompts with samples of each, more than a company has places for, and rows that share nothing."""
    driver = driver_of(soft_cap=1.5)
    fill(driver, {3: 203, 0: 150, 7: 203, 5: 31})
    for row in (10, 1, 12, 13):
        driver.fork(3, row)
    for row in (*range(14, 24), 2, 4, 6, 8, 9, 11):
        driver.fork(0, row)
    every = range(24)
    # Of 203 tokens three strides of 64 are full, of 150 two; the 17th row of one prompt is left alone.
    found = companies(driver.step(dict.fromkeys(every, 1)))
    of_0 = sorted({0, *range(14, 24), 2, 4, 6, 8, 9, 11})
    assert found == {frozenset({3, 10, 1, 12, 13}): 192, frozenset(of_0[:16]): 128}
    # Rows stay away, end, go back into what was shared, and go on from there with blocks of their own.
    driver.free(12)
    assert driver.truncate(13, 100) == kv.Status.OK and driver.truncate(10, 191) == kv.Status.OK
    found = companies(driver.step(dict.fromkeys(set(every) - {12, 14, 15}, 1), twice=True))
    assert found == {frozenset(set(of_0) - {14, 15}): 128}, "three rows are too few, one more has too little"
    driver.free(14)
    for row in (12, 14):
        driver.fork(3, row)
    found = companies(driver.step(dict.fromkeys(every, 1)))
    assert found[frozenset({1, 3, 12, 14})] == 192
    assert kv.check_invariants(driver.cache) == []


def test_what_a_subset_shares_goes_before_what_all_share():
    """Rows that were forked at 140 tokens, and one of them three times again at 270."""
    driver = driver_of(seed=3)
    fill(driver, {5: 140})
    for row in (0, 1, 2, 9):
        driver.fork(5, row)
    wide = wide_driver(driver)
    wide.step({9: 130})
    driver.cache = wide.cache
    for row in (3, 4, 8):
        driver.fork(9, row)
    found = companies(driver.step(dict.fromkeys((0, 1, 2, 3, 4, 5, 8, 9), 1)))
    assert found == {frozenset({0, 1, 2, 5}): 128, frozenset({3, 4, 8, 9}): 256}


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("width", [3, 8])
def test_rows_of_several_queries(width):
    driver = driver_of(width=width)
    fill(driver, {2: 130})
    for row in (0, 1, 4, 5):
        driver.fork(2, row)
    found = companies(driver.step({0: 1, 1: width, 2: 2, 4: width, 5: 1}))
    assert [sorted(rows) for rows in found] == {3: [[0, 1, 2, 4, 5]], 8: [[0, 1], [2, 4]]}[width]


def test_tokens_of_a_packed_step():
    driver = driver_of(width=70, packed=True)
    assert max(companies(fill_packed(driver)).values()) == 128
    step_of_forks_packed(driver)


def test_rows_are_alike_by_every_block_and_by_their_lengths():
    """Of eight tables two differ in a block before one that is the same; rows are idle or not as long."""
    group = kv.CacheConfig([FULL], **SIZES).groups[0]
    table = np.tile(np.arange(30, dtype=np.int32), (8, 1))
    table[[4, 5], 2] = 250
    order = jnp.arange(8, dtype=jnp.int32)

    @jax.jit
    def columns(lengths, num_new):
        plan = plan_rows(group, order, lengths, num_new)
        return find_shared(plan, jnp.asarray(table), group, 1).num_of_row

    def found(lengths, num_new):
        return columns(jnp.asarray(lengths, jnp.int32), jnp.asarray(num_new, jnp.int32)).tolist()

    assert found([200, 192, 191, 300, 300, 300, 300, 300], [1] * 6 + [0, 1]) == [12, 12, 0, 12, 0, 0, 0, 12]
    assert found([200, 191, 191, 300, 300, 300, 300, 300], [1] * 6 + [0, 1]) == [8, 8, 8, 8, 0, 0, 0, 8]
    assert found([200, 191, 191, 300, 300, 300, 300, 300], [1, 1, 1, 0, 1, 1, 0, 0]) == [0] * 8
    assert found([127] * 8, [1] * 8) == [0] * 8


def next_tokens(tile_tokens, kinds=(FULL,), **options):
    """Makes a function that computes one more token of each of six forks, and its arguments."""
    config = kv.CacheConfig(
        kinds,
        num_blocks=60,
        block_size=BLOCK,
        max_seqs=6,
        max_seq_len=200,
        tile_tokens=tile_tokens,
        **options,
    )
    rng = np.random.default_rng(0)
    key_dim = kinds[0].head_dim
    first, second = jnp.asarray(rng.standard_normal((2, 150, HEADS, key_dim)), jnp.float32)
    q, k, v = jnp.asarray(rng.standard_normal((3, 6, 1, 2, key_dim)), jnp.float32)

    def run(first, second, q, k, v):
        cache, _ = kv.allocate(kv.init(config), [2], [150])
        cache, step = kv.extend(cache, [150], max_new=150, seq_ids=[2])
        first, second, k, v = first[None], second[None], k[:, :, :HEADS], v[:, :, :HEADS]
        if len(kinds[0].inputs) == 1:
            second = v = None
        for layer in range(len(kinds)):
            cache = kv.write(cache, layer, first, second, step)
        cache, _ = kv.fork(cache, [2] * 5, [0, 1, 3, 4, 5])
        cache, step = kv.extend(cache, [1] * 6, max_new=1)
        outs = []
        for layer in range(len(kinds)):
            cache, out = kv.attention(cache, layer, q, k, v, step, return_lse=True)
            outs.append(out)
        return outs, step

    return run, (first, second, q, k, v)


def test_gradients_are_those_of_rows_apart():
    def gradients(tile_tokens):
        run, arrays = next_tokens(tile_tokens)

        def loss(*arrays):
            ((out, lse),), step = run(*arrays)
            assert (step.plans[0].shared is None) == (tile_tokens is not None)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*arrays)

    for one, other in zip(gradients(None), gradients(256), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases("window")
@pytest.mark.parametrize(
    ("kinds", "shares"),
    [
        ((kv.Quantised(FULL, "int8"),), [True]),
        ((kv.LatentAttention(5, 3),), [True]),
        ((FULL, kv.SlidingWindow(HEADS, DIM, window=140, num_sink_tokens=20)), [True, False]),
    ],
    ids=["int8", "latent", "window"],
)
def test_kinds_share_where_they_keep_all_tokens(kinds, shares):
    results = []
    for tile_tokens in (None, 256):
        run, arrays = next_tokens(tile_tokens, kinds)
        results.append(jax.jit(run)(*arrays))
    (together, step), (apart, _) = results
    assert [plan.shared is not None for plan in step.plans] == shares
    assert companies(step) == {frozenset(range(6)): 128}
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def plans_of(config, width=1):
    def plans(cache):
        return kv.extend(cache, [width] * config.max_seqs, max_new=width)[1].plans

    return jax.eval_shape(plans, jax.eval_shape(lambda: kv.init(config)))


@pytest.mark.parametrize(
    "why", ["tile_tokens", "hidden tokens", "wide", "short", "one row", "sources", "mesh"]
)
def test_rows_read_their_own_where_sharing_has_no_use_or_no_meaning(why):
    config = kv.CacheConfig([FULL], **SIZES)
    assert plans_of(config)[0].shared is not None
    changes = {
        "tile_tokens": dict(tile_tokens=256),
        "hidden tokens": dict(extras=[kv.compression.Dropping()]),
        "short": dict(max_seq_len=128, max_query_len=None),
        "one row": dict(max_seqs=1),
        "sources": dict(layers=[kv.CrossAttention(HEADS, DIM, max_source_len=300), FULL]),
    }
    config = dataclasses.replace(config, **changes.get(why, {}))
    if why == "mesh":
        with jax.set_mesh(jax.make_mesh((1,), ("heads",))):
            assert plans_of(config)[0].shared is None
    else:
        assert plans_of(config, 9 if why == "wide" else 1)[0].shared is None


PROMPT = np.random.default_rng(1).integers(0, tiny_model.VOCAB, 150).tolist()
DRAWN = dict(num_blocks=80, block_size=BLOCK, max_seqs=6, max_seq_len=200)


@pytest.mark.slow
def test_generate_looks_for_columns_in_common_where_rows_may_have_some(monkeypatch):
    """Samples of a prompt and hits of prefixes have; other prompts are decoded by a smaller program."""

    class DecodedError(Exception):
        """With the argument in question."""

    def decode(*_, may_share, **__):
        raise DecodedError(may_share)

    monkeypatch.setattr(loop, "decode", decode)
    params, sizes = tiny_model.make_params(), dict(num_blocks=8, block_size=BLOCK, max_seqs=4, max_seq_len=64)
    for num_samples, has_index in ((1, False), (2, False), (1, True)):
        config = tiny_model.config(**sizes, enable_prefix_caching=has_index)
        with pytest.raises(DecodedError) as found:
            kv.generate(
                tiny_model.forward, params, [[1, 2]], config, max_new_tokens=2, num_samples=num_samples
            )
        assert found.value.args == (num_samples > 1 or has_index,)


def test_a_step_of_rows_that_share_nothing_is_planned_without():
    def plans(cache):
        return each_alone(kv.extend(cache, [1] * 24, max_new=1)[1]).plans

    cache = jax.eval_shape(lambda: kv.init(kv.CacheConfig([FULL], **SIZES)))
    assert jax.eval_shape(plans, cache)[0].shared is None


@pytest.mark.slow
def test_samples_of_a_prompt_are_the_same_together_and_apart():
    sampling = kv.decoding.SamplingParams(temperature=1.0, seed=3)
    together, apart = (
        kv.generate(
            tiny_model.forward,
            tiny_model.make_params(),
            [PROMPT],
            tiny_model.config(**DRAWN, tile_tokens=tile_tokens),
            max_new_tokens=8,
            num_samples=6,
            sampling=sampling,
        ).generations
        for tile_tokens in (None, 256)
    )
    texts = [one.tokens for one in together]
    assert texts == [other.tokens for other in apart] and len({*map(tuple, texts)}) > 1


@pytest.mark.slow
def test_requests_that_hit_one_prefix_answer_as_the_model_without_a_cache():
    params = tiny_model.make_params()
    config = tiny_model.config(**DRAWN, enable_prefix_caching=True)
    engine = kv.Engine(tiny_model.forward, params, config, token_budget=60)
    engine.push([kv.GenerationRequest(PROMPT, 1, id=-1)])  # publishes the prompt
    while engine.num_unfinished:
        engine.drain()
    engine.take_events()
    left = [kv.GenerationRequest([*PROMPT, i], 4, id=i) for i in range(6)]
    texts = {i: [*PROMPT, i] for i in range(6)}
    while left or engine.num_unfinished:
        left = left[engine.push(left) :]
        engine.drain()
        for event in engine.take_events():
            texts[event.id].extend(event.tokens)
    for i, text in texts.items():
        logits = tiny_model.dense_logits(params, text[:-1])[len(PROMPT) :]
        assert text[len(PROMPT) + 1 :] == jnp.argmax(logits, axis=-1).tolist() and len(text) == 155, i
