"""Layer groups: the model layers of one kind, which share a block table and a pool."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import LayerKind
from kvcache_jax.layers.span import Span


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """The model layers of one kind, with the sizes of the pool and the block table they share."""

    kind: LayerKind
    """With its dtype, where that was left to the config."""
    layer_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    max_blocks_per_seq: int
    max_held_blocks: int
    """Most blocks that one row ever holds at once."""
    max_len: int
    """Most tokens of one row: `max_seq_len`, or a source's length."""
    arrays: tuple[tuple[str, BlockArray], ...]
    """The arrays of one block of one layer, by name."""

    @property
    def num_layers(self) -> int:
        """Model layers that share the pool."""
        return len(self.layer_ids)

    @property
    def span(self) -> Span:
        """The positions that stay."""
        return self.kind.span

    @property
    def holds_sources(self) -> bool:
        """Whether the blocks hold sources, which `write_source` writes, in place of the rows' tokens."""
        return self.kind.source_len_limit is not None

    @property
    def window(self) -> int | None:
        """Last tokens that a query sees, itself included; None for all."""
        return self.span.window

    @property
    def max_rollback(self) -> int:
        """Tokens by which a row beyond its window can be shortened; 0 without a window, where it is any."""
        return self.span.max_rollback

    @property
    def num_sink_tokens(self) -> int:
        """First tokens that queries see beside the window; 0 without a window."""
        return self.span.num_sink_tokens

    @property
    def num_sink_blocks(self) -> int:
        """First table columns that never leave the row."""
        return self.span.num_sink_blocks(self.block_size)

    def first_column(self, length: jax.Array, rollback: int = 0) -> jax.Array:
        """Finds the first column after the sinks that is in reach after `length` tokens; see `Span`."""
        return self.span.first_column(length, self.block_size, rollback)

    def num_columns(self, length: jax.Array) -> jax.Array:
        """Counts the columns of `length` tokens; see `Span`."""
        return self.span.num_columns(length, self.block_size)

    def tail_column(self, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the column that is written next, and whether it holds tokens already; see `Span`."""
        return self.span.tail_column(length, self.block_size)

    @property
    def head_positions(self) -> dict[str, int | None]:
        """The axes of heads in the pool's arrays, by name; None for none."""
        return {name: None if array.head_axis is None else 1 + array.head_axis for name, array in self.arrays}

    @property
    def token_positions(self) -> dict[str, int | None]:
        """The axes of tokens in the pool's arrays, by name; None for none."""
        return {
            name: None if array.token_axis is None else 1 + array.token_axis for name, array in self.arrays
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers of the group."""
        values = (math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for _, array in self.arrays)
        return self.num_layers * sum(values)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes
