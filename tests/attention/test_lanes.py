"""The lanes in which XLA's attention reads the tiles of rows, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.attention import xla
from kvcache_jax.attention.attention_plan import plan_rows
from kvcache_jax.attention.lanes import deal
from kvcache_jax.attention.tiles import tiles
from kvcache_jax.core.holes import Holes
from kvcache_jax.core.state import KVPool
from tests.support.attention_driver import AttentionDriver, fragment

ROWS, LANES, HEADS, GROUP, DIM, BLOCK, TILE = 7, 4, 2, 2, 256, 16, 64
MAX_LEN = 208
FULL = kv.FullAttention(HEADS, DIM)
WINDOW = kv.SlidingWindow(HEADS, DIM, window=75, num_sink_tokens=20)
SIZES = dict(num_blocks=ROWS * 14, block_size=BLOCK, max_seqs=ROWS, max_seq_len=MAX_LEN, tile_tokens=TILE)
LENGTHS = np.array([150, 0, 5, 208, 1, 64, 65])


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
def test_each_tile_is_read_once_in_order_and_in_as_few_trips_as_can_be(num_lanes):
    rng = np.random.default_rng(num_lanes)
    counts = rng.integers(0, 9, (200, ROWS)) * (rng.random((200, ROWS)) < rng.random((200, 1)))
    counts[:4] = np.stack([np.zeros(ROWS), np.full(ROWS, 8), [8] + [0] * 6, [1] * 6 + [5]])

    def dealt(counts):
        lanes = deal(counts, num_lanes)
        return lanes.num_trips, *jax.vmap(lanes.at)(jnp.arange(8 * ROWS, dtype=jnp.int32))

    found = jax.jit(jax.vmap(dealt))(counts.astype(np.int32))
    for count, num_trips, rows, nth in zip(counts, *map(np.asarray, found), strict=True):
        assert num_trips == max(count.max(), -(-count.sum() // num_lanes))
        read = {row: [] for row in range(ROWS + 1)}
        for some, their_nth in zip(rows[:num_trips], nth[:num_trips], strict=True):
            busy = some[some < ROWS]
            assert len({*busy.tolist()}) == len(busy), "a row is in two lanes at once"
            for row, at in zip(some.tolist(), their_nth.tolist(), strict=True):
                read[row].append(at)
        assert [read[row] for row in range(ROWS)] == [list(range(n)) for n in count.tolist()]


@pytest.mark.quick_cases("full")
@pytest.mark.parametrize(
    ("kind", "width", "packed"),
    [(FULL, 70, False), (WINDOW, 70, False), (FULL, 11, True)],
    ids=["full", "window", "packed"],
)
def test_rows_of_all_lengths_in_few_lanes(kind, width, packed):
    config = kv.CacheConfig([kind], max_query_len=width, **SIZES)
    driver = AttentionDriver(
        config, num_q_heads=HEADS * GROUP, width=width, packed=packed, sink_logits=[0.5, -1, 2, 0]
    )
    driver.cache = fragment(driver.cache)
    if packed:
        lengths, most = {0: 30, 2: 5, 3: 11, 6: 1}, 4
    else:
        lengths, most = {row: n for row, n in enumerate([140, 0, 5, 207, 1, 64, 65]) if n}, width
    for row, length in lengths.items():
        driver.start(row, length)
    while left := {row: n - driver.length(row) for row, n in lengths.items() if n > driver.length(row)}:
        num_new, room = {}, width if packed else ROWS * width
        for row, n in left.items():
            num_new[row] = min(n, most, room)
            room -= num_new[row]
        driver.step(num_new, twice=len(left) == 1)
    driver.step(dict.fromkeys(lengths, 1))


@pytest.mark.quick_cases("places", "sources")
@pytest.mark.parametrize("name", ["next tokens", "holes", "places", "sources"])
def test_a_row_in_lanes_is_the_row_alone(name):
    rng, num_queries = np.random.default_rng(0), 3
    layers = [kv.CrossAttention(HEADS, DIM, max_source_len=MAX_LEN)] if name == "sources" else []
    group = kv.CacheConfig([*layers, FULL], **SIZES).groups[0]
    table = rng.permutation(ROWS * 13).reshape(ROWS, 13).astype(np.int32)
    pool = pool_of(group, rng, table)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    num_new = jnp.minimum(lengths, jnp.asarray([3, 3, 1, 2, 1, 3, 3], jnp.int32))
    first_position, options = lengths - num_new, {}
    if name == "holes":
        start = lengths // 3
        options["holes"] = Holes(
            start=start, num_hidden=start // 2, num_dropped=start // 4, num_kept=0 * start, first=start // 5
        )
    elif name == "places":
        places = np.sort(rng.random((ROWS, num_queries)) * LENGTHS[:, None], axis=1)
        options["positions"] = jnp.asarray(places, jnp.int32)
        first_position = options["positions"][:, 0]
    elif name == "sources":
        options["num_keys"] = lengths
    order = jnp.arange(ROWS, dtype=jnp.int32)
    plan = plan_rows(group, order, first_position, num_new, **options)
    q = jnp.asarray(rng.standard_normal((ROWS, num_queries, HEADS, GROUP, DIM)), jnp.float32)

    def attend(q, plan):
        fixed = dict(layer=jnp.int32(0), scale=0.1, soft_cap=None, sink_logits=None, tile_tokens=TILE)
        return xla.forward(q, pool, None, table, plan, group, **fixed)

    assert tiles(pool, table, plan, group, 0, group.num_blocks, q.shape, TILE).num_lanes == LANES
    got = jax.jit(attend)(q, plan)
    alone = jax.jit(lambda: jax.lax.map(lambda row: attend(q[row[None]], plan.of_rows(row[None])), order))()
    for one, other in zip(got, alone, strict=True):
        np.testing.assert_allclose(one, other[:, 0], rtol=1e-5, atol=1e-6)
    is_query = np.arange(num_queries)[None] < np.asarray(num_new)[:, None]
    assert (np.isfinite(got[1])[is_query]).all() and not np.asarray(got[0])[~is_query].any()


def pool_of(group, rng, table):
    """A pool of one layer, in which what no row holds is NaN."""
    pool = rng.standard_normal((2, group.num_blocks, HEADS, BLOCK, DIM), np.float32)
    is_held = np.zeros((group.num_blocks, BLOCK), bool)
    for blocks, length in zip(table, LENGTHS, strict=True):
        places = np.arange(length)
        is_held[blocks[places // BLOCK], places % BLOCK] = True
    k, v = np.where(is_held[:, None, :, None], pool, np.nan)
    return KVPool(arrays={"k": jnp.asarray(k), "v": jnp.asarray(v)})
