"""What is known at trace time raises, and says what it got and what it expected."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from kvcache_jax.core.token_arguments import host_tokens, token_ids
from tests.support.helpers import says, statuses

STATIC_ERRORS = (ValueError, TypeError, NotImplementedError)


def started(config, lengths=None):
    cache = kv.init(config)
    cache, _ = kv.allocate(cache, list(range(config.max_seqs)), lengths or [1] * config.max_seqs)
    return cache


SMALL = kv.CacheConfig(
    layers=[kv.FullAttention(num_kv_heads=2, head_dim=8)] * 2,
    num_blocks=6,
    block_size=4,
    max_seqs=3,
    max_seq_len=20,
    max_query_len=7,
)
MIXED = kv.CacheConfig(
    layers=[
        kv.FullAttention(num_kv_heads=2, head_dim=8),
        kv.SlidingWindow(num_kv_heads=2, head_dim=8, window=5),
    ],
    num_blocks=6,
    block_size=4,
    max_seqs=3,
    max_seq_len=20,
    max_query_len=7,
)


@pytest.fixture(scope="module")
def small():
    cache = started(SMALL)
    return kv.extend(cache, [1, 1, 1], max_new=2)


def zeros(*shape, dtype=np.float32) -> Any:
    return np.zeros(shape, dtype)


# name -> (shapes of q, k, v; what the message names); right are n=3, max_new=2, 4 and 2 heads, dim 8
Q, K = (3, 2, 4, 8), (3, 2, 2, 8)
ATTENTION_ERRORS = {
    "q without a head axis": ((3, 2, 8), K, K, ("3, 2, 8",)),
    "q without a token axis": ((3, 4, 8), K, K, ("3, 4, 8",)),
    "q with a fifth axis": ((1, *Q), K, K, ("1, 3, 2, 4, 8",)),
    "q heads not a multiple of kv heads": ((3, 2, 3, 8), K, K, (3, 2)),
    "fewer q heads than kv heads": ((3, 2, 1, 8), K, K, (1, 2)),
    "q head_dim": ((3, 2, 4, 6), K, K, (6, 8)),
    "q rows": ((4, 2, 4, 8), K, K, (4, 3)),
    "q max_new": ((3, 1, 4, 8), K, K, (1, 2)),
    "k rank": (Q, (3, 2, 8), K, ("3, 2, 8",)),
    "k heads": (Q, (3, 2, 4, 8), (3, 2, 4, 8), (4, 2)),
    "k head_dim": (Q, (3, 2, 2, 5), K, (5, 8)),
    "v head_dim": (Q, K, (3, 2, 2, 5), (5, 8)),
    "v heads": (Q, K, (3, 2, 1, 8), (1, 2)),
    "k rows": (Q, (2, 2, 2, 8), (2, 2, 2, 8), (2, 3)),
    "k max_new": (Q, (3, 3, 2, 8), (3, 3, 2, 8), (3, 2)),
    "k and v differ": (Q, K, (3, 1, 2, 8), (1, 2)),
}


@pytest.mark.parametrize("case", ATTENTION_ERRORS)
def test_attention_refuses_wrong_shapes(small, case):
    cache, step = small
    q, k, v, match = ATTENTION_ERRORS[case]
    with pytest.raises(STATIC_ERRORS, match=says(*match)):
        kv.attention(cache, 0, zeros(*q), zeros(*k), zeros(*v), step)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_attention_refuses_integers(small, position):
    cache, step = small
    arrays = [zeros(*Q), zeros(*K), zeros(*K)]
    arrays[position] = arrays[position].astype(np.int32)
    with pytest.raises(STATIC_ERRORS, match=says("int32")):
        kv.attention(cache, 0, arrays[0], arrays[1], arrays[2], step)


def test_attention_refuses_bad_options(small):
    cache, step = small
    good = (zeros(*Q), zeros(*K), zeros(*K), step)
    with pytest.raises(STATIC_ERRORS, match="nonsense"):
        kv.attention(cache, 0, *good, implementation="nonsense")
    with pytest.raises(
        STATIC_ERRORS, match="mosaic_gpu"
    ):  # named implementations run or raise, they never fall back
        kv.attention(cache, 0, *good, implementation="mosaic_gpu")
    for sink_logits in (zeros(3), zeros(1, 4), 0.0):
        with pytest.raises(ValueError, match=rf"shape {re.escape(str(np.shape(sink_logits)))}.* \(4,\)"):
            kv.attention(cache, 0, *good, sink_logits=sink_logits)
    for value in (jnp.ones(2, bool), np.ones(2), jnp.bool_(True), 1):
        with pytest.raises(TypeError, match="return_lse is .*expected True or False"):
            kv.attention(cache, 0, *good, return_lse=value)
    for name in ("scale", "soft_cap"):
        for value in ("a", "2", True, [1.0], zeros(1), 1j):
            with pytest.raises(TypeError, match=f"{name} is .*expected a Python number"):
                kv.attention(cache, 0, *good, **{name: value})
    with pytest.raises(STATIC_ERRORS, match="nonsense"):
        kv.CacheConfig(layers=SMALL.layers, num_blocks=6, implementation="nonsense")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_attention_refuses_options_that_make_everything_nan(small, value):
    cache, step = small
    for name in ("scale", "soft_cap"):
        with pytest.raises(ValueError, match=f"{name} is .*, expected a finite number"):
            kv.attend(cache, 0, zeros(*Q), step, **{name: value})


@pytest.mark.parametrize(
    "layer", [None, "0", True, 1.0, ("a", 0), (0, None), (None, 0), (0, True), (0,), [0, 1], {}], ids=repr
)
def test_what_is_no_layer_is_named(small, layer):
    cache, step = small
    with pytest.raises((TypeError, ValueError), match=r"(layer|group) is .*expected"):
        kv.attend(cache, layer, zeros(*Q), step)


@pytest.mark.slow
def test_what_stands_in_the_wrong_place_is_named(small):
    cache, step = small
    admission = kv.allocate(kv.init(SMALL), [0], [1])[1]
    q, k = zeros(*Q), zeros(*K)
    for wrong in (None, (cache, step), admission):
        with pytest.raises(TypeError, match=f"step is a {type(wrong).__name__}, expected the Step"):
            kv.attention(cache, 0, q, k, k, wrong)
        with pytest.raises(TypeError, match=f"got a {type(wrong).__name__}, expected a Cache"):
            kv.fork(wrong, [0], [1])

    def step_of(config):
        return jax.eval_shape(lambda: kv.extend(kv.init(config), [1, 1, 1], max_new=2, seq_ids=[0, 1, 2])[1])

    with pytest.raises(ValueError, match="step has 2 layer groups, expected 1"):
        kv.attend(cache, 0, q, step_of(MIXED))
    for sizes, got, expected in (
        (dict(num_blocks=7), "num_blocks = 7", "num_blocks = 6"),
        (
            dict(max_seqs=4, max_seq_len=24),
            "max_seqs = 4, max_seq_len = 24",
            "max_seqs = 3, max_seq_len = 20",
        ),
    ):
        other_step = step_of(dataclasses.replace(SMALL, **sizes))
        for call in (
            lambda step: kv.attention(cache, 0, q, k, k, step),
            lambda step: kv.attend(cache, 0, q, step),
            lambda step: jax.jit(lambda step: kv.write(cache, 0, k, k, step))(step),
        ):
            with pytest.raises(ValueError, match=f"step is of a cache with {got}, expected {expected}: pass"):
                call(other_step)
    mask = np.array([True, False, True])
    for column in (mask, jnp.asarray(mask), mask.tolist()):
        ids = re.escape("jnp.where(mask, jnp.arange(max_seqs), max_seqs)")
        with pytest.raises(TypeError, match=f"seq_ids has dtype bool, expected integers: of a mask, {ids}"):
            kv.free(cache, column)
        with pytest.raises(
            TypeError, match=r"num_new has dtype bool, .* of a mask, mask.astype\(jnp.int32\)"
        ):
            kv.extend(cache, column, max_new=1)
    for arrays in ((None, k, k), (q, k.tolist(), k), (q, k, None)):
        with pytest.raises(TypeError, match="[qkv] is a (NoneType|list), expected an array"):
            kv.attention(cache, 0, *arrays, step)
    for sink_logits in ([True] * 4, [1j] * 4):
        with pytest.raises(TypeError, match="sink_logits has dtype (bool|complex128), expected real numbers"):
            kv.attend(cache, 0, q, step, sink_logits=sink_logits)
    for call in (kv.init, kv.describe, kv.memory_bytes):
        with pytest.raises(TypeError, match=f"{call.__name__} got a Cache, expected a CacheConfig"):
            call(cache)
    with pytest.raises(TypeError, match="storage is 'no', expected True or False"):
        kv.init(SMALL, storage="no")
    with pytest.raises(ValueError, match="num_new is no array .*expected rows of one length"):
        kv.extend(cache, [[1], [1, 2]], max_new=2)


@pytest.mark.slow
def test_lists_may_hold_numbers_that_are_traced():
    cache = kv.init(dataclasses.replace(SMALL, enable_prefix_caching=True))
    cache, _ = kv.allocate(cache, [0], [3], tokens=[[1, 2, 3]])

    @jax.jit
    def go_on(cache, row, token):
        cache, freed = kv.free(cache, [2, row + 1])
        cache, step = kv.extend(cache, [row + 2], max_new=2, seq_ids=[row], tokens=[[token, 5]])
        return cache, jnp.concatenate([freed, step.status])

    cache, status = go_on(cache, 0, 7)
    assert status.tolist() == [Status.SEQ_NOT_ACTIVE, Status.SEQ_NOT_ACTIVE, Status.OK]
    block = int(cache.control.block_pools[0].block_table[0, 0])
    assert cache.control.prefix_index.block_tokens[block].tolist()[:2] == [7, 5]
    for wrong in (lambda row: [row, [1]], lambda row: [row, 2**40], lambda row: [row, None]):
        with pytest.raises(TypeError, match="seq_ids is no array .*expected numbers of 32 bits"):
            jax.eval_shape(lambda row, wrong=wrong: kv.free(cache, wrong(row)), 0)
    with pytest.raises(TypeError, match="seq_ids has dtype float32, expected integers"):
        jax.eval_shape(lambda row: kv.free(cache, [row, 0.5]), 0)


def test_what_is_no_flag_share_or_namespace_is_named(small):
    cache, _ = small
    prompt = dict(tokens=np.zeros((1, 4), np.int32))
    for reuse in ("no", 0.5, [True, False], None, object):
        with pytest.raises(ValueError, match=r"reuse is .*, expected bool \(\) or \(1,\)"):
            kv.allocate(kv.init(SMALL), [0], [4], **prompt, reuse=reuse)
    for namespace in ("acme", [2**40] * 4, [1, 2, 3, 4], np.zeros(3, np.uint32)):
        with pytest.raises(ValueError, match=r"namespace is .*, expected uint32 \(4,\) or \(1, 4\)"):
            kv.allocate(kv.init(SMALL), [0], [4], **prompt, namespace=namespace)
    for number in ("0", [2.0], None, True, [[0.5]]):
        with pytest.raises(TypeError, match=r"target is .*, expected one number from 0 to 1"):
            kv.preempt_to_utilization(cache, number)
    for number in (float("nan"), -0.1, np.float32(2), jnp.float32(2)):
        with pytest.raises(ValueError, match="target is .*, expected 0 <= target <= 1"):
            kv.preempt_to_utilization(cache, number)
    with pytest.raises(TypeError, match="item is a str, expected the item's bytes"):
        kv.item_tokens("text", 2)


@pytest.mark.parametrize("layer", [2, -1, 7])
def test_layer_out_of_range(small, layer):
    cache, step = small
    with pytest.raises(STATIC_ERRORS, match=says(layer, 2)):
        kv.attention(cache, layer, zeros(*Q), zeros(*K), zeros(*K), step)
    with pytest.raises(STATIC_ERRORS, match=says(layer, 2)):
        kv.write(cache, layer, zeros(*K), zeros(*K), step)
    with pytest.raises(STATIC_ERRORS, match=says(layer, 2)):
        kv.attend(cache, layer, zeros(*Q), step)
    with pytest.raises(STATIC_ERRORS, match=says(layer, 2)):
        kv.gather(cache, 0, layer)


@pytest.mark.slow
def test_traced_layer_with_several_groups():
    cache = started(MIXED)
    cache, step = kv.extend(cache, [1, 1, 1], max_new=2)

    def run(cache, layer, step):
        return kv.attention(cache, layer, zeros(*Q), zeros(*K), zeros(*K), step)

    with pytest.raises(STATIC_ERRORS, match="(?i)group"):
        jax.eval_shape(run, cache, jnp.int32(0), step)
    with pytest.raises(STATIC_ERRORS, match="2"):
        jax.eval_shape(lambda cache, layer, step: run(cache, (2, layer), step), cache, jnp.int32(0), step)
    jax.eval_shape(lambda cache, layer, step: run(cache, (1, layer), step), cache, jnp.int32(0), step)


def test_extend_refuses_bad_arguments(small):
    cache, _ = small
    good = [1, 1, 1]
    for arguments, match in (
        ({}, ("max_new", "num_tokens")),
        ({"max_new": 2, "num_tokens": 6}, ("max_new", "num_tokens")),
        ({"max_new": 8}, (8, 7)),  # more than max_query_len
        ({"max_new": 0}, (0,)),
        ({"max_new": -3}, (-3,)),
        ({"num_tokens": -1}, (-1,)),
        ({"num_tokens": 2**31 // 3}, (2**31 // 3, 2**31 // 3 - 1)),  # three rows that ask for as much
        ({"max_new": 2, "seq_ids": [0, 1]}, (2, 3)),
        ({"max_new": 2, "seq_ids": [[0, 1, 2]]}, ("1, 3",)),
        ({"max_new": 2, "seq_ids": np.array([0.0, 1.0, 2.0], np.float32)}, ("float32",)),
    ):
        with pytest.raises(STATIC_ERRORS, match=says(*match)):
            kv.extend(cache, good, **arguments)
    with pytest.raises(STATIC_ERRORS, match=says("float32")):
        kv.extend(cache, np.ones(3, np.float32), max_new=2)
    with pytest.raises(STATIC_ERRORS, match=says(2, 3)):
        kv.extend(cache, [1, 1], max_new=2)  # seq_ids=None means all three rows
    with pytest.raises(STATIC_ERRORS, match=says(5, 3)):
        kv.extend(cache, [1] * 5, max_new=2)


ROW_CALLS = {
    "allocate": kv.allocate,
    "fork": lambda cache, targets, sources: kv.fork(cache, sources, targets),
    "reorder": kv.reorder,
    "truncate": kv.truncate,
    "free": lambda cache, seq_ids, _: kv.free(cache, seq_ids),
    "touch": lambda cache, seq_ids, _: kv.touch(cache, seq_ids),
    "set_priority": kv.set_priority,
}


@pytest.mark.parametrize("operation", ROW_CALLS)
def test_row_operations_refuse_bad_ids(small, operation):
    cache, _ = small
    call = ROW_CALLS[operation]
    with pytest.raises(STATIC_ERRORS, match=says("float32")):
        call(cache, np.zeros(2, np.float32), np.zeros(2, np.int32))
    with pytest.raises(STATIC_ERRORS, match="empty"):
        call(cache, np.zeros(0, np.int32), np.zeros(0, np.int32))
    with pytest.raises(STATIC_ERRORS, match=says("1, 2")):
        call(cache, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32))
    if operation not in ("free", "touch"):
        with pytest.raises(STATIC_ERRORS, match=says("float32")):
            call(cache, np.zeros(2, np.int32), np.zeros(2, np.float32))
        with pytest.raises(STATIC_ERRORS, match=says(2, 3)):
            call(cache, [0, 1], [0, 0, 0])


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1, 2**40, 2**62])
def test_token_ids_that_do_not_fit_are_refused(wide):
    """Cut to 32 bits, ids would meet others, and rows would hit what is not theirs."""
    cache = kv.init(dataclasses.replace(SMALL, enable_prefix_caching=True), storage=False)
    calls = (
        lambda ids: kv.lookup(cache, [ids], [2]),
        lambda ids: kv.allocate(cache, [0], [2], tokens=[ids]),
        lambda ids: kv.extend(cache, [2, 0, 0], max_new=2, tokens=[ids, [0, 0], [0, 0]]),
        lambda ids: kv.inspect.explain(cache, ids),
    )
    for call in calls:
        with pytest.raises(ValueError, match=says(wide, "uint32")):
            call([1, wide])
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=says(wide, "uint32")):
            kv.lookup(cache, jnp.array([[1, wide]]), [2])
        with pytest.raises(TypeError, match=says("int64", 32)):
            jax.eval_shape(lambda ids: kv.lookup(cache, ids, [2]), jnp.array([[1, 2]]))


def test_unsigned_token_ids_keep_all_their_bits():
    ids = np.array([[3_000_000_001, 4_000_000_001, 7]], np.uint32)
    for values in (ids, jnp.asarray(ids)):
        assert np.asarray(token_ids(values, 1, None)).view(np.uint32).tolist() == ids.tolist()
    assert host_tokens("ids", np.array([200], np.uint8)).tolist() == [200]


def test_append_refuses_wrong_shapes(small):
    cache, _ = small
    good = zeros(2, *K)
    for keys, values, match in (
        (zeros(3, *K), zeros(3, *K), (3, 2)),  # layers
        (good, zeros(2, 3, 2, 2, 5), (5, 8)),
        (zeros(2, 3, 2, 4, 8), good, (4, 2)),
        (zeros(2, 4, 2, 2, 8), zeros(2, 4, 2, 2, 8), (4, 3)),
        (zeros(2, 3, 8, 2, 8), zeros(2, 3, 8, 2, 8), (8, 7)),  # more than max_query_len
        (good.astype(np.int32), good.astype(np.int32), ("int32",)),
        (good, good[0], (K, "num_layers")),
        (1.0, good, ("float",)),
        ([1], good, ("int",)),
        (good, good.tolist(), ("list",)),
        ([good[0], good], good, ("shape", good.shape)),
        (good, {0: good[0], 1: good[1]}, ("dict",)),
    ):
        with pytest.raises(STATIC_ERRORS, match=says(*match)):
            kv.append(cache, keys, values, [1, 1, 1])


def test_storage_free_caches_have_nothing_to_attend():
    cache = kv.init(SMALL, storage=False)
    cache, admission = kv.allocate(cache, [0, 1, 2], [3, 1, 1])
    assert statuses(admission.status) == [Status.OK] * 3
    cache, step = kv.extend(cache, [1, 1, 1], max_new=2)
    assert statuses(step.status) == [Status.OK] * 3
    with pytest.raises(STATIC_ERRORS, match="storage"):
        kv.attention(cache, 0, zeros(*Q), zeros(*K), zeros(*K), step)
    with pytest.raises(STATIC_ERRORS, match="storage"):
        kv.gather(cache, 0, 0)
    with pytest.raises(STATIC_ERRORS, match="storage"):
        kv.testing.poison(cache)


@pytest.mark.parametrize(
    ("name", "call"), [("seq_id", lambda cache, x: kv.gather(cache, x, 0)), ("num_blocks", kv.evict)]
)
def test_scalars_are_one_integer(small, name, call):
    cache, _ = small
    for value in ([0], zeros(1, dtype=np.int32), jnp.zeros(1, jnp.int32)):
        with pytest.raises(ValueError, match=rf"{name} has shape \(1,\), expected one integer"):
            call(cache, value)
    for value in (True, 1.0, None, np.float32(1), jnp.bool_(True)):
        with pytest.raises(TypeError, match=rf"{name} has dtype .*, expected integers"):
            call(cache, value)


def test_counts_are_integers_of_the_host(small):
    cache, _ = small
    assert kv.select_rows_to_preempt(cache, "lru", np.int64(2)).shape == (2,)
    for value in (2.5, True, np.bool_(True), None, "2"):
        with pytest.raises(TypeError, match=rf"n is {re.escape(repr(value))}, expected an integer"):
            kv.select_rows_to_preempt(cache, "lru", value)
    with pytest.raises(TypeError, match="n is .*Tracer.*expected an integer: a Python int"):
        jax.jit(lambda n: kv.select_rows_to_preempt(cache, "lru", n))(2)
    with pytest.raises(ValueError, match="n is 4, expected 1 <= n <= max_seqs = 3"):
        kv.select_rows_to_preempt(cache, "lru", 4)
    with pytest.raises(ValueError, match="num_tokens is -1, expected at least 0"):
        kv.item_tokens(b"image", -1)
    for value in (False, 1.0, "0"):
        with pytest.raises(TypeError, match=rf"group is {re.escape(repr(value))}, expected an integer"):
            kv.num_available_blocks(cache, group=value)
        with pytest.raises(TypeError, match=rf"group is {re.escape(repr(value))}, expected an integer"):
            kv.block_map(cache, group=value)


LAYER = kv.FullAttention(num_kv_heads=2, head_dim=8)


def small_config(**changes: Any):
    sizes: dict[str, Any] = dict(layers=[LAYER], num_blocks=8, block_size=4, max_seqs=2, max_seq_len=16)
    sizes.update(changes)
    return kv.CacheConfig(**sizes)


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_seqs", "max_seq_len", "max_query_len"])
@pytest.mark.parametrize("value", [0, -3])
def test_config_refuses_sizes_below_one(field, value):
    with pytest.raises(STATIC_ERRORS, match=says(field, value)):
        small_config(**{field: value})


@pytest.mark.parametrize(
    "kind, sizes",
    [
        (kv.FullAttention, {"num_kv_heads": 0, "head_dim": 8}),
        (kv.FullAttention, {"num_kv_heads": -1, "head_dim": 8}),
        (kv.FullAttention, {"head_dim": 0, "num_kv_heads": 2}),
        (kv.FullAttention, {"num_blocks": 0, "num_kv_heads": 2, "head_dim": 8}),
        (kv.FullAttention, {"block_size": -4, "num_kv_heads": 2, "head_dim": 8}),
        (kv.SlidingWindow, {"window": 0, "num_kv_heads": 2, "head_dim": 8}),
        (kv.SlidingWindow, {"window": -5, "num_kv_heads": 2, "head_dim": 8}),
        (kv.SlidingWindow, {"num_sink_tokens": -1, "window": 4, "num_kv_heads": 2, "head_dim": 8}),
        (kv.SlidingWindow, {"max_rollback": -2, "window": 4, "num_kv_heads": 2, "head_dim": 8}),
    ],
)
def test_layer_kinds_refuse_sizes_below_one(kind, sizes):
    field, value = next(iter(sizes.items()))
    with pytest.raises(STATIC_ERRORS, match=says(field, value)):
        small_config(layers=[kind(**sizes)])


def test_config_refuses_what_does_not_fit():
    with pytest.raises(STATIC_ERRORS, match="layer"):
        small_config(layers=[])
    block_bytes = small_config().groups[0].block_bytes
    assert block_bytes == 2 * 4 * 2 * 8 * 4
    assert small_config(num_blocks=None, memory_budget=block_bytes).groups[0].num_blocks == 1
    with pytest.raises(STATIC_ERRORS, match=says(block_bytes - 1, block_bytes)):
        small_config(num_blocks=None, memory_budget=block_bytes - 1)
    with pytest.raises(STATIC_ERRORS, match=says("num_blocks", "memory_budget")):
        small_config(memory_budget=100 * block_bytes)
    with pytest.raises(STATIC_ERRORS, match=r"(?s)2147483648|2\*\*31|2\^31|2147483647|int32"):
        small_config(layers=[LAYER] * 2, num_blocks=2**30)
    for dtype, name in ((jnp.int8, "int8"), (None, "None"), ("nope", "'nope'"), ([3], "[3]")):
        with pytest.raises(
            ValueError, match=re.escape(f"dtype is {name}, expected one of float32, bfloat16")
        ):
            small_config(dtype=dtype)
    with pytest.raises(TypeError, match="enable_prefix_caching is 'no', expected True or False"):
        small_config(enable_prefix_caching="no")
    assert small_config(enable_prefix_caching=np.True_).enable_prefix_caching is True
    with pytest.raises(TypeError, match="layers is None, expected a list"):
        small_config(layers=None)


@pytest.mark.slow
def test_windows_reach_as_far_as_positions():
    window = functools.partial(kv.SlidingWindow, num_kv_heads=1, head_dim=8)
    for field in ("num_sink_tokens", "max_rollback"):
        with pytest.raises(ValueError, match=rf"{field} is 1000000000000, expected below 2\*\*31"):
            window(window=4, **{field: 10**12})
    with pytest.raises(ValueError, match=r"window \+ max_rollback is 2147483648, expected below 2\*\*31"):
        window(window=16, max_rollback=2**31 - 16)
    for kind in (window(window=2**31 - 1), window(window=16, max_rollback=2**31 - 17)):
        config = kv.CacheConfig([kind], num_blocks=4, block_size=4, max_seqs=2, max_seq_len=32)
        cache, _ = kv.allocate(kv.init(config, storage=False), [0, 1], [8, 8])
        cache, step = kv.extend(cache, [8, 8], max_new=8)
        cache, full = kv.extend(cache, [1, 1], max_new=8)
        assert statuses(step.status) == [Status.OK] * 2
        assert statuses(full.status) == [Status.OUT_OF_BLOCKS] * 2
        assert kv.check_invariants(cache) == []


def test_batched_queries_need_a_batched_cache(small):
    cache, step = small
    with pytest.raises(STATIC_ERRORS, match="(?i)vmap|batch"):
        jax.vmap(lambda q: kv.attend(cache, 0, q, step))(zeros(5, *Q))
