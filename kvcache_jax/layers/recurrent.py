"""Recurrent layers: the next token reads a state, which the library keeps as points and entries.

A *point* is the state at the end of a block of W tokens. *Entries* are what each token since then added, so
that the state after any of them is computed again from the point: a shorter row is a shorter fold, and drafts
cost no copies of states. A kind without points has a state per token, or reads the last tokens as they are.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_kind import LayerKind, check_not_negative
from kvcache_jax.layers.span import Span
from kvcache_jax.layers.state_spans import Entries, Points, Recent

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Recurrent(LayerKind):
    """A layer whose tokens read a state of the tokens before them, in place of their keys and values.

    A model calls `recurrence(cache, layer, new, step, weights=...)` there. A subclass in one file says what a
    token stores (`entry`), and computes new tokens from what is held (`advance`). One with points also says
    what a point stores (`point`) and computes the next one (`fold`); one without says how many tokens before
    its own a token reads (`reach`): 1 for a state per token, K - 1 for a convolution of K inputs.

    The library asks for one row; it maps or scans what a step has. What is no token is 0, and comes last;
    what a row lacks at its beginning is 0 too. Results for entries and points are stored in their arrays'
    dtypes.

    Attributes:
      max_rollback: Tokens that `truncate` may take back, such as drafts.
    """

    max_rollback: int = dataclasses.field(default=0, kw_only=True)

    is_differentiable = False
    reach = 0
    """Tokens before its own that a token reads, of a kind without points."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, "max_rollback")

    def point(self, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the arrays of a point by name, with `token_axis=None`. Default: none."""
        return {}

    def entry(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the arrays of a block's entries by name, `[block_size, ...]` with `token_axis=0`."""
        raise NotImplementedError(f"{self.label} has no `entry`, expected a kind's own")

    def advance(
        self, point: Arrays, held: Arrays, count: jax.Array, new: Arrays, weights: Any
    ) -> tuple[jax.Array, Arrays]:
        """Computes the next T tokens of a row.

        Args:
          point: The last point, by the names of `point`.
          held: With points the W entries of the block that the row ends in, of which `count` are there;
            without the last `reach` entries, the most recent one last.
          count: i32[].
          new: `[T, ...]`, a model's inputs by name; T is at most W.
          weights: The layer's own.

        Returns:
          The tokens' outputs `[T, ...]`, and their entries `[T, ...]` by the names of `entry`.
        """
        raise NotImplementedError(f"{self.label} has no `advance`, expected a kind's own")

    def fold(self, point: Arrays, entries: Arrays) -> Arrays:
        """Computes the point at the end of a full block from the one before it and W entries."""
        raise NotImplementedError(f"{self.label} has no `fold`, expected a kind's own, as it has points")

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """No keys and values: `recurrence` takes what `advance` wants."""
        return {}

    @property
    def has_points(self) -> bool:
        """Whether states are kept at the ends of blocks, and entries since."""
        return bool(self.point(self.dtype))

    @property
    def parts(self) -> tuple[LayerKind, ...]:
        """The group of entries, and the group of points where the kind has any."""
        if not self.has_points:
            return (self._part(Recent(window=self.reach + 1, max_rollback=self.max_rollback)),)
        spans = Entries(max_rollback=self.max_rollback), Points(max_rollback=self.max_rollback)
        return tuple(self._part(span) for span in spans)

    def _part(self, span: Span) -> "Part":
        num_blocks = None if isinstance(span, Entries) else self.num_blocks  # a row's share is all it takes
        sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": self.block_size, "dtype": self.dtype}
        return Part(self.num_kv_heads, self.head_dim, recurrent=self, positions=span, **sizes)


@dataclasses.dataclass(frozen=True)
class Part(LayerKind):
    """One group of a recurrent layer: its points, or its entries."""

    recurrent: Recurrent = dataclasses.field(kw_only=True)
    positions: Span = dataclasses.field(kw_only=True)

    is_differentiable = False

    @property
    def span(self) -> Span:
        """The positions that stay."""
        return self.positions

    @property
    def label(self) -> str:
        """Name of the layer and of the part."""
        return f"{self.recurrent.label} {type(self.positions).__name__.lower()}"

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """No keys and values: `recurrence` stores what the layer computes."""
        return {}

    @property
    def rotated_features(self) -> None:
        """None: a state cannot be moved to another position."""
        return None

    def arrays(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the arrays of points or of entries."""
        if isinstance(self.positions, Points):
            return self.recurrent.point(dtype)
        return self.recurrent.entry(block_size, dtype)
