"""Paged decode on a TPU: one row after the other, whole blocks of all heads by DMA, two tiles in flight."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_rows import DecodeOptions, DecodeRows, check_decode
from pallas_kernels.mosaic_tpu.limits import check_scalars, check_tpu_pool, pallas_call, tiled_bytes

MAX_TILE_LEN = 512
TILES_BYTES = 8 * 2**20
"""Of VMEM, for two tiles of keys and two of values."""
VMEM_BYTES = 15 * 2**20
"""For all that `vmem_bytes` counts, of the 16 MiB that the compiler gives a kernel on TPU v5e."""
MAX_QUERY_SIZE = 2**18
"""Numbers of all queries of a row: beyond, the compiler keeps more copies of them and of their results."""
NUM_ROW_SCALARS = len(DecodeRows._fields) + 3
"""Of a row in SMEM, with its plan."""
MASKED = -1e30
"""A logit that takes no weight; finite, for inf - inf is NaN."""


class Plan(NamedTuple):
    """Who reads which tile into which slot, so that the next tile is on its way whosever it is.

    Attributes:
      num_tiles: i32[r], tiles that the row reads.
      num_before: i32[r], tiles of all rows before; tile `i` of a row uses slot `(num_before + i) % 2`.
      next_row: i32[r], the next row that reads anything, or `r`.
    """

    num_tiles: jax.Array
    num_before: jax.Array
    next_row: jax.Array


def paged_decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    *,
    layer: jax.Array | int = 0,
    sink_logits: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `reference.paged_decode` on a TPU.

    Args:
      q: `[r, t, h, g, d]`, t at most 8; computed in the pools' dtype.
      k_pool: `[num_layers * num_blocks, h, block_size, d]`, bf16 with block_size a multiple of 16, or f32
        with a multiple of 8; d a multiple of 128.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns].
      rows: Who asks, and which columns are read.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g] or None.
      interpret: Run on the CPU, and look for races.

    Returns:
      out f32[r, t, h, g, d] and the log of the sum of exponentials f32[r, t, h, g].

    Raises:
      ValueError: The arguments do not fit together, or are not for a TPU (`check_tpu_pool`); table and
        rows do not fit into SMEM, or a row's queries or a block of all heads into VMEM.
    """
    check_decode(q, k_pool, v_pool, block_table, rows, options, sink_logits, layer)
    arguments = q, k_pool, v_pool, block_table, rows, options, layer, sink_logits
    heads_at_once = q.shape[2]
    return attend_rows("paged_decode", *arguments, heads_at_once, MAX_TILE_LEN, interpret)


def attend_rows(
    name: str,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    layer: jax.Array | int,
    sink_logits: jax.Array | None,
    num_heads: int,
    max_tile_len: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes `paged_decode` of any number of queries a row, `num_heads` key/value heads at a time."""
    check_tpu_pool(k_pool)
    num_rows, num_queries, num_kv_heads, group_size, head_dim = q.shape
    check_scalars("the block table with its rows", block_table.size + NUM_ROW_SCALARS * num_rows)
    query_size = num_queries * num_kv_heads * group_size * head_dim
    if query_size > MAX_QUERY_SIZE:
        raise ValueError(
            f"a row's queries are {query_size} numbers, expected at most {MAX_QUERY_SIZE}: split the row, or "
            "shard the heads"
        )
    block_size, columns = k_pool.shape[2], block_table.shape[1]
    tile_len = tile_len_of(k_pool, num_queries * group_size, num_heads, max_tile_len)

    rows = rows._replace(num_columns=jnp.where(rows.num_queries > 0, rows.num_columns, 0))
    plan = _plan(rows, tile_len // block_size)
    num_packed = num_queries * group_size
    packed = q.astype(k_pool.dtype).swapaxes(1, 2).reshape(num_rows, num_kv_heads, num_packed, head_dim)
    sinks = jnp.full((num_kv_heads, group_size), MASKED) if sink_logits is None else sink_logits
    sinks = jnp.tile(jnp.maximum(sinks.astype(jnp.float32), MASKED), (1, num_queries))[..., None]

    def of_row(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, num_kv_heads, num_packed, width), lambda row, *_: (row, 0, 0, 0))

    def per_query(width: int):
        return pltpu.VMEM((num_kv_heads, num_packed, width), jnp.float32)

    tiles = pltpu.VMEM((2, num_kv_heads, tile_len, head_dim), k_pool.dtype)
    num_keys = num_rows * columns * block_size
    num_logits = num_keys * num_kv_heads * num_packed
    key_bytes = 2 * num_kv_heads * head_dim * k_pool.dtype.itemsize
    out, lse = pallas_call(
        functools.partial(
            _kernel, options=options, columns=columns, group_size=group_size, num_heads=num_heads
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_rows,),
            in_specs=[
                of_row(head_dim),
                pl.BlockSpec((num_kv_heads, num_packed, 1), lambda row, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[of_row(head_dim), of_row(1)],
            scratch_shapes=[
                tiles,
                tiles,
                per_query(1),
                per_query(1),
                per_query(head_dim),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, num_packed, width), jnp.float32)
            for width in (head_dim, 1)
        ],
        # Row after row: each starts the first copies of the next.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * num_logits * head_dim, transcendentals=num_logits, bytes_accessed=num_keys * key_bytes
        ),
        interpret=interpret,
        name=name,
    )(
        block_table.reshape(-1),
        rows,
        plan,
        jnp.asarray(layer, jnp.int32).reshape(1),
        packed,
        sinks,
        k_pool,
        v_pool,
    )
    out, lse = (
        x.reshape(num_rows, num_kv_heads, num_queries, group_size, -1).swapaxes(1, 2) for x in (out, lse)
    )
    return out, lse[..., 0]


def tile_len_of(k_pool: jax.Array, num_packed: int, num_heads: int, max_tile_len: int) -> int:
    """As many whole blocks as a tile may have, and VMEM holds beside `num_packed` queries of each head."""
    block_size = k_pool.shape[2]
    for blocks in range(max(1, max_tile_len // block_size), 0, -1):
        tiles, others, split = vmem_bytes(k_pool, num_packed, blocks * block_size, num_heads)
        # With one block there is no choice, and often less than all operands is split at a time.
        needed = tiles + others + (split if blocks > 1 else 0)
        if tiles <= TILES_BYTES and needed <= VMEM_BYTES:
            return blocks * block_size
    tiles, others, _ = vmem_bytes(k_pool, num_packed, block_size, num_heads)
    raise ValueError(
        f"blocks of {block_size} tokens need {tiles} bytes of VMEM, and {num_packed} queries of each "
        f"key/value head {others} beside them, expected at most {TILES_BYTES}, and {VMEM_BYTES} together: "
        "use smaller blocks, split the row, or shard the heads"
    )


def vmem_bytes(k_pool: jax.Array, num_packed: int, tile_len: int, num_heads: int) -> tuple[int, int, int]:
    """Of the tiles; of queries and results, both twice, the softmax's state and logits; of split operands.

    Logits and operands are of `num_heads` at a time.

    Products of float32 take each operand apart, into three of bfloat16.
    """
    _, num_kv_heads, _, head_dim = k_pool.shape

    def size(rows: int, columns: int, dtype: jnp.dtype) -> int:
        return num_kv_heads * tiled_bytes(rows, columns, dtype)

    float32 = jnp.dtype(jnp.float32)
    tiles = 4 * size(tile_len, head_dim, k_pool.dtype)
    queries = 2 * size(num_packed, head_dim, k_pool.dtype)
    results_and_state = 3 * size(num_packed, head_dim, float32) + 2 * size(num_packed, 1, float32)
    logits = size(num_packed, tile_len, float32) * num_heads // num_kv_heads
    operands = (tiles // 2 + queries // 2) * num_heads // num_kv_heads
    split = (operands + logits) * 3 // 2 if k_pool.dtype == jnp.float32 else 0
    return tiles, queries + results_and_state + logits, split


def _plan(rows: DecodeRows, blocks_per_tile: int) -> Plan:
    num_tiles = -(-rows.num_columns // blocks_per_tile)
    num_rows = num_tiles.shape[0]
    nth = jnp.arange(num_rows, dtype=jnp.int32)
    later = jnp.where((nth[None] > nth[:, None]) & (num_tiles > 0)[None], nth[None], num_rows)
    return Plan(num_tiles, jnp.cumsum(num_tiles, dtype=jnp.int32) - num_tiles, later.min(axis=1))


def _kernel(
    table,  # i32[max_rows * columns], SMEM
    rows,  # DecodeRows, SMEM
    plan,  # Plan, SMEM
    layer,  # i32[1], SMEM
    q,  # [1, h, t * g, d], VMEM
    sinks,  # f32[h, t * g, 1], VMEM; MASKED for none
    k_pool,  # [num_layers * num_blocks, h, block_size, d], HBM
    v_pool,  # Like k_pool
    out,  # f32[1, h, t * g, d], VMEM
    lse,  # f32[1, h, t * g, 1], VMEM
    k_tiles,  # [2, h, tile_len, d], VMEM
    v_tiles,  # Like k_tiles
    largest,  # f32[h, t * g, 1], VMEM: of the logits so far
    total,  # f32[h, t * g, 1], VMEM: of the weights, exp(logit - largest)
    weighted,  # f32[h, t * g, d], VMEM: values, summed with these weights
    arrived,  # DMA semaphores [slot, k or v]
    *,
    options: DecodeOptions,
    columns: int,
    group_size: int,
    num_heads: int,
):
    block_size = k_pool.shape[2]
    _, num_kv_heads, tile_len, _ = k_tiles.shape
    num_packed = q.shape[2]
    blocks_per_tile = tile_len // block_size
    num_sink_blocks = options.num_sink_blocks(block_size)
    row = pl.program_id(0)
    num_tiles, num_before = plan.num_tiles[row], plan.num_before[row]

    def for_blocks(of_row, tile, slot, act):
        """Calls `act` with the copies of each block of a tile."""

        @pl.loop(0, jnp.minimum(blocks_per_tile, rows.num_columns[of_row] - tile * blocks_per_tile))
        def _(i):
            nth = tile * blocks_per_tile + i
            column = jnp.where(nth < num_sink_blocks, nth, rows.first_column[of_row] + nth - num_sink_blocks)
            block = layer[0] * options.num_blocks + table[rows.table_row[of_row] * columns + column]
            part = pl.ds(i * block_size, block_size)
            for kind, (pool, tiles) in enumerate([(k_pool, k_tiles), (v_pool, v_tiles)]):
                act(pltpu.make_async_copy(pool.at[block], tiles.at[slot, :, part], arrived.at[slot, kind]))

    def start(of_row, tile, slot):
        for_blocks(of_row, tile, slot, lambda copy: copy.start())

    first_position = rows.first_position[row]
    last_position = first_position + rows.num_queries[row] - 1
    # Query heads of one key/value head are packed query by query.
    packed = lax.broadcasted_iota(jnp.int32, (num_packed, 1), 0)
    query = ((packed.astype(jnp.float32) + 0.5) / group_size).astype(jnp.int32)
    query_position = first_position + query
    is_query = query_position <= last_position  # [t * g, 1]

    largest[...] = jnp.where(is_query, sinks[...], MASKED)
    total[...] = jnp.where(largest[...] > MASKED, 1.0, 0.0)
    weighted[...] = jnp.zeros_like(weighted)

    def position_of(nth):
        """Positions of the row's keys; the sink columns are followed by those from `first_column` on."""
        skipped = (rows.first_column[row] - num_sink_blocks) * block_size
        return jnp.where(nth < num_sink_blocks * block_size, nth, nth + skipped)

    def is_near(position, query_position):
        """Whether a key is recent enough for the query."""
        if options.window is None:
            return True
        return (position > query_position - options.window) | (position < options.num_sink_tokens)

    def attend(tile, slot):
        num_keys = rows.num_columns[row] * block_size
        nth = tile * tile_len + lax.broadcasted_iota(jnp.int32, (1, tile_len), 1)
        position = position_of(nth)
        is_seen = (
            (nth < num_keys) & (position <= query_position) & is_near(position, query_position) & is_query
        )

        def of_heads(heads):
            logits = options.scale * _dot(q[0, heads], k_tiles[slot, heads], contracting=(2, 2))
            if options.soft_cap is not None:
                logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
            logits = jnp.where(is_seen, logits, MASKED)  # [num_heads, t * g, tile_len]
            old = largest[heads]
            new = jnp.maximum(old, logits.max(axis=2, keepdims=True))
            weights = jnp.where(is_seen, jnp.exp(logits - new), 0.0)
            kept = jnp.exp(old - new)
            largest[heads] = new
            total[heads] = kept * total[heads] + weights.sum(axis=2, keepdims=True)
            seen = _dot(weights.astype(v_tiles.dtype), v_tiles[slot, heads], contracting=(2, 1))
            weighted[heads] = kept * weighted[heads] + seen

        if num_heads == num_kv_heads:
            return of_heads(slice(None))
        pl.loop(0, num_kv_heads // num_heads)(lambda i: of_heads(pl.ds(i * num_heads, num_heads)))

    def clear_unseen(tile, slot):
        """Zeroes the values that no query sees: they may be NaN, and 0 * NaN is NaN."""
        num_keys = rows.num_columns[row] * block_size
        begin, end = tile * tile_len, (tile + 1) * tile_len
        all_seen = (end <= num_keys) & (position_of(end - 1) <= last_position)
        if options.window is not None:
            all_seen &= position_of(begin) > first_position - options.window

        @pl.when(jnp.logical_not(all_seen))
        def _():
            nth = begin + lax.broadcasted_iota(jnp.int32, (tile_len, 1), 0)
            position = position_of(nth)
            is_seen = (nth < num_keys) & (position <= last_position) & is_near(position, first_position)
            values = v_tiles[slot].astype(jnp.float32)
            v_tiles[slot] = jnp.where(is_seen, values, 0.0).astype(v_tiles.dtype)

    @pl.when((num_before == 0) & (num_tiles > 0))
    def _():
        start(row, 0, 0)

    @pl.loop(0, num_tiles)
    def _(tile):
        slot = lax.rem(num_before + tile, 2)
        is_last = tile + 1 == num_tiles
        next_row = jnp.where(is_last, plan.next_row[row], row)

        @pl.when(next_row < pl.num_programs(0))
        def _():
            start(next_row, jnp.where(is_last, 0, tile + 1), 1 - slot)

        for_blocks(row, tile, slot, lambda copy: copy.wait())
        clear_unseen(tile, slot)
        attend(tile, slot)

    is_empty = total[...] == 0.0
    divisor = jnp.where(is_empty, 1.0, total[...])
    out[0] = weighted[...] / divisor
    lse[0] = jnp.where(is_empty, -jnp.inf, largest[...] + jnp.log(divisor))


def _dot(a: jax.Array, b: jax.Array, contracting: tuple[int, int]) -> jax.Array:
    """The product of each head, in f32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contracting[0],), (contracting[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
