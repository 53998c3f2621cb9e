"""The GPU's decode and merge, interpreted with race detection, against their references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.gpus import HOPPER
from pallas_kernels.mosaic_gpu import decode, merge_attention, paged_decode, plan_for
from pallas_kernels.mosaic_gpu.decode_budget import programs_per_sm
from pallas_kernels.mosaic_gpu.decode_plan import Item, plan_decode, tiling_of
from pallas_kernels.mosaic_gpu.logits import scaled
from pallas_kernels.shapes import DECODE_SHAPES, EIGHT_BIT_SHAPES, DecodeProblem, DecodeShape
from tests.kernels.gpu_interpreter import run_interpreted
from tests.support.helpers import newest_unless

pytestmark = pytest.mark.contract

# The weights are rounded to the pools' dtype before they meet the values.
TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-4}
SHAPES = {shape.name: shape for shape in (*DECODE_SHAPES, *EIGHT_BIT_SHAPES)}


def check(problem: DecodeProblem, out_dtype=None, **keywords) -> None:
    out_dtype = jnp.dtype(problem.q.dtype if out_dtype is None else out_dtype)
    options, arrays = problem.options, problem._replace(options=None)

    @jax.jit
    def run(arrays, keywords):
        arguments = arrays.more | keywords
        return paged_decode(*arrays[:5], options, **arguments, out_dtype=out_dtype, interpret=True)

    @jax.jit
    def expect(arrays):
        return reference.paged_decode(*arrays[:5], options, **arrays.more)

    out, lse = run_interpreted(run, arrays, keywords)
    expected_out, expected_lse = expect(arrays)
    assert (out.dtype, lse.dtype) == (out_dtype, jnp.float32)
    tolerance, rounding = TOLERANCE[problem.q.dtype.name], jnp.finfo(out_dtype).eps
    np.testing.assert_allclose(out.astype(jnp.float32), expected_out, rtol=rounding, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


# These differ from others in numbers alone.
LIKE_OTHERS = {"block_128", "block_72_f16", "drafts_3x8"}
# Two query tiles, every dtype and size of head, and everything at once.
OLDEST = "plain", "head_128_block_24", "head_256_f16", "drafts_7x16", "all", "int8", "fp8_head_128_block_24"


@pytest.mark.quick_cases("all", "int8_all")
@pytest.mark.parametrize("name", newest_unless(OLDEST, [name for name in SHAPES if name not in LIKE_OTHERS]))
def test_decode(name):
    check(SHAPES[name].problem())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "drafts_7x16"])
def test_results_may_be_of_32_bits(name):
    """Of rows that are split and of whole ones, of one lane tile and of several."""
    check(SHAPES[name].problem(), out_dtype=jnp.float32)


@pytest.mark.slow
def test_one_program_walks_nine_tiles(monkeypatch):
    """The rings go round."""
    monkeypatch.setattr(decode, "_INTERPRETED_PROGRAMS", 1)
    check(SHAPES["long"].problem(seed=1))


@pytest.mark.slow
def test_values_that_nobody_sees_may_be_nan():
    """Also those of blocks that are read: before the window, after the last query that counts. And what a row
    does not read is seen by none of its queries, although the queries are after it."""
    shape = SHAPES["window_drafts"]
    problem = shape.problem()
    rows = jax.tree.map(np.asarray, problem.rows)
    rows = rows._replace(
        num_columns=rows.num_columns - np.int32([5, 0, 1]),
        first_position=rows.first_position + np.int32([-10, 0, 50]),
        num_queries=rows.num_queries - 2,
    )
    v_pool, table = np.array(problem.v_pool), np.asarray(problem.block_table)[rows.table_row]
    num_poisoned = 0
    for row, length in enumerate(shape.lens):
        first, count = rows.first_position[row], rows.num_queries[row]
        for position in range(rows.first_column[row] * shape.block_size, length):
            if not first - shape.window < position < first + count:
                column, offset = divmod(position, shape.block_size)
                block = problem.layer * shape.num_blocks + table[row, column]
                v_pool[block, :, offset] = np.nan
                num_poisoned += 1
    assert num_poisoned > 4
    check(problem._replace(rows=rows, v_pool=v_pool))


@pytest.mark.slow
def test_a_plan_serves_all_layers_and_heads():
    """It depends on neither, so one made for another group size is as good."""
    problem = SHAPES["long"].problem()
    columns, block_size = problem.block_table.shape[1], problem.k_pool.shape[2]
    q_shape = (*problem.q.shape[:3], 1, problem.q.shape[4])
    plan = jax.jit(lambda rows: plan_for(rows, q_shape, columns, block_size, interpret=True))(problem.rows)
    check(problem, plan=plan)


def make_rows(num_columns) -> DecodeRows:
    num_columns = np.asarray(num_columns, np.int32)
    order = np.arange(len(num_columns), dtype=np.int32)
    rows = DecodeRows(order, np.zeros_like(order), num_columns, num_columns * 16 - 1, np.ones_like(order))
    return jax.tree.map(jnp.asarray, rows)


plan_of = jax.jit(plan_decode, static_argnums=1, static_argnames=("num_columns", "num_parallel"))
BLOCK_SIZES = [8, 24, 72, 128, 512]
COLUMNS = [[0], [1], [40, 0, 3, 17], [5] * 30, [200, 1], [40] * 10]


@pytest.mark.quick_cases(
    "1-num_columns2", "7-num_columns2", "7-num_columns3", "7-num_columns5", "49-num_columns4"
)
@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("num_parallel", [1, 7, 49])
def test_a_plan_has_every_tile_once_and_in_order(num_columns, num_parallel):
    block_size = BLOCK_SIZES[(COLUMNS.index(num_columns) + num_parallel) % 5]
    tiling = tiling_of(1, 4, 128, block_size)
    assert tiling.piece_len * tiling.pieces_per_block == block_size and tiling.piece_len % 8 == 0
    rows = make_rows(num_columns)
    plan = plan_of(rows, tiling, num_columns=max(1, *num_columns), num_parallel=num_parallel)
    items, first_part = np.asarray(plan.items), np.asarray(plan.first_part)
    order = items[:, Item.ROW].astype(np.uint32)
    assert (order[1:] >= order[:-1]).all()  # what is no item comes last
    assert first_part[0] == 0 and first_part[-1] <= plan.num_parts <= len(items)
    for row, columns in enumerate(num_columns):
        mine = items[items[:, Item.ROW] == row]
        parts = list(range(first_part[row], first_part[row + 1]))
        assert len(mine) >= 1 and mine[:, Item.PART].tolist() == (parts or [-1])
        tiles = [range(i[Item.FIRST_TILE], i[Item.FIRST_TILE] + i[Item.NUM_TILES]) for i in mine]
        num_tiles = -(-columns * tiling.pieces_per_block // tiling.pieces_per_tile)
        assert [tile for part in tiles for tile in part] == list(range(num_tiles))
        assert len(mine) == 1 or all(tiles)


def test_a_plan_counts_on_the_programs_of_all_heads_and_lane_tiles():
    """Of the device that is compiled for."""
    per_sm = programs_per_sm(tiling_of(8, 16, 128, 16), 128, HOPPER)
    rows = make_rows([2048, 9])

    def num_items() -> int:
        plan = jax.eval_shape(lambda rows: plan_for(rows, (2, 8, 3, 16, 128), 2048, 16), rows)
        return plan.items.shape[0]

    assert num_items() == 132 * per_sm // (3 * 4)  # 128 lanes are 4 tiles of 32
    h20 = jax.sharding.AbstractDevice(device_kind="NVIDIA H20", num_cores=78, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h20)):
        assert num_items() == 78 * per_sm // (3 * 4)


@pytest.mark.quick_cases("shape0")
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 5, 64), (6, 2, 3, 7, 128), (2, 33, 256)])
def test_merge(shape):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal(shape).astype(np.float32)
    lses = 3 * rng.standard_normal(shape[:-1]).astype(np.float32)
    lses[0].reshape(-1)[::2] = -np.inf  # a part that saw nothing may hold anything
    outs[0].reshape(-1, shape[-1])[::2] = np.nan
    lses.reshape(shape[0], -1)[:, 1] = -np.inf  # no query saw anything
    expected_out, expected_lse = jax.jit(reference.merge_attention)(outs, lses)
    merge = jax.jit(functools.partial(merge_attention, interpret=True))
    out, lse = run_interpreted(merge, outs, lses)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.asarray(lse).reshape(-1)[1])


@pytest.mark.parametrize("soft_cap", [5.0, 30.0, 50.0, 1e8, 1e30])
def test_soft_caps_are_as_good_as_float32(soft_cap):
    logits = np.r_[np.linspace(-900, 900, 20_001), np.logspace(-9, 3, 500), 1e30, -1e30].astype(np.float32)
    options = DecodeOptions(1, scale=0.125, soft_cap=soft_cap)
    found = np.asarray(scaled(options, jnp.asarray(logits)))
    expected = soft_cap * np.tanh(logits.astype(np.float64) * 0.125 / soft_cap) / np.log(2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def refused(expected: str, shape: DecodeShape = SHAPES["plain"], **changes) -> None:
    problem = shape.problem()._replace(**changes)
    with pytest.raises(ValueError, match=expected):
        paged_decode(*problem[:6], **problem.more, interpret=True)


def test_what_the_kernel_does_not_take_is_refused():
    refused("float32, expected bfloat16", DecodeShape("a", (3,), dtype="float32"))
    refused("head_dim is 80, expected 64", DecodeShape("a", (3,), head_dim=80))
    refused("block_size is 20, expected a multiple of 8", DecodeShape("a", (3,), block_size=20))
    refused(
        "head_dim is 256 with numbers of 8 bits, expected 64", DecodeShape("a", (3,), 1, 1, 256, dtype="int8")
    )
    refused("17 query heads share", DecodeShape("a", (3,), group_size=17))
    refused("9 queries a row, expected 1 to 8", DecodeShape("a", (30,), num_queries=9))
    rows = SHAPES["plain"].rows()
    refused(
        "rows.num_columns is int32.3,., expected int32.2",
        rows=rows._replace(num_columns=jnp.zeros(3, jnp.int32)),
    )
    refused("expected .rows, queries, num_kv_heads", q=jnp.zeros((2, 4, 64), jnp.bfloat16))
    refused("q has shape .0, 1, 2, 4, 64., expected .* at least 1", q=jnp.zeros((0, 1, 2, 4, 64)))
    refused("q has shape .2, 1, 2, 0, 64., expected .* at least 1", q=jnp.zeros((2, 1, 2, 0, 64)))
    refused("q is int32, expected a floating dtype", q=jnp.zeros((2, 1, 2, 4, 64), jnp.int32))
    refused("block_table is int32.3, 0., expected .* at least 1", block_table=jnp.zeros((3, 0), jnp.int32))
    refused("layer is float32.., expected an integer scalar", layer=1.5)
    refused("layer is int32.1,., expected an integer scalar", layer=jnp.zeros(1, jnp.int32))
    no_heads = jnp.zeros((4, 0, 16, 64), jnp.bfloat16)
    refused("pools have shape .4, 0, 16, 64., expected no axis", k_pool=no_heads, v_pool=no_heads)
    refused("key/value heads of 64, expected 2 of 64", q=jnp.zeros((2, 1, 3, 4, 64), jnp.bfloat16))
    refused("expected two equal", v_pool=jnp.zeros((3, 2, 16, 64), jnp.bfloat16))
    refused("sink_logits has shape", sink_logits=jnp.zeros(8))
    refused("sink_logits is complex64, expected a floating dtype", sink_logits=jnp.zeros((2, 4), complex))
    refused("layer is 2, expected 0 <= layer < 2", layer=2)
    refused("layer is -1, expected 0 <= layer < 2", layer=-1)
    for change, expected in (
        (dict(soft_cap=np.inf), "soft_cap is inf, expected a positive number"),
        (dict(window=2**31), "window is 2147483648, expected at least 1 and below"),
        (dict(window=2.5), "window is 2.5, expected an integer"),
        (dict(num_blocks=0), "num_blocks is 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=expected):
            DecodeOptions(**{"num_blocks": 4, "scale": 1.0} | change)
    with pytest.raises(ValueError, match="outs is complex64, expected a floating dtype"):
        merge_attention(jnp.zeros((2, 3, 64), complex), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="last axis of 80"):
        merge_attention(jnp.zeros((2, 3, 80)), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="last axis of 0"):
        merge_attention(jnp.zeros((2, 3, 0)), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="expected .s, ..., d. and .s, ....."):
        merge_attention(jnp.zeros((2, 3, 64)), jnp.zeros((3, 2)))


def test_a_scaling_that_does_not_fit_is_refused():
    problem = SHAPES["int8"].problem()
    fits, plain = problem.scaling, SHAPES["plain"].problem()
    for arguments, scaling, expected in (
        (problem, None, "pools are int8 and scaling is None, expected one beside pools of int8 or uint8"),
        (plain, fits, "pools are bfloat16 and scaling is given"),
        (problem, fits._replace(v_offset=None), "one of k_offset and v_offset is None"),
        (
            problem,
            fits._replace(k_scale=fits.k_scale.astype("int16")),
            "k_scale is int16, expected float32 or",
        ),
        (problem, fits._replace(v_scale=fits.k_offset), r"float32\(.*\), expected uint16\(.*like the pools"),
        (problem, fits._replace(v_offset=fits.v_offset[:1]), r"float32\(1, 2, 16\), expected float32\("),
    ):
        with pytest.raises(ValueError, match=expected):
            paged_decode(*arguments[:6], layer=arguments.layer, scaling=scaling, interpret=True)


def test_plans_of_another_step_are_refused():
    problem, columns = SHAPES["plain"].problem(), SHAPES["plain"].problem().block_table.shape[1]
    plan = plan_for(problem.rows, problem.q.shape, columns, 16, interpret=True)
    expected = r", expected int32 of at least \(2, 9\) and of \(3,\): `plan_for` with the same rows"
    for wrong, found in (
        (plan._replace(items=plan.items[:1]), r"items int32\(1, 9\)"),
        (plan._replace(items=plan.items[:, :8]), r"items int32\(.*, 8\)"),
        (plan._replace(items=plan.items[0]), r"items int32\(9,\)"),
        (plan._replace(items=plan.items.astype("float32")), "items float32"),
        (plan._replace(items=plan.items.astype("int16")), "items int16"),
        (plan._replace(first_part=plan.first_part[:2]), r"first_part int32\(2,\)"),
        (plan._replace(first_part=plan.first_part.astype("uint32")), "first_part uint32"),
    ):
        with pytest.raises(ValueError, match=f"the plan has .*{found}.*{expected}"):
            paged_decode(*problem[:6], layer=problem.layer, plan=wrong, interpret=True)
    for arguments, expected in (
        (((2, 9, 2, 4, 64), columns, 16), "at most 8 queries"),
        (((2, 1, 2, 0, 64), columns, 16), "each at least 1"),
        (((3, 1, 2, 4, 64), columns, 16), r"rows.table_row is int32\(2,\), expected int32\[3\]"),
        (((2, 1, 2, 4, 100), columns, 16), "head_dim is 100"),
        (((2, 1, 2, 4, 64), columns, 12), "block_size is 12"),
        (((2, 1, 2, 4, 64), 0, 16), "num_columns is 0"),
    ):
        with pytest.raises(ValueError, match=expected):
            plan_for(problem.rows, *arguments)
