"""The spans of recurrent layers: only later steps read the arrays that a step stores there.

Tokens come in blocks of W. A *point* is the state of all tokens up to a block's end, an *entry* for one token
since the last point. A step stores the points and entries that the row's next token reads, and those that it
reads after up to `max_rollback` fewer tokens: a prefill of any length stores one point.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import quotient, remainder
from kvcache_jax.layers.span import Span, ceil_div


@dataclasses.dataclass(frozen=True)
class LaterSpan(Span):
    """The positions that later steps read; a row holds no others from one step to the next."""

    is_read_later = True

    @property
    def keeps_all(self) -> bool:
        """Never: states stand for what they have read."""
        return False

    def reach_blocks(self, block_size: int) -> int:
        """Counts the most blocks that the next token reads, or reads after a rollback."""
        return ceil_div(self.max_rollback, block_size) + 1

    def max_held_blocks(self, max_seq_len: int, max_query_len: int, block_size: int) -> int:
        """Counts the most blocks of a row: those in reach before a step, and those in reach after it."""
        return min(2 * self.reach_blocks(block_size), ceil_div(max_seq_len, block_size))

    def first_stored_column(self, new_len: jax.Array, block_size: int) -> jax.Array:
        """Finds the first column in reach of later steps."""
        return self.first_column(new_len, block_size, self.max_rollback)


@dataclasses.dataclass(frozen=True)
class Points(LaterSpan):
    """One entry per block, of all tokens up to its end, written once, by the step with its last token.

    The last point before the next token stays, and those that it reads after a rollback.
    """

    is_written_once = True

    def num_prefix_blocks(self, block_size: int) -> int:
        """Counts the point at a prefix's end."""
        return 1

    def num_columns(self, length: jax.Array, block_size: int) -> jax.Array:
        """Counts the full blocks."""
        return quotient(length, block_size)

    def tail_column(self, length: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
        """Finds the next point's column, which holds nothing yet."""
        return quotient(length, block_size), jnp.zeros_like(length, bool)

    def is_opening(self, position: jax.Array, block_size: int) -> jax.Array:
        """Masks the last tokens of blocks."""
        return remainder(position, block_size) == block_size - 1

    def first_column(self, length: jax.Array, block_size: int, rollback: int = 0) -> jax.Array:
        """Finds the last point's column."""
        return jnp.maximum(quotient(jnp.maximum(length - rollback, 0), block_size) - 1, 0)

    def is_beyond_rollback(self, length: jax.Array, new_len: jax.Array) -> jax.Array:
        """Returns False: a point is held or it is not."""
        return jnp.zeros_like(new_len, bool)


@dataclasses.dataclass(frozen=True)
class Entries(LaterSpan):
    """One entry per token since the last point, which is at the end of the block before.

    A step stores the block of its last token too where that is full: its point is computed from it. Prefixes
      end
    at points, so that none needs entries.
    """

    is_in_prefix = False

    def first_column(self, length: jax.Array, block_size: int, rollback: int = 0) -> jax.Array:
        """Finds the column of the next token."""
        return quotient(jnp.maximum(length - rollback, 0), block_size)

    def first_stored_column(self, new_len: jax.Array, block_size: int) -> jax.Array:
        """Finds the column of the last token, or of the last one after a rollback."""
        return quotient(jnp.maximum(new_len - 1 - self.max_rollback, 0), block_size)

    def is_beyond_rollback(self, length: jax.Array, new_len: jax.Array) -> jax.Array:
        """Returns False: a column is held whole or not at all."""
        return jnp.zeros_like(new_len, bool)


@dataclasses.dataclass(frozen=True)
class Recent(LaterSpan):
    """The last `window - 1` tokens, which the next one reads."""

    def reach_blocks(self, block_size: int) -> int:
        """Counts the blocks of the window, and of the tokens before it that a rollback reads."""
        assert self.window is not None
        return ceil_div(self.window - 1 + self.max_rollback, block_size) + 1

    def num_read_blocks(self, block_size: int) -> int:
        """Counts the blocks of the window."""
        assert self.window is not None
        return ceil_div(self.window - 1, block_size) + 1
