"""Paged prefill on a TPU: `paged_decode` of rows of many queries, which read keys and values once for all."""

import jax

from pallas_kernels.decode_rows import MAX_QUERIES, DecodeOptions, DecodeRows, check_decode
from pallas_kernels.mosaic_tpu.decode import MAX_QUERY_SIZE, VMEM_BYTES, attend_rows, vmem_bytes

MOST_QUERIES = 128
"""Of a row: more are more than the products need."""
HEADS_AT_ONCE, MAX_TILE_LEN = 1, 256
"""Of keys and values: the logits of all heads, or of more keys, would be too much code and memory."""


def queries_per_row(num_queries: int, k_pool: jax.Array, group_size: int) -> int:
    """Returns into rows of how many queries so many are cut: as VMEM holds, and a decode's at least."""
    _, num_kv_heads, block_size, head_dim = k_pool.shape
    most = MAX_QUERY_SIZE // (num_kv_heads * group_size * head_dim)
    most = min(most, MOST_QUERIES, num_queries + MAX_QUERIES - 1)
    while most >= 2 * MAX_QUERIES:
        most -= most % MAX_QUERIES
        if sum(vmem_bytes(k_pool, most * group_size, block_size, HEADS_AT_ONCE)) <= VMEM_BYTES:
            return most
        most //= 2
    return MAX_QUERIES


def paged_prefill(
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
    """Computes `reference.paged_decode` of rows of many queries on a TPU.

    Args:
      q: `[r, t, h, g, d]`, t from `queries_per_row`; computed in the pools' dtype.
      k_pool: Like `paged_decode`'s.
      v_pool: Like `k_pool`.
      block_table: i32[max_rows, columns].
      rows: Who asks, and which columns are read: the fewer, the earlier the queries.
      options: Static.
      layer: i32[].
      sink_logits: f32[h, g] or None.
      interpret: Run on the CPU, and look for races.

    Returns:
      out f32[r, t, h, g, d] and the log of the sum of exponentials f32[r, t, h, g].

    Raises:
      ValueError: As `paged_decode`.
    """
    check_decode(q, k_pool, v_pool, block_table, rows, options, sink_logits, layer, max_queries=None)
    arguments = q, k_pool, v_pool, block_table, rows, options, layer, sink_logits
    return attend_rows("paged_prefill", *arguments, HEADS_AT_ONCE, MAX_TILE_LEN, interpret)
