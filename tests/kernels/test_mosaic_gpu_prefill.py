"""The GPU's prefill, interpreted with race detection, against the reference of decoding."""

import dataclasses
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.mosaic_gpu import interpret, paged_prefill, prefill
from pallas_kernels.mosaic_gpu.prefill_mask import QUERY_ROWS, QueryMask, Walk
from pallas_kernels.shapes import EIGHT_BIT_PREFILLS, PREFILL_SHAPES, DecodeProblem, DecodeShape
from tests.kernels.gpu_interpreter import run_interpreted
from tests.mutants.reading import read_all
from tests.support.helpers import newest_unless
from tests.support.interpreters import callbacks_on_the_host

pytestmark = pytest.mark.contract

# The weights are rounded to the pools' dtype before they meet the values.
TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-4}
SHAPES = {shape.name: shape for shape in (*PREFILL_SHAPES, *EIGHT_BIT_PREFILLS)}


def check(problem: DecodeProblem, module=prefill) -> None:
    options, arrays = problem.options, problem._replace(options=None)

    def call(function, arrays, **more):
        return function(*arrays[:5], options, **arrays.more, **more)

    out, lse = run_interpreted(jax.jit(lambda x: call(module.paged_prefill, x, interpret=True)), arrays)
    expected_out, expected_lse = jax.jit(lambda x: call(reference.paged_decode, x))(arrays)
    dtype = problem.q.dtype
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    tolerance, rounding = TOLERANCE[dtype.name], jnp.finfo(dtype).eps
    np.testing.assert_allclose(out.astype(jnp.float32), expected_out, rtol=rounding, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("name", newest_unless(("plain", "all"), list(SHAPES)))
def test_prefill(name):
    check(SHAPES[name].problem())


@pytest.mark.slow
def test_values_that_no_query_sees_may_be_nan():
    """Also slots of blocks that are read: before the window, after the last query that counts. And what a row
    does not read is seen by none of its queries, although they are after it."""
    shape = SHAPES["window"]
    problem = shape.problem()
    rows = jax.tree.map(np.asarray, problem.rows)
    rows = rows._replace(
        num_columns=rows.num_columns - np.int32([5, 0]),
        first_position=rows.first_position + np.int32([-10, 0]),
        num_queries=rows.num_queries - np.int32([20, 3]),
    )
    v_pool, table = np.array(problem.v_pool), np.asarray(problem.block_table)[rows.table_row]
    num_poisoned = 0
    for row, length in enumerate(shape.lens):
        first, count = rows.first_position[row], rows.num_queries[row]
        for position in range(rows.first_column[row] * shape.block_size, length):
            if not first - shape.window < position < first + count:
                column, offset = divmod(position, shape.block_size)
                v_pool[problem.layer * shape.num_blocks + table[row, column], :, offset] = np.nan
                num_poisoned += 1
    assert num_poisoned > 4
    check(problem._replace(rows=rows, v_pool=v_pool))


@pytest.mark.parametrize("window", [None, 1, 90, 700])
@pytest.mark.parametrize("num_sink_tokens", [0, 5, 300])
@pytest.mark.parametrize("tile_len", [128, 64])
def test_a_program_reads_each_tile_that_its_queries_see_once_and_in_order(window, num_sink_tokens, tile_len):
    """And none before or after: of all tiles that are read, those with kept tokens may be of no use."""
    if window is None and num_sink_tokens:
        return
    shape = DecodeShape("a", (1203,), window=window, num_sink_tokens=num_sink_tokens, num_queries=600)
    rows = jax.tree.map(lambda x: int(x[0]), shape.rows())
    mask = QueryMask(shape.options, shape.block_size, *rows[1:], first_query=0, tile_len=tile_len)
    positions = np.asarray(mask.position(np.arange(rows.num_columns * shape.block_size)))
    for first_query in range(0, 704, QUERY_ROWS):
        queries = rows.first_position + np.arange(first_query, min(first_query + QUERY_ROWS, 600))
        is_seen = positions[None] <= queries[:, None]
        if window is not None:
            is_near = positions[None] > queries[:, None] - window
            is_seen &= is_near | (positions[None] < num_sink_tokens)
        walk = Walk(mask, first_query, first_query + QUERY_ROWS)
        tiles = [int(walk.tile(step)) for step in range(int(walk.num_steps))]
        seen = set((np.flatnonzero(is_seen.any(axis=0)) // tile_len).tolist())
        assert tiles == sorted(set(tiles)) and seen <= set(tiles)
        kept = set(range(-(-mask.num_sink_blocks * shape.block_size // tile_len)))
        assert set(tiles) <= seen | kept
        own = dataclasses.replace(mask, first_query=first_query)
        for tile in tiles[: len(queries) // QUERY_ROWS * len(tiles)]:
            columns = slice(tile * tile_len, (tile + 1) * tile_len)
            is_whole = positions[columns].size == tile_len
            is_all = is_whole and bool(is_seen[:, columns].all())
            # Tiles with kept tokens may be masked in vain.
            assert is_all or not own.is_all_seen(tile)
            assert own.is_all_seen(tile) or not is_all or tile in kept


# What they get wrong is read by tensor cores alone.
HASTY = [
    mutation
    for mutation in read_all()
    if mutation.name.startswith("GPU prefill: ") and mutation.name.endswith("before they are multiplied")
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", HASTY, ids=lambda mutation: mutation.name.removeprefix("GPU prefill: "))
def test_what_tensor_cores_read_too_late_or_too_early_races(mutation):
    source = inspect.getsource(prefill)
    assert source.count(mutation.old) == 1
    module = types.ModuleType("hasty_prefill")
    exec(source.replace(mutation.old, mutation.new), module.__dict__)
    problem = SHAPES["long"].problem()
    options, arrays = problem.options, problem._replace(options=None)
    kernel = jax.jit(lambda x: module.paged_prefill(*x[:5], options, layer=x.layer, interpret=True))
    with pytest.raises(interpret.RaceError, match="RACE DETECTED"), callbacks_on_the_host():
        interpret.run_interpreted(kernel, arrays)


def test_what_the_kernel_does_not_take_is_refused():
    def refused(expected, q_dtype=None, **sizes):
        problem = DecodeShape("a", (70,), num_queries=70, **sizes).problem()
        q = problem.q.astype(q_dtype or problem.q.dtype)
        with pytest.raises(ValueError, match=expected):
            paged_prefill(q, *problem[1:6], **problem.more, interpret=True)

    refused("head_dim is 256, expected 64 or 128", head_dim=256)
    refused("float32, expected bfloat16", dtype="float32")
    refused("block_size is 20, expected a multiple of 8", block_size=20)
    refused("block_size is 24, expected a multiple of 16", block_size=24)
    refused("the queries are float32, expected bfloat16 like the pools", q_dtype=jnp.float32)
    # numpy's float64 is equal to None.
    pool = jax.ShapeDtypeStruct((8, 1, 16, 64), jnp.bfloat16)
    assert "queries are float64" in (prefill.why_not_prefill(pool, np.dtype("float64")) or "")
    refused("the queries are float32, expected bfloat16 beside the pools", q_dtype=jnp.float32, dtype="int8")
    refused("head_dim is 256 with numbers of 8 bits, expected 64 or 128", head_dim=256, dtype="uint8")
    problem = SHAPES["int8"].problem()
    with pytest.raises(ValueError, match="the pools are int8 and scaling is None"):
        paged_prefill(*problem[:6], layer=problem.layer, interpret=True)
