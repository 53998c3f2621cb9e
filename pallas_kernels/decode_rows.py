"""Who asks in a paged decode, and what the arguments must look like."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MOST_SOFT_CAP = 1e30  # beyond, logits divided by it or multiplied leave float32
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
        check_size("num_blocks", self.num_blocks, 1)
        check_size("num_sink_tokens", self.num_sink_tokens, 0)
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}, expected a finite number")
        if self.soft_cap is not None and not 0 < self.soft_cap <= _MOST_SOFT_CAP:
            raise ValueError(
                f"soft_cap is {self.soft_cap}, expected a positive number up to {_MOST_SOFT_CAP}, or None"
            )
        if self.window is not None:
            check_size("window", self.window, 1)
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
    *,
    max_queries: int | None = MAX_QUERIES,
) -> None:
    """Raises unless the arguments of `paged_decode` fit together; limits of one kernel are its own."""
    if q.ndim != 5 or 0 in q.shape:
        raise ValueError(
            f"q has shape {q.shape}, expected [rows, queries, num_kv_heads, group_size, head_dim], each at "
            "least 1"
        )
    check_floats("q", q)
    num_rows, num_queries, num_kv_heads, group_size, head_dim = q.shape
    if max_queries is not None and num_queries > max_queries:
        raise ValueError(f"q has {num_queries} queries a row, expected 1 to {max_queries}: split the row")
    check_pools(k_pool, v_pool, options.num_blocks)
    check_layer(layer, k_pool.shape[0] // options.num_blocks)
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
    check_rows(rows, num_rows)
    if sink_logits is not None:
        check_floats("sink_logits", sink_logits)
        if sink_logits.shape != (num_kv_heads, group_size):
            raise ValueError(
                f"sink_logits has shape {sink_logits.shape}, expected {(num_kv_heads, group_size)}"
            )


def check_rows(rows: DecodeRows, num_rows: int) -> None:
    """Raises unless all of `rows` are i32[num_rows]."""
    for name, values in rows._asdict().items():
        if values.shape != (num_rows,) or values.dtype != jnp.int32:
            raise ValueError(f"rows.{name} is {values.dtype}{values.shape}, expected int32[{num_rows}]")


def check_floats(name: str, values: jax.Array) -> None:
    """Raises unless the values are of a floating dtype, so that nothing of them is dropped by a cast."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"{name} is {values.dtype}, expected a floating dtype")


def check_size(name: str, value: int, least: int) -> None:
    """Raises unless `value` is an integer from `least` to what 32 bits hold."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected an integer")
    if not least <= value < 2**31:
        raise ValueError(f"{name} is {value}, expected at least {least} and below 2**31")


def check_pools(k_pool: jax.Array, v_pool: jax.Array, num_blocks: int) -> None:
    """Raises unless both pools are `[num_layers * num_blocks, num_kv_heads, block_size, head_dim]`."""
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"the pools are {k_pool.dtype}{k_pool.shape} and {v_pool.dtype}{v_pool.shape}, expected two "
            "equal [num_layers * num_blocks, num_kv_heads, block_size, head_dim]"
        )
    if 0 in k_pool.shape:
        raise ValueError(f"the pools have shape {k_pool.shape}, expected no axis of length 0")
    check_size("num_blocks", num_blocks, 1)
    if k_pool.shape[0] % num_blocks:
        raise ValueError(
            f"the pools have {k_pool.shape[0]} blocks, expected a multiple of num_blocks = {num_blocks}"
        )


def check_layer(layer: jax.Array | int, num_layers: int) -> None:
    """Raises unless the layer is one integer and, as far as that is known, one of the pools' layers."""
    dtype = jnp.result_type(layer)
    if jnp.shape(layer) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"layer is {dtype}{jnp.shape(layer)}, expected an integer scalar")
    if isinstance(layer, int | np.integer) and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}, expected 0 <= layer < {num_layers}, the layers of the pools")
