"""Sources: written once, read by all tokens of their rows, shared by forks and beams, never copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.config import config_from_json, config_to_json
from tests.support.helpers import assert_invariants, assert_same, leaf_bytes, num_copies, statuses

OK, ROWS, WIDTH, MOST = kv.Status.OK, 4, 14, 11
FULL = kv.FullAttention(2, 4)
CROSS = kv.CrossAttention(1, 3, max_source_len=MOST)
# Two layers of one group, and one of another: the source of a row has blocks in both.
LAYERS = [FULL, CROSS, kv.CrossAttention(2, 4, max_source_len=MOST, block_size=3), CROSS]
CONFIG = kv.CacheConfig(LAYERS, num_blocks=9, block_size=4, max_seqs=ROWS, max_seq_len=16)


def source_arrays(rows, width=WIDTH, seed=0):
    """Keys and values of the source layers, another number in each place."""
    rng = np.random.default_rng(seed)
    heads = [(1, 3), (2, 4), (1, 3)]
    return [[rng.standard_normal((rows, width, *shape), np.float32) for shape in heads] for _ in "kv"]


write = kv.donate(kv.write_source)


def entries(rows, lengths):
    """Four of both, so that one program serves all calls."""
    num_more = ROWS - len(rows)
    return np.array([*rows, *[ROWS] * num_more]), np.array([*lengths, *[0] * num_more])


def store(cache, rows, lengths, seed=0):
    """Stores sources in a poisoned cache; returns it, the statuses, and what each row ought to hold."""
    k, v = source_arrays(ROWS, seed=seed)
    padded_rows, padded_lengths = entries(rows, lengths)
    cache, status = write(testing.poison(cache), padded_rows, k, v, padded_lengths)
    held = {
        row: [(a[i, :n], b[i, :n]) for a, b in zip(k, v, strict=True)]
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
    }
    return cache, statuses(status)[: len(rows)], held


def started(rows=(0, 1, 2), lengths=(3, 5, 2)):
    cache, admission = kv.allocate(kv.init(CONFIG), *entries(rows, lengths))
    assert set(statuses(admission.status)[: len(rows)]) == {OK}
    return cache


def assert_held(cache, held):
    """Row by row, `gather` reads the source back, bit for bit, and zeros after it."""
    for row, layers in held.items():
        for layer, (k, v) in zip(CONFIG.source_layers, layers, strict=True):
            *found, length = kv.gather(cache, row, layer)
            assert int(length) == len(k)
            for got, want in zip(map(np.asarray, found), (k, v), strict=True):
                assert got.shape[0] == MOST
                np.testing.assert_array_equal(got[: len(want)], want)
                assert not got[len(want) :].any()


@pytest.mark.slow
def test_sources_are_read_back_and_take_their_blocks_alone():
    cache, found, held = store(started(), [2, 0, 1], [11, 1, 4])
    assert found == [OK] * 3
    assert_held(testing.poison(cache), held)
    assert_invariants(cache)
    assert cache.control.source_len.tolist() == [1, 4, 11, 0]
    assert [int(kv.num_available_blocks(cache, group=g)) for g in (1, 2)] == [9 - 5, 9 - 7]
    assert kv.num_blocks_needed(cache, [12] * ROWS).tolist() == [2, 1, 2, 0]


def test_each_status():
    cache, found, _ = store(started((0, 1, 2)), [0], [5])
    before = leaf_bytes(cache)
    for rows, lengths, names in (
        ([0, 1, 2, 3], [2, 12, -1, 1], ("HAS_SOURCE", "TOO_LONG", "BAD_LENGTH", "SEQ_NOT_ACTIVE")),
        ([4, 5, 1, 1], [1, 1, 12, 1], ("SKIPPED", "BAD_SEQ_ID", "TOO_LONG", "DUPLICATE_SEQ_ID")),
    ):
        cache, found, _ = store(cache, rows, lengths)
        assert found == [kv.Status[name] for name in names]
    assert leaf_bytes(testing.poison(cache).control) == {
        path.removeprefix(".control"): leaf for path, leaf in before.items() if path.startswith(".control")
    }
    k, v = source_arrays(1, width=3)
    assert statuses(kv.write_source(cache, [1], k, v, [4])[1]) == [kv.Status.BAD_LENGTH]
    assert statuses(kv.write_source(cache, [1], k, v, [0])[1]) == [OK]


def test_a_row_without_blocks_is_as_it_was_and_a_smaller_one_behind_it_fits():
    cache, found, _ = store(started((0, 1, 2, 3), (1, 1, 1, 1)), [0], [11])  # 3 and 4 of the 9 blocks
    cache, found, held = store(cache, [3, 1, 2], [10, 11, 3])
    assert found == [OK, kv.Status.OUT_OF_BLOCKS, OK]
    assert_invariants(cache)
    assert_held(cache, {row: held[row] for row in (3, 2)})
    assert cache.control.source_len.tolist() == [11, 0, 3, 10]
    for pool, group in zip(cache.control.block_pools, CONFIG.groups, strict=True):
        assert not group.holds_sources or (np.asarray(pool.block_table[1]) == group.num_blocks).all()
    again = leaf_bytes(cache)
    cache, found, _ = store(cache, [1], [11])
    assert found == [kv.Status.OUT_OF_BLOCKS]
    assert_same(again, testing.poison(cache))


def test_prompts_start_without_blocks_for_sources():
    cache, found, _ = store(started((0, 1, 2), (1, 1, 1)), [0, 1, 2], [11, 11, 3])
    assert found == [OK] * 3 and int(kv.num_available_blocks(cache, group=2)) == 0
    cache, admission = kv.allocate(cache, *entries([3], [16]))
    assert statuses(admission.status)[0] == OK and int(kv.num_available_blocks(cache, group=0)) == 2
    cache, step = kv.extend(cache, [0, 0, 0, 16], max_new=16)
    assert statuses(step.status) == [OK] * 4


def test_forks_and_beams_share_a_source_and_nothing_is_copied():
    """Four beams of 11 frames: 3 and 4 blocks in the two groups, of which each has 9."""
    cache, found, _ = store(started([0], [3]), [0], [MOST])
    assert found == [OK]
    cache, _ = kv.fork(cache, [0, 0, 0], [1, 2, 3])
    used = [9 - int(kv.num_available_blocks(cache, group=g)) for g in (1, 2)]
    pools = jax.tree.leaves(cache.pools)
    cache, _ = kv.reorder(cache, [0, 1, 2, 3], [2, 2, 0, 1])
    assert used == [3, 4] == [9 - int(kv.num_available_blocks(cache, group=g)) for g in (1, 2)]
    assert [x.unsafe_buffer_pointer() for x in pools] == [
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.pools)
    ]
    cache, step = kv.extend(cache, [1] * ROWS, max_new=16)
    assert statuses(step.status) == [OK] * ROWS and num_copies(cache) == 0
    cache, _ = kv.free(cache, [0, 1, 2])
    assert [int(kv.num_available_blocks(cache, group=g)) for g in (1, 2)] == [9 - 3, 9 - 4]
    cache, _ = kv.free(cache, [3, ROWS, ROWS])
    assert [int(kv.num_available_blocks(cache, group=g)) for g in (1, 2)] == [9, 9]
    assert not np.asarray(cache.control.source_len).any()


@pytest.mark.slow
def test_a_row_takes_over_its_parent_s_source_and_keeps_it_when_it_is_cut():
    cache, _, held = store(started(), [0, 1], [7, 9])
    cache, _ = kv.extend(cache, [3, 5, 2, 0], max_new=5)
    cache, status = kv.reorder(cache, [0, 2], [1, 0])
    assert statuses(status) == [OK, OK]
    cache, status = kv.truncate(cache, [0, 2, 1], [0, 1, 4])
    assert statuses(status) == [OK] * 3
    assert cache.control.source_len.tolist() == [9, 9, 7, 0]
    assert_held(cache, {0: held[1], 1: held[1], 2: held[0]})
    assert_invariants(cache)
    cache, count = kv.scrub(cache, [2])
    assert int(count) >= 2 + 3 and cache.control.source_len.tolist() == [9, 9, 0, 0]
    assert_held(cache, {0: held[1], 1: held[1]})
    cache, _ = kv.scrub(cache, namespace=np.zeros(4, np.uint32))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(cache.pools))
    assert_invariants(cache)


@pytest.mark.slow
def test_scrubbing_a_namespace_leaves_the_sources_of_others():
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [2])
    cache, _ = kv.allocate(cache, [1], [2], namespace=kv.namespace(tenant="b"))
    cache, _, held = store(cache, [0, 1], [6, 7])
    cache, _ = kv.scrub(cache, namespace=np.zeros(4, np.uint32))
    assert cache.control.source_len.tolist() == [0, 7, 0, 0]
    assert_held(cache, {1: held[1]})
    for pool, group in zip(cache.pools, CONFIG.groups, strict=True):
        table = np.asarray(cache.control.block_pools[CONFIG.groups.index(group)].block_table[1])
        kept = {*table[table < group.num_blocks].tolist()}
        for array in jax.tree.leaves(pool):
            layers = np.asarray(array).reshape(group.num_layers, group.num_blocks, -1)
            others = [block for block in range(group.num_blocks) if block not in kept]
            assert not layers[:, others].any()


def test_preemption_counts_the_blocks_of_sources():
    cache, _, _ = store(started(), [0, 1], [3, 11])
    assert kv.select_rows_to_preempt(cache, "longest", 3).tolist()[0] == 1
    cache, dropped = kv.preempt_to_utilization(cache, 0.2, "longest")
    assert dropped.tolist()[0] == 1
    assert_invariants(cache)


@functools.partial(jax.jit, static_argnames="is_packed")
def attended(cache, q, num_new, is_packed):
    if not is_packed:
        cache, step = kv.extend(cache, num_new, max_new=3)
        return kv.attend(cache, 2, q, step, return_lse=True)[1]
    cache, step = kv.extend(cache, num_new, num_tokens=7)
    return kv.attend(cache, 2, q, step, return_lse=True)[1]


def test_every_query_sees_the_whole_source_padded_and_packed():
    cache, _, held = store(started(), [1, 2], [9, 4])  # row 0 has none
    q = np.random.default_rng(2).standard_normal((7, 4, 4)).astype(np.float32)
    num_new, at = [2, 1, 3, 0], {0: [(0, 0), (0, 1)], 1: [(1, 0)], 2: [(2, 0), (2, 1), (2, 2)]}
    padded = np.full((4, 3, 4, 4), np.nan, np.float32)
    places = [place for row in at.values() for place in row]
    for token, place in enumerate(places):
        padded[place] = q[token]
    out, lse = attended(cache, padded, np.array(num_new), is_packed=False)
    packed_out, packed_lse = attended(cache, q, np.array(num_new), is_packed=True)
    out, lse, packed_out, packed_lse = map(np.asarray, (out, lse, packed_out, packed_lse))
    for token, (row, i) in enumerate(places):
        if row == 0:
            want, want_lse = np.zeros((4, 4)), np.full(4, -np.inf)
        else:
            k, v = (np.repeat(x, 2, axis=1).astype(np.float64) for x in held[row][1])
            logits = np.einsum("hd,khd->hk", q[token], k) / 2
            shares = np.exp(logits)
            want_lse = np.log(shares.sum(axis=1))
            want = np.einsum("hk,khd->hd", shares / shares.sum(axis=1, keepdims=True), v)
        for got, got_lse in ((out[row, i], lse[row, i]), (packed_out[token], packed_lse[token])):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=1e-5)


def test_invariants_know_sources():
    cache, _, _ = store(started(), [0], [9])

    def violations(**control):
        return kv.check_invariants(
            dataclasses.replace(cache, control=dataclasses.replace(cache.control, **control))
        )

    assert "row 0 has a source of 12 tokens, outside [0, 11]" in violations(
        source_len=jnp.array([12, 0, 0, 0])
    )
    assert "row 3 is idle and its source_len is not 0" in violations(source_len=jnp.array([9, 0, 0, 1]))
    assert any(
        "of 11 tokens lacks the block" in what for what in violations(source_len=jnp.array([11, 0, 0, 0]))
    )
    assert any(
        "blocks of a source of 2 tokens" in what for what in violations(source_len=jnp.array([2, 0, 0, 0]))
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=[CROSS]), "all layers read sources, expected one that stores its row's tokens"),
        (
            dict(layers=LAYERS, enable_prefix_caching=True),
            r"enable_prefix_caching is True and layers\[1\] is CrossAttention\(11\), expected False: what",
        ),
    ],
)
def test_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kv.CacheConfig(**options)


def test_calls_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_source_len is 0, expected at least 1"):
        kv.CrossAttention(1, 4, max_source_len=0)
    cache = started()
    k, v = source_arrays(1)
    with pytest.raises(ValueError, match="k has 2 layers, expected 3"):
        kv.write_source(cache, [0], k[:2], v, [1])
    with pytest.raises(ValueError, match=r"k has shape \(2, 14, 1, 3\), expected \(1, 14, 1, 3\)"):
        kv.write_source(cache, [0], source_arrays(2)[0], v, [1])
    with pytest.raises(
        TypeError, match=r"v is a NoneType, expected an array: CrossAttention\(11\) layers take"
    ):
        kv.write_source(cache, [0], k, None, [1])
    with pytest.raises(ValueError, match="write_source got a cache without layers that read sources"):
        kv.write_source(kv.init(kv.CacheConfig([FULL])), [0], k, v, [1])
    with pytest.raises(ValueError, match="built with storage=False"):
        kv.write_source(kv.init(CONFIG, storage=False), [0], k, v, [1])
    cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=16)
    x = np.ones((ROWS, 16, 1, 3), np.float32)
    message = (
        r"got k and v for layer .*, CrossAttention\(11\), whose rows read a source, expected none: write"
    )
    for layer in (3, (1, 0)):
        with pytest.raises(ValueError, match=message):
            kv.write(cache, layer, x, x, step)
        with pytest.raises(ValueError, match=message):
            kv.attention(cache, layer, x, x, x, step)
    with pytest.raises(TypeError, match="kind is CrossAttention.*, expected a layer kind that stores"):
        kv.Quantised(CROSS, "int8")


def forward(params, tokens, cache, step):
    raise AssertionError("nothing is computed")


@pytest.mark.parametrize("caller", ["generate", "score", "beam_search", "Engine"])
def test_loops_without_an_argument_for_sources_refuse_them(caller):
    with pytest.raises(
        NotImplementedError, match=rf"{caller} got CrossAttention\(11\) layers, for whose sources"
    ):
        if caller == "Engine":
            kv.Engine(forward, {}, CONFIG)
        elif caller == "score":
            kv.score(forward, {}, [1], [[2]], CONFIG)
        else:
            getattr(kv, caller)(forward, {}, [[1]], CONFIG, max_new_tokens=2)


def test_a_config_with_sources_goes_through_json_and_is_described():
    assert config_from_json(config_to_json(CONFIG)) == CONFIG
    line = kv.describe(CONFIG).splitlines()[1]
    assert line.startswith("CrossAttention(11) x 2 layers: 9 blocks of 4 tokens, 1 heads x 3, float32")
    plan = kv.CacheConfig(LAYERS, max_seqs=3, max_seq_len=64, block_size=4)
    assert [group.num_blocks for group in plan.groups] == [48, 9, 12]
    cache, _, _ = store(started(), [0], [9])
    assert "row 0  9 tokens" in kv.block_map(cache, group=1)
