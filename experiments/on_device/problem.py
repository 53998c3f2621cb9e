"""Random data for one cell of `experiments.first_gpu_run`, and what must come out."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.on_device.cells import NUM_UNOWNED, Cell
from pallas_kernels import reference
from pallas_kernels.decode_rows import DecodeOptions, DecodeRows
from pallas_kernels.eight_bits import Scaling

TOLERANCE = 2e-2
"""Norm of the error over the norm of the result; the weights, and most sides' results, are bfloat16."""

_CHUNK = 1 << 26  # elements drawn at once


class Problem(NamedTuple):
    """Random data of a cell, on the device.

    Attributes:
      cell: Its sizes.
      num_buffers: Pools after each other, like layers.
      q: bf16[b, h, g, d].
      k_pool: `[num_buffers * num_blocks, h, block_size, d]` of the cell's dtype; what no row owns is NaN, of
        8 bits the scales are.
      v_pool: Like `k_pool`.
      block_table: i32[b, columns], the same in all buffers; permuted. Columns after a row's last block name
        one without an owner.
      scaling: Beside pools of 8 bits.
    """

    cell: Cell
    num_buffers: int
    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_table: jax.Array
    scaling: Scaling | None = None

    @property
    def pools(self) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What is stored of keys, and of values."""
        if self.scaling is None:
            return (self.k_pool,), (self.v_pool,)
        return (self.k_pool, *self.scaling.of_keys()), (self.v_pool, *self.scaling.of_values())

    @property
    def options(self) -> DecodeOptions:
        return DecodeOptions(self.cell.num_blocks, self.scale)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.cell.head_dim)

    @property
    def lens(self) -> jax.Array:
        return jnp.asarray(self.cell.lens, jnp.int32)

    @property
    def held_blocks(self) -> jax.Array:
        """Blocks of all rows, one row after the other, i32[num_held]."""
        held = np.arange(self.cell.num_columns) < np.array(self.cell.lens)[:, None] // self.cell.block_size
        return jnp.asarray(np.asarray(self.block_table)[held])

    def require_equal_rows(self) -> None:
        """Refuses what a side that knows no lengths cannot decode."""
        if self.cell.unequal:
            raise NotImplementedError("it takes rows of one length alone")

    @property
    def rows(self) -> DecodeRows:
        def all_rows(value: int) -> jax.Array:
            return jnp.full(self.cell.batch, value, jnp.int32)

        return DecodeRows(
            table_row=jnp.arange(self.cell.batch, dtype=jnp.int32),
            first_column=all_rows(0),
            num_columns=self.lens // self.cell.block_size,
            first_position=self.lens - 1,
            num_queries=all_rows(1),
        )


def make_problem(cell: Cell, num_buffers: int | None = None) -> Problem:
    num_buffers = num_buffers or cell.num_buffers
    table, unowned = make_table(cell)
    unowned = (cell.num_blocks * np.arange(num_buffers)[:, None] + unowned).reshape(-1)
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    shape = (num_buffers * cell.num_blocks, cell.num_kv_heads, cell.block_size, cell.head_dim)
    q_shape = (cell.batch, cell.num_kv_heads, cell.group_size, cell.head_dim)

    def stored(key: jax.Array) -> tuple[jax.Array, ...]:
        numbers = random_pool(key, shape)
        return (_poisoned(numbers, unowned),) if is_plain else _stored(key, numbers, unowned, cell.dtype)

    is_plain, q = cell.dtype == "bfloat16", jax.random.normal(q_key, q_shape, jnp.bfloat16)
    (k_pool, *of_keys), (v_pool, *of_values) = stored(k_key), stored(v_key)
    beside = [array for pair in zip(of_keys, of_values, strict=True) for array in pair]
    scaling = None if is_plain else Scaling(*beside)
    return Problem(cell, num_buffers, q, k_pool, v_pool, jnp.asarray(table), scaling)


@functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
def _stored(key: jax.Array, values: jax.Array, unowned: jax.Array, dtype: str) -> tuple[jax.Array, ...]:
    """Numbers of 8 bits with random scales, and for int8 offsets."""
    scale_key, offset_key = jax.random.split(key)
    scale = jax.random.uniform(scale_key, values.shape[:3], jnp.float32, 1 / 60, 1 / 20)
    scale = scale.at[unowned].set(jnp.nan)
    if dtype == "uint8":
        return lax.bitcast_convert_type((40 * values).astype(jnp.float8_e4m3fn), jnp.uint8), scale
    numbers = jnp.clip(jnp.round(40 * values), -128, 127).astype(jnp.int8)
    bits = (lax.bitcast_convert_type(scale, jnp.uint32) >> 15).astype(jnp.uint16)
    return numbers, bits, 0.3 * jax.random.normal(offset_key, scale.shape, jnp.float32)


def make_table(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Draws the block table i32[b, columns], and the blocks that belong to no row."""
    order = np.random.default_rng(0).permutation(cell.num_blocks).astype(np.int32)
    owned, unowned = order[:-NUM_UNOWNED], order[-NUM_UNOWNED:]
    table = np.full((cell.batch, cell.num_columns), unowned[0], np.int32)
    num_held = np.array(cell.lens) // cell.block_size
    table[np.arange(cell.num_columns) < num_held[:, None]] = owned
    return table, unowned


@functools.partial(jax.jit, donate_argnums=0)
def _poisoned(pool: jax.Array, blocks: jax.Array) -> jax.Array:
    return pool.at[blocks].set(jnp.nan)


@functools.partial(jax.jit, static_argnums=1)
def random_pool(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """bf16[shape], normal; drawn in parts, for all at once would take several times the memory."""
    num_rows = min(shape[0], max(1, _CHUNK // math.prod(shape[1:])))

    def draw(nth, pool):
        rows = scale * jax.random.normal(jax.random.fold_in(key, nth), (num_rows, *shape[1:]), jnp.float32)
        start = (nth * num_rows,) + (jnp.int32(0),) * (len(shape) - 1)
        return lax.dynamic_update_slice(pool, rows.astype(pool.dtype), start)

    return lax.fori_loop(0, -(-shape[0] // num_rows), draw, jnp.zeros(shape, jnp.bfloat16))


def expected_output(problem: Problem, buffer: int) -> np.ndarray:
    """f32[b, h, g, d] by the reference, row by row, for float32 keys of all rows may not fit."""
    with jax.default_matmul_precision("highest"):  # else a GPU multiplies float32 in fewer bits
        return np.asarray(_expected_rows(problem[2:], problem.rows, problem.options, buffer))


@functools.partial(jax.jit, static_argnums=2)
def _expected_rows(arrays: tuple, rows: DecodeRows, options: DecodeOptions, buffer: jax.Array) -> jax.Array:
    q, k_pool, v_pool, table, scaling = arrays

    def one(row):
        row_q, of_row = row
        of_row = jax.tree.map(lambda x: x[None], of_row)
        out, _ = reference.paged_decode(
            row_q[None, None], k_pool, v_pool, table, of_row, options, layer=buffer, scaling=scaling
        )
        return out[0, 0]

    return lax.map(one, (q, rows))


def error_of(out: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, divided by the norm of what is expected."""
    if out.shape != expected.shape:
        return math.inf
    return float(np.linalg.norm(np.asarray(out, np.float32) - expected) / np.linalg.norm(expected))
