"""The layer kind, and the span of positions that it keeps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import quotient
from kvcache_jax.arrays.number_checks import static_count

MAX_INDEX = 2**31
"""One past the largest index that 32 bits reach."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Computes the smallest integer not below the quotient."""
    return -(-numerator // denominator)


@dataclasses.dataclass(frozen=True)
class Span:
    """The positions of a row that stay: all of them, or a window behind some sinks.

    Attributes:
      window: Last tokens that a query sees, itself included; None for all.
      num_sink_tokens: First tokens of a row that stay beside the window.
      max_rollback: Tokens by which a row beyond its window can be shortened.
    """

    window: int | None = None
    num_sink_tokens: int = 0
    max_rollback: int = 0

    def num_sink_blocks(self, block_size: int) -> int:
        """Counts the first table columns that never leave a row; 0 without a window."""
        return ceil_div(self.num_sink_tokens, block_size)

    def max_held_blocks(self, max_seq_len: int, max_query_len: int, block_size: int) -> int:
        """Counts the most blocks that one row ever holds at once."""
        max_blocks = ceil_div(max_seq_len, block_size)
        if self.window is None:
            return max_blocks
        held = ceil_div(self.window + max_query_len + self.max_rollback, block_size) + 1
        return min(held + self.num_sink_blocks(block_size), max_blocks)

    def max_leaving_blocks(self, max_query_len: int, block_size: int) -> int:
        """Counts the most blocks that leave a row between two calls of `extend`; 0 without a window."""
        return 0 if self.window is None else ceil_div(max_query_len, block_size) + 1

    def first_column(self, length: jax.Array, block_size: int, rollback: int = 0) -> jax.Array:
        """Finds the first column behind the sinks that is read after `length` tokens, i32 like `length`.

        With `rollback`, the first one that is read after up to so many tokens fewer.
        """
        if self.window is None:
            return jnp.zeros_like(length)
        first_position = jnp.maximum(length + 1 - self.window - rollback, 0)
        return jnp.maximum(quotient(first_position, block_size), self.num_sink_blocks(block_size))


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The contents of one model layer per token; equal kinds share a block table and a pool.

    Attributes:
      num_kv_heads: Key and value heads (query heads are a multiple of it).
      head_dim: Width of a key and of a value.
      num_blocks: Blocks of this kind's pool, in place of the config's.
      block_size: Tokens of a block of this kind, in place of the config's.
    """

    num_kv_heads: int
    head_dim: int
    num_blocks: int | None = dataclasses.field(default=None, kw_only=True)
    block_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        check_positive(self, "num_kv_heads", "head_dim")
        check_positive_or_none(self, "num_blocks", "block_size")

    @property
    def span(self) -> Span:
        """The positions that stay."""
        raise NotImplementedError(
            f"{type(self).__name__} has no span, expected a property that returns a Span"
        )


def check_count(owner: Any, name: str, least: int) -> None:
    """Refuses a field that is no integer of at least `least`, and stores the integer."""
    value = static_count(name, getattr(owner, name), least)
    if value >= MAX_INDEX and name != "memory_budget":
        raise ValueError(f"{name} is {value}, expected below 2**31")
    object.__setattr__(owner, name, value)


def check_positive(owner: Any, *names: str) -> None:
    """Refuses fields that are no integers above 0."""
    for name in names:
        check_count(owner, name, least=1)


def check_positive_or_none(owner: Any, *names: str) -> None:
    """Refuses fields that are neither None nor integers above 0."""
    check_positive(owner, *(name for name in names if getattr(owner, name) is not None))


def check_not_negative(owner: Any, *names: str) -> None:
    """Refuses fields that are no integers of at least 0."""
    for name in names:
        check_count(owner, name, least=0)
