"""The checks that users get must pass on good code and notice bad code."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.oracle.comparison import check_against_oracle
from tests.oracle.oracle import Oracle
from tests.support.helpers import append_donated
from tests.support.prefix_user import PrefixUser
from tests.support.tiny_model import VOCAB, config, forward, make_params

PARAMS = make_params()
PREFIX_CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 5)] * 2,
    num_blocks=12,
    block_size=4,
    max_seqs=4,
    max_seq_len=48,
    enable_prefix_caching=True,
)
check = functools.partial(testing.check_forward, config=config(), vocab_size=VOCAB, num_tokens=12)


def model(tokens, cache, step):
    return forward(PARAMS, tokens, cache, step)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"eviction_policy": "fifo"}, {"extras": [kv.tiers.Host(num_blocks=8)]}])
def test_a_good_model_passes_with_a_policy_or_a_tier_and_the_least_of_everything(options):
    """It may rule a token out, and need room beside its cache."""

    def masked(tokens, cache, step):
        logits, cache = model(tokens, cache, step)
        if tokens.shape[1] > 1:
            flat = jnp.nan_to_num(logits).ravel()
            logits += 0 * jnp.sort(jnp.outer(flat, flat))[0, 0]
        return logits.at[..., 3].set(-jnp.inf), cache

    least = config(enable_prefix_caching=True, max_seq_len=9, num_blocks=12, **options)
    check(masked, config=least, num_tokens=9)


def with_call_positions(tokens, cache, step):
    """Takes a token's place in the call for its place in the sequence."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(PARAMS, tokens, cache, dataclasses.replace(step, positions=places))


def with_neighbours(tokens, cache, step):
    """Lets the rows of a call see each other."""
    logits, cache = forward(PARAMS, tokens, cache, step)
    return logits + 0.1 * jnp.nan_to_num(logits).mean(axis=0, keepdims=True), cache


def with_a_second_version(tokens, cache, step):
    """Goes on using the cache from before the writes."""
    logits, written = forward(PARAMS, tokens, cache, step)
    _, extra = kv.attend(cache, 0, jnp.ones((*tokens.shape, 4, 4)), step)
    return logits + 0 * jnp.nan_to_num(extra).sum(axis=(2, 3))[..., None], written


def with_a_second_version_of_a_prompt(tokens, cache, step):
    return (with_a_second_version if tokens.shape[1] > 1 else model)(tokens, cache, step)


def with_an_extend_of_its_own(tokens, cache, step):
    cache, step = kv.extend(cache, step.query_len, max_new=tokens.shape[1], tokens=tokens)
    return forward(PARAMS, tokens, cache, step)


class KeepsAnArray:
    """Adds what the call before has returned."""

    def __init__(self):
        self.kept = 0.0

    def __call__(self, tokens, cache, step):
        logits, cache = model(tokens, cache, step)
        logits, self.kept = logits + 0.1 * self.kept, logits.mean()
        return logits, cache


@pytest.mark.quick_cases("with_call_positions-differs")
@pytest.mark.parametrize(
    ("bad_model", "message"),
    [
        (with_call_positions, "differs"),
        (with_neighbours, "pieces differ|token by token differs"),
        (with_an_extend_of_its_own, r"left rows of \[0, 24, 0, 0\] tokens, expected \[0, 12, 0, 0\]"),
        (with_a_second_version, "step of 1 tokens .* a pool is copied"),
        (with_a_second_version_of_a_prompt, "step of 12 tokens .* a pool is copied"),
        (KeepsAnArray(), "keeps an array of one call in Python"),
    ],
)
def test_a_bad_model_is_named(bad_model, message):
    with pytest.raises(AssertionError, match=message):
        check(bad_model)


@pytest.mark.slow
def test_the_test_sequence_leaves_its_first_block():
    """A mistake in later blocks is found whatever their size."""

    def with_wrong_positions(tokens, cache, step):
        is_late = (step.positions >= 32) & (step.positions[:, :1] > 0)
        positions = jnp.where(is_late, step.positions - 1, step.positions)
        return forward(PARAMS, tokens, cache, dataclasses.replace(step, positions=positions))

    wide = config(block_size=32, max_seq_len=64)
    with pytest.raises(AssertionError, match="token by token differs"):
        testing.check_forward(with_wrong_positions, wide, vocab_size=VOCAB)


@pytest.mark.slow
def test_a_large_group_beside_one_of_few_blocks_is_checked():
    window = kv.SlidingWindow(2, 4, window=16, num_blocks=9)
    large = kv.CacheConfig([window, kv.FullAttention(2, 4, num_blocks=98_304)], max_seqs=3, max_query_len=16)
    check(model, config=large)


def without_attention(tokens, cache, step):
    """As with parameters that are 0 at first."""
    logits, cache = model(tokens, cache, step)
    return 0 * jnp.nan_to_num(logits) + jax.nn.one_hot(tokens, VOCAB), cache


def returns(change):
    """A forward that returns something else."""
    return {"forward": lambda tokens, cache, step: change(*model(tokens, cache, step))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"config": config(max_seqs=2)}, ValueError, "2 rows of 48 tokens, expected 3 of 12"),
        ({"config": config(max_seq_len=11)}, ValueError, "4 rows of 11 tokens, expected 3 of 12"),
        ({"config": config(max_query_len=11)}, ValueError, "max_query_len = 11, expected at least .* 12"),
        pytest.param(
            {"config": config(num_blocks=4)}, kv.StatusError, "OUT_OF_BLOCKS", marks=pytest.mark.slow
        ),
        ({"config": config(num_blocks=2)}, kv.StatusError, "allocate for 12 tokens .*OUT_OF_BLOCKS"),
        pytest.param(
            {"forward": without_attention},
            ValueError,
            "with the token before it, .* expected parameters with which attention matters",
            marks=pytest.mark.slow,
        ),
        ({"num_tokens": 8}, ValueError, "num_tokens is 8, expected at least 9"),
        (
            {"forward": forward},
            TypeError,
            r"takes \(params, .*expected \(tokens, cache, step\): bind",
        ),
        ({"forward": 5}, TypeError, "forward is 5, expected a function"),
        ({"config": kv.init(config())}, TypeError, "check_forward got a Cache, expected a CacheConfig"),
        ({"atol": float("nan")}, ValueError, "atol is nan, expected a finite number"),
        ({"atol": -1}, ValueError, "atol is -1.0, expected 0 or more"),
        ({"num_tokens": 12.5}, TypeError, "num_tokens is 12.5, expected an integer"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0, expected at least 1"),
        ({"vocab_size": VOCAB + 1}, ValueError, f"of {VOCAB} entries, expected vocab_size = {VOCAB + 1}"),
        ({"seed": -1}, ValueError, "seed is -1, expected at least 0"),
        (returns(lambda logits, _: logits), TypeError, r"returned \(float32\[4, 12, 16\]\), expected \(log"),
        (returns(lambda *_: None), TypeError, r"returned \(NoneType\), expected \(logits, cache\)"),
        (returns(lambda logits, cache: (cache, logits)), TypeError, r"returned \(Cache, .*expected \(logits"),
        (
            returns(lambda logits, cache: (logits[:, -1:], cache)),
            TypeError,
            r"float32\[4, 1, 16\] for tokens",
        ),
        (returns(lambda logits, cache: (logits[..., 0], cache)), TypeError, r"float32\[4, 12\] for tokens"),
        (returns(lambda logits, cache: (logits > 0, cache)), TypeError, "bool.*expected floats"),
    ],
)
def test_what_cannot_be_checked_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        check(**{"forward": model} | changes)


def test_the_oracle_refuses_prefixes_of_several_groups():
    layers = [kv.FullAttention(1, 4), kv.SlidingWindow(1, 4, window=5)]
    oracle = Oracle(kv.CacheConfig(layers, max_seq_len=32, enable_prefix_caching=True))
    with pytest.raises(NotImplementedError, match="prompts and several layer groups, expected one"):
        oracle.allocate([0], [2], [[1, 2]])


def test_the_checks_of_a_model_do_not_depend_on_assert():
    """Under `python -O` every `assert` is gone."""
    assert "assert " not in inspect.getsource(testing)


@functools.cache
def filled():
    """A cache and its oracle after the same calls: row 0 forked to 2, one copy made."""
    cache, oracle = testing.poison(kv.init(config())), Oracle(config())

    def append(cache, texts):
        tokens = np.zeros((4, 5), np.int32)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = ids
        oracle.extend(range(4), texts)
        return append_donated(cache, tokens, np.array([*map(len, texts)], np.int32))[0]

    cache, _ = kv.allocate(cache, [0, 1], [5, 9])
    oracle.allocate([0, 1], [5, 9])
    cache = append(cache, [[7, 8, 9, 1, 2], [3], [], []])
    cache, _ = kv.fork(cache, [0], [2])
    oracle.fork([0], [2])
    return append(cache, [[13], [], [], []]), oracle


def expected(oracle):
    return {row: r.tokens for row, r in oracle.rows.items()}


def test_the_oracle_agrees_and_the_tokens_are_there():
    cache, oracle = filled()
    assert check_against_oracle(cache, oracle) == []
    assert testing.check_tokens(cache, expected(oracle)) == []
    assert testing.check_tokens(testing.poison(cache), expected(oracle)) == []
    assert oracle.num_copies == 1


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_token_test_notices_one_wrong_number(name):
    cache, oracle = filled()
    block = int(cache.control.block_pools[0].block_table[2, 1])
    pool = cache.pools[0]
    spoiled = getattr(pool, name).at[config().num_blocks + block, 1, 0, 3].add(1)
    cache = dataclasses.replace(cache, pools=(kv.state.KVPool(arrays=pool.arrays | {name: spoiled}),))
    what = "keys" if name == "k" else "values"
    assert testing.check_tokens(cache, expected(oracle)) == [f"row 2 reads wrong {what} in layer 1 at [4]"]


def test_the_token_test_notices_rows_of_other_lengths():
    cache, oracle = filled()
    texts = {**expected(oracle), 1: [3, 4], 2: [7], 3: [2]}
    assert testing.check_tokens(cache, texts) == [
        "row 1 holds 1 tokens, expected 2",
        "row 2 holds 5 tokens, expected 1",
        "row 3 holds 0 tokens, expected 1",
    ]
    freed, _ = kv.free(cache, [0])
    assert testing.check_tokens(freed, expected(oracle)) == ["row 0 holds 0 tokens, expected 6"]
    rotated = kv.CacheConfig([kv.Quantised(kv.FullAttention(1, 8), "int8", rotate=True)], max_seq_len=8)
    assert testing.check_tokens(kv.init(rotated), {}) == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[7]], "TypeError: expected is [[7]], expected a dict: row -> tokens"),
        ({-1: [7]}, "ValueError: row is -1, expected 0 <= row"),
        ({0.0: [7]}, "TypeError: row is 0.0, expected an integer"),
        ({0: 7}, "TypeError: tokens is 7, expected a list of token ids"),
        ({0: [7.0]}, "TypeError: token is 7.0, expected an integer"),
        ({0: [2**31]}, "ValueError: token is 2147483648, expected -2147483648 <= token"),
    ],
)
def test_what_the_token_test_cannot_compare_is_refused(texts, message):
    said = ""
    try:
        testing.check_tokens(filled()[0], texts)
    except (TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    assert said.startswith(message)
    with pytest.raises(ValueError, match="built with storage=False"):
        testing.check_tokens(kv.init(config(), storage=False), {})
    with pytest.raises(TypeError, match="tokens has dtype float32, expected integers"):
        testing.write_tokens(filled()[0], np.ones((4, 5), np.float32), None)


@pytest.mark.slow
def test_the_token_test_and_the_oracle_look_at_chunks_too():
    sizes = dict(num_blocks=8, block_size=4, max_seqs=2, max_seq_len=24, extras=[kv.chunks.Store(3, 6)])
    config = kv.CacheConfig([kv.FullAttention(1, 5)], **sizes)
    cache, oracle = testing.poison(kv.init(config)), Oracle(config)
    text = [*range(100, 109)]
    cache, _ = kv.allocate(cache, [0, 1], [9, 0])
    cache, step = kv.extend(cache, [9, 0], max_new=9)
    cache = testing.write_tokens(cache, jnp.array([text, text]), step)
    cache, _ = kv.chunks.store(cache, [0], [2], [6], [text[2:8]])
    cache, _ = kv.chunks.compose(cache, [1], [[0]], [[3]], rotate=None)
    oracle.allocate([0, 1], [9, 0])
    oracle.extend([0], [text])
    oracle.store_chunk([0], [2], [6], [text[2:8]])
    oracle.compose([1], [[0]], [[3]])
    assert expected(oracle)[1] == [None] * 3 + text[2:8]
    assert check_against_oracle(cache, oracle) == testing.check_tokens(cache, expected(oracle)) == []
    block = int(cache.control.extras["chunks"].block_ids[0][0, 0])
    arrays = {name: values.at[block, 0, 3].add(1) for name, values in cache.pools[0].arrays.items()}
    spoiled = dataclasses.replace(cache, pools=(kv.state.KVPool(arrays=arrays),))
    assert testing.check_tokens(spoiled, expected(oracle)) == [
        f"chunk 0 reads wrong {what} in layer 0 at [1]" for what in ("keys", "values")
    ]
    forgotten, _ = kv.chunks.free(cache, [0])
    assert any(line.startswith("chunk 0 is ") for line in check_against_oracle(forgotten, oracle))
    plain, _ = kv.truncate(cache, [1], [0])
    assert "row 1 is composed from -1 on, expected 0" in check_against_oracle(plain, oracle)


def test_the_oracle_notices_lengths_rows_counts_and_sharing():
    cache, oracle = filled()
    shorter, _ = kv.truncate(cache, [1], [0])
    assert any("row 1 holds 0 tokens, expected 1" in line for line in check_against_oracle(shorter, oracle))
    freed, _ = kv.free(cache, [2])
    assert check_against_oracle(freed, oracle) == ["rows [0, 1] are active, expected [0, 1, 2]"]
    unshared = jax.tree.map(lambda x: x, cache)
    pool = cache.control.block_pools[0]
    table = pool.block_table.at[2, 0].set(pool.free_stack[0])
    control = dataclasses.replace(cache.control, block_pools=(dataclasses.replace(pool, block_table=table),))
    unshared = dataclasses.replace(cache, control=control)
    assert check_against_oracle(unshared, oracle) == ["group 0: row 2 column 0 is not shared as expected"]
    counters = cache.control.counters.at[kv.state.Counter.COPIES].add(1)
    counted = dataclasses.replace(cache, control=dataclasses.replace(cache.control, counters=counters))
    assert check_against_oracle(counted, oracle) == ["2 copies, expected 1"]


def test_poison_spares_exactly_the_tokens():
    cache, oracle = filled()
    poisoned = testing.poison(cache)
    num_tokens = 6 + 1 + 1  # rows 0 and 2 share four tokens
    for pool in poisoned.pools:
        for values in (pool.k, pool.v):
            held = ~np.isnan(np.asarray(values)).any(axis=(1, 3))
            assert held.sum() == 2 * num_tokens
    assert len(expected(oracle)[0]) == 6


@pytest.mark.slow
def test_poison_spares_what_later_prompts_may_read():
    user = PrefixUser(PREFIX_CONFIG)
    text = user.new_text(1, 9)
    user.start(0, text)
    user.truncate(0, 5)  # into the middle of a published block
    user.cache = testing.poison(user.cache)
    assert user.start(1, text) == 8  # which compares what the hit reads
    user.free(0, 1)
    user.cache = testing.poison(user.cache)
    is_spoilt = np.isnan(np.asarray(user.cache.pools[0].k)).all(axis=(1, 2, 3))
    assert is_spoilt.sum() == 2 * (12 - 2)
    assert user.start(2, text) == 8


def test_codes_tell_tokens_layers_heads_and_halves_apart():
    tokens = np.arange(2**14)
    codes = [
        testing.token_codes(tokens, layer, 2, 5, is_value) for layer in range(3) for is_value in (False, True)
    ]
    rows = np.concatenate([code.reshape(-1, 5) for code in codes])
    assert len(np.unique(rows, axis=0)) == len(rows)
    for dtype in (jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(np.asarray(jnp.asarray(rows).astype(dtype).astype(jnp.float32)), rows)
    np.testing.assert_array_equal(testing.token_codes(jnp.asarray(tokens), 1, 2, 5, True), codes[3])
