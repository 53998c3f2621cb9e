"""The span of a layer kind: the positions of a row that stay."""

import dataclasses
import json

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import quotient, remainder
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.pytree import FORMAT_VERSION, require_format


def ceil_div(numerator: int, denominator: int) -> int:
    """Computes the smallest integer not below the quotient."""
    return -(-numerator // denominator)


@dataclasses.dataclass(frozen=True)
class Span:
    """The positions of a row that stay: all of them, or a window after some sinks.

    Every question of where a row's blocks are is a method of this class. A column is a
    place in the row's line of the block table.

    Attributes:
      window: Last tokens that a query sees, itself included; None for all.
      num_sink_tokens: First tokens of a row that stay beside the window.
      max_rollback: Tokens by which a row beyond its window can be shortened.
    """

    window: int | None = None
    num_sink_tokens: int = 0
    max_rollback: int = 0

    def __post_init__(self):
        for name, least in {"window": 1, "num_sink_tokens": 0, "max_rollback": 0}.items():
            if (value := getattr(self, name)) is not None or name != "window":
                static_count(name, value, least)

    is_read_later = False
    """Whether what a step stores is read by later steps alone, so that it stores no more than they read."""
    is_written_once = False
    """Whether one step stores all that a block holds, so that rows which share it never copy it."""
    is_in_prefix = True
    """Whether a cached prefix needs blocks of such layers."""

    @property
    def keeps_all(self) -> bool:
        """Whether no position ever leaves a row."""
        return self.window is None

    @property
    def rollback_limit(self) -> int | None:
        """Tokens by which any row can be shortened; None for all that it has."""
        return None if self.keeps_all else self.max_rollback

    def num_sink_blocks(self, block_size: int) -> int:
        """Counts the first table columns that never leave a row; 0 where all stay."""
        return 0 if self.keeps_all else ceil_div(self.num_sink_tokens, block_size)

    def max_held_blocks(self, max_seq_len: int, max_query_len: int, block_size: int) -> int:
        """Counts the most blocks that one row ever holds at once."""
        max_blocks = ceil_div(max_seq_len, block_size)
        if self.window is None:
            return max_blocks
        held = ceil_div(self.window + max_query_len + self.max_rollback, block_size) + 1
        return min(held + self.num_sink_blocks(block_size), max_blocks)

    def max_leaving_blocks(self, max_query_len: int, block_size: int) -> int:
        """Counts the most blocks that leave a row between two calls of `extend`; 0 where all stay."""
        return 0 if self.keeps_all else ceil_div(max_query_len, block_size) + 1

    def num_read_blocks(self, block_size: int) -> int:
        """Counts the columns from `first_column` on that are looked at for the next token's blocks."""
        return 1

    def num_prefix_blocks(self, block_size: int) -> int:
        """Counts the most blocks beside sinks that a cached prefix needs of a span that does not keep all."""
        assert self.window is not None
        return ceil_div(self.window - 1, block_size)

    def is_opening(self, position: jax.Array, block_size: int) -> jax.Array:
        """Masks the positions whose token is the first that is stored in its column."""
        return remainder(position, block_size) == 0

    def first_stored_column(self, new_len: jax.Array, block_size: int) -> jax.Array:
        """Finds the first column that a step to `new_len` tokens stores, i32 like `new_len`."""
        return jnp.zeros_like(new_len)

    def num_columns(self, length: jax.Array, block_size: int) -> jax.Array:
        """Counts the columns of `length` tokens, those that left the window included; i32 like `length`."""
        return quotient(length + block_size - 1, block_size)

    def tail_column(self, length: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
        """Finds the column that the token after `length` others is written into.

        Returns:
          i32 like `length`; and bool, that column's block holds tokens already.
        """
        return quotient(length, block_size), remainder(length, block_size) > 0

    def first_column(self, length: jax.Array, block_size: int, rollback: int = 0) -> jax.Array:
        """Finds the first column after the sinks that is read after `length` tokens, i32 like `length`.

        With `rollback`, the first one that is read after up to so many tokens fewer.
        """
        if self.window is None:
            return jnp.zeros_like(length)
        first_position = jnp.maximum(length + 1 - self.window - rollback, 0)
        return jnp.maximum(quotient(first_position, block_size), self.num_sink_blocks(block_size))

    def needed_columns(self, length: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
        """Finds the columns `[first, end)` that a cached prefix of `length` tokens must have beside sinks."""
        return self.first_column(length, block_size), quotient(length, block_size)

    def is_beyond_rollback(self, length: jax.Array, new_len: jax.Array) -> jax.Array:
        """Tests whether rows cut from `length` to `new_len` tokens may need tokens that left the window."""
        if self.window is None:
            return jnp.zeros_like(new_len, bool)
        return (length > self.window) & (length - new_len > self.max_rollback)

    def sees(self, first: jax.Array, last: jax.Array, key_position: jax.Array) -> jax.Array:
        """Masks the keys that any query at the positions `first` to `last` sees, bool."""
        seen = key_position <= last
        if self.window is not None:
            seen &= (key_position > first - self.window) | (key_position < self.num_sink_tokens)
        return seen


def span_to_json(span: Span | None) -> bytes:
    """Writes a span, or none, as bytes, for `jax.export`, with the version of their format."""
    values = None if span is None else dataclasses.asdict(span)
    return json.dumps({"format_version": FORMAT_VERSION, "span": values}).encode()


def span_from_json(data: bytes | bytearray) -> Span | None:
    """Computes the inverse of `span_to_json`."""
    values = json.loads(bytes(data))
    require_format(values.get("format_version"))
    return None if values["span"] is None else Span(**values["span"])
