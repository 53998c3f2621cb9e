"""The TPU's decode, interpreted with race detection, against its reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.mosaic_tpu import decode, paged_decode, paged_prefill, prefill, queries_per_row
from pallas_kernels.shapes import DECODE_SHAPES, PREFILL_SHAPES, DecodeProblem, DecodeShape
from tests.kernels.tpu_interpreter import run_interpreted
from tests.support.helpers import newest_unless

pytestmark = pytest.mark.contract

# The weights are rounded to the pools' dtype before they meet the values.
TOLERANCE = {"bfloat16": 5e-3, "float32": 3e-6}
SHAPES = {shape.name: shape for shape in DECODE_SHAPES}
PREFILLS = {shape.name: shape for shape in PREFILL_SHAPES}
# These differ from others in numbers alone.
LIKE_OTHERS = {"block_128", "block_72_f16", "drafts_3x8", "group_1_block_8"}


def for_tpu(shape: DecodeShape) -> DecodeShape:
    """The shape with what the TPU kernel takes: head_dim from 128 on, f32 where blocks are no bf16 tiles."""
    dtype = "bfloat16" if shape.block_size % 16 == 0 and shape.dtype == "bfloat16" else "float32"
    return dataclasses.replace(shape, head_dim=max(128, shape.head_dim), dtype=dtype)


def check(problem: DecodeProblem, kernel=paged_decode) -> None:
    arrays, statics = jax.tree.map(jnp.asarray, problem._replace(options=None)), problem.options

    def run(kernel, **keywords):
        def call(problem):
            return kernel(
                *problem[:5], statics, layer=problem.layer, sink_logits=problem.sink_logits, **keywords
            )

        return call

    out, lse = run_interpreted(run(kernel, interpret=True), arrays)
    expected_out, expected_lse = jax.jit(run(reference.paged_decode))(arrays)
    assert out.dtype == lse.dtype == jnp.float32
    tolerance = TOLERANCE[problem.q.dtype.name]
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize(
    "name",
    newest_unless(("plain", "drafts_7x16", "all"), [name for name in SHAPES if name not in LIKE_OTHERS]),
)
def test_many_tiles(name, monkeypatch):
    shape = for_tpu(SHAPES[name])
    monkeypatch.setattr(decode, "MAX_TILE_LEN", max(32, shape.block_size))
    check(shape.problem())


@pytest.mark.slow
@pytest.mark.parametrize("name", newest_unless(("all",), ("long", "all")))
def test_large_tiles(name):
    check(for_tpu(SHAPES[name]).problem(seed=1))


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("name", newest_unless(("all",), list(PREFILLS)))
def test_prefill(name, monkeypatch):
    """Of many queries, one head at a time."""
    shape = for_tpu(PREFILLS[name])
    monkeypatch.setattr(prefill, "MAX_TILE_LEN", max(128, shape.block_size))
    check(shape.problem(), paged_prefill)


@pytest.mark.parametrize(
    ("num_queries", "block", "group_size", "expected"),
    [
        (9, (8, 16, 128), 4, 16),
        (64, (8, 16, 128), 4, 64),
        (999, (8, 16, 128), 4, 64),
        (999, (1, 16, 128), 1, 128),
        (33, (32, 16, 256), 8, 8),
        (999, (1, 512, 256), 8, 64),
        (999, (32, 128, 128), 1, 32),
        (999, (8, 512, 128), 16, 8),
    ],
)
def test_rows_have_as_many_queries_as_fit(num_queries, block, group_size, expected):
    pool = jax.ShapeDtypeStruct((4, *block), jnp.float32)
    assert queries_per_row(num_queries, pool, group_size) == expected


@pytest.mark.slow
def test_values_that_nobody_sees_are_nan(monkeypatch):
    """Also those of blocks that are read: before the window, after the last query that counts. And what a row
    does not read is seen by none of its queries, although the queries are after it."""
    monkeypatch.setattr(decode, "MAX_TILE_LEN", 32)
    shape = for_tpu(SHAPES["window_drafts"])
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
def test_a_row_that_asks_and_reads_nothing_sees_its_sink_alone():
    problem = for_tpu(SHAPES["sink_logits"]).problem()
    check(problem._replace(rows=problem.rows._replace(num_columns=jnp.zeros(2, jnp.int32))))


PLAIN = DecodeShape("plain", (37, 5), head_dim=128)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (dataclasses.replace(PLAIN, head_dim=64), "head_dim is 64, expected a multiple of 128 on a TPU"),
        (dataclasses.replace(PLAIN, dtype="float16"), "the pools are float16, expected bfloat16 or float32"),
        (
            dataclasses.replace(PLAIN, block_size=24),
            "block_size is 24, expected a multiple of 16 for bfloat16",
        ),
        (
            dataclasses.replace(PLAIN, block_size=12, dtype="float32"),
            "block_size is 12, expected a multiple of 8 for float32",
        ),
        (dataclasses.replace(PLAIN, num_queries=9), "q has 9 queries a row, expected 1 to 8"),
    ],
)
def test_what_the_kernel_does_not_take(shape, expected):
    problem = shape.problem()
    with pytest.raises(ValueError, match=expected):
        paged_decode(*problem[:6], layer=problem.layer, interpret=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            dict(block_table=jax.ShapeDtypeStruct((64, 4000), "int32")),
            "the block table with its rows has 256016 entries, expected at most 245760",
        ),
        (
            dict(
                q=jax.ShapeDtypeStruct((2, 8, 32, 16, 128), "float32"),
                k_pool=jax.ShapeDtypeStruct((12, 32, 16, 128), "float32"),
                v_pool=jax.ShapeDtypeStruct((12, 32, 16, 128), "float32"),
            ),
            "a row's queries are 524288 numbers, expected at most 262144: split the row",
        ),
        (
            dict(
                q=jax.ShapeDtypeStruct((2, 1, 128, 4, 128), "bfloat16"),
                k_pool=jax.ShapeDtypeStruct((12, 128, 512, 128), "bfloat16"),
                v_pool=jax.ShapeDtypeStruct((12, 128, 512, 128), "bfloat16"),
            ),
            "blocks of 512 tokens need 67108864 bytes of VMEM",
        ),
        (
            dict(
                q=jax.ShapeDtypeStruct((2, 8, 1, 32, 128), "bfloat16"),
                k_pool=jax.ShapeDtypeStruct((12, 1, 8192, 128), "bfloat16"),
                v_pool=jax.ShapeDtypeStruct((12, 1, 8192, 128), "bfloat16"),
            ),
            "blocks of 8192 tokens need 8388608 bytes .* 256 queries of each key/value head 9175040",
        ),
    ],
)
def test_what_does_not_fit(change, expected):
    problem = PLAIN.problem()._replace(**change)
    with pytest.raises(ValueError, match=expected):
        jax.eval_shape(lambda *arrays: paged_decode(*arrays, problem.options), *problem[:5])
