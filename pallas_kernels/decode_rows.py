"""Who asks in a paged decode, and what the arguments must look like."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_QUERIES = 8
"""Query tokens of one row in one call."""


class DecodeRows(NamedTuple):
    """The rows of a decode: each has consecutive query tokens and reads columns of the block table.

    A row reads the table's first `num_sink_blocks` columns (those that hold kept tokens, see
    `DecodeOptions`), then the columns from `first_column` on, `num_columns` in all. A column is the block of
    `block_size` positions from `column * block_size` on. Queries see keys up to their own position.

    Attributes:
      table_row: i32[r], row of the block table.
      first_column: i32[r], at least `num_sink_blocks`.
      num_columns: i32[r]; 0 reads nothing, and the row's output is 0 and -inf, or with sink logits 0 and
        these.
      first_position: i32[r], position of the row's first query; the others follow.
      num_queries: i32[r], queries that count; the output of the others is 0 and -inf.
    """

    table_row: jax.Array
    first_column: jax.Array
    num_columns: jax.Array
    first_position: jax.Array
    num_queries: jax.Array


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """The static part of a decode.

    Attributes:
      num_blocks: Blocks of one layer; layer `i` is pool rows `[i * num_blocks, (i + 1) * num_blocks)`.
      scale: Of the logits.
      soft_cap: Bounds the scaled logits, `soft_cap * tanh(logits / soft_cap)`; or None.
      window: Keys a query sees, itself included; or None for all.
      num_sink_tokens: First positions seen beside the window; 0 without a window.
    """

    num_blocks: int
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    num_sink_tokens: int = 0

    def __post_init__(self):
        for name, least in (("num_blocks", 1), ("num_sink_tokens", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}, expected a finite number")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap is {self.soft_cap}, expected a positive number or None")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, expected at least 1, or None")
        if self.window is None and self.num_sink_tokens:
            raise ValueError(f"num_sink_tokens is {self.num_sink_tokens} without a window, expected 0")

    def num_sink_blocks(self, block_size: int) -> int:
        """Columns that hold the kept first tokens."""
        return -(-self.num_sink_tokens // block_size)


def check_decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table: jax.Array,
    rows: DecodeRows,
    options: DecodeOptions,
    sink_logits: jax.Array | None,
    layer: jax.Array | int,
) -> None:
    """Raises unless the arguments of `paged_decode` fit together; limits of one kernel are its own."""
    if q.ndim != 5 or 0 in q.shape:
        raise ValueError(
            f"q has shape {q.shape}, expected [rows, queries, num_kv_heads, group_size, head_dim], each at "
            "least 1"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q is {q.dtype}, expected a floating dtype")
    num_rows, num_queries, num_kv_heads, group_size, head_dim = q.shape
    if not 1 <= num_queries <= MAX_QUERIES:
        raise ValueError(f"q has {num_queries} queries a row, expected 1 to {MAX_QUERIES}: split the row")
    check_pools(k_pool, v_pool, options.num_blocks)
    check_layer(layer)
    if (num_kv_heads, head_dim) != (k_pool.shape[1], k_pool.shape[3]):
        raise ValueError(
            f"q has {num_kv_heads} key/value heads of {head_dim}, expected {k_pool.shape[1]} of "
            f"{k_pool.shape[3]} as in the pools"
        )
    if block_table.ndim != 2 or 0 in block_table.shape or block_table.dtype != jnp.int32:
        raise ValueError(
            f"block_table is {block_table.dtype}{block_table.shape}, expected int32 [max_rows, columns], "
            "each at least 1"
        )
    for name, values in rows._asdict().items():
        if values.shape != (num_rows,) or values.dtype != jnp.int32:
            raise ValueError(f"rows.{name} is {values.dtype}{values.shape}, expected int32[{num_rows}]")
    if sink_logits is not None and sink_logits.shape != (num_kv_heads, group_size):
        raise ValueError(f"sink_logits has shape {sink_logits.shape}, expected {(num_kv_heads, group_size)}")


def check_pools(k_pool: jax.Array, v_pool: jax.Array, num_blocks: int) -> None:
    """Raises unless both pools are `[num_layers * num_blocks, num_kv_heads, block_size, head_dim]`."""
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"the pools are {k_pool.dtype}{k_pool.shape} and {v_pool.dtype}{v_pool.shape}, expected two "
            "equal [num_layers * num_blocks, num_kv_heads, block_size, head_dim]"
        )
    if 0 in k_pool.shape:
        raise ValueError(f"the pools have shape {k_pool.shape}, expected no axis of length 0")
    if num_blocks < 1 or k_pool.shape[0] % num_blocks:
        raise ValueError(
            f"the pools have {k_pool.shape[0]} blocks, expected a multiple of num_blocks = {num_blocks}"
        )


def check_layer(layer: jax.Array | int) -> None:
    """Raises unless the layer is one integer."""
    dtype = jnp.result_type(layer)
    if jnp.shape(layer) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"layer is {dtype}{jnp.shape(layer)}, expected an integer scalar")
