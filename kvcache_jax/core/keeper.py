"""Keepers: features that keep the contents of blocks outside of the pools, and when operations ask them.

A keeper is an extra (`core/extras.py`). It keeps keys and values in `Cache.kept`, beside the pools, and its
arrays in `Control.extras`. A block that it keeps has an id past nowhere, `num_blocks + 1` plus the id that
the keeper gives it: operations that look for a block skip it as they skip nowhere.

Operations on the control state move no keys and values. A keeper notes what has to move, and `settle` moves
it: operations that read or write blocks call it before, and after they evicted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class KeptArray:
    """An array of keys and values that a keeper keeps.

    Attributes:
      shape: Of all.
      dtype: Any dtype of jax.
      head_axis: The axis of key/value heads, over which a mesh may split the array; None for none.
    """

    shape: tuple[int, ...]
    dtype: Any
    head_axis: int | None

    def spec(self, axis: Any) -> PartitionSpec:
        """Splits the heads over a mesh axis, or several; None for none."""
        return PartitionSpec(*[axis if i == self.head_axis else None for i in range(len(self.shape))])


class Keeper:
    """A feature that keeps the contents of blocks outside of the pools; these methods keep nothing.

    Every method gets the config of the cache, and returns a new control state where it gets one.
    """

    memory_kind: ClassVar[str | None] = None
    """The kind of memory of what it keeps, as jax calls it; None for nothing."""

    def arrays(self, config: Any) -> Any:
        """Returns what it keeps, a pytree of `KeptArray`; None for nothing."""

    def find(
        self,
        control: Any,
        tokens: jax.Array,
        most: jax.Array,
        namespace: jax.Array,
        columns: list[jax.Array],
        config: Any,
    ) -> list[jax.Array]:
        """Adds what it keeps of a prompt to the blocks that were found.

        Args:
          control: The state.
          tokens: i32[P], the prompt.
          most: i32[], how many of the tokens may be reused.
          namespace: u32[4].
          columns: Per group i32[any], the blocks found by column, or nowhere.
          config: The cache's.
        """
        return columns

    def hold(self, control: Any, hits: Sequence[jax.Array], config: Any) -> Any:
        """Holds what rows start from, per group i32[n, C], before blocks are evicted for them."""
        return control

    def restore(
        self,
        control: Any,
        rows: jax.Array,
        hits: Sequence[jax.Array],
        held: Mapping[int, jax.Array],
        config: Any,
    ) -> Any:
        """Gives blocks of the pools what it keeps, once they are taken, and publishes them.

        Args:
          control: The state.
          rows: i32[n], the rows that start; `max_seqs` for none.
          hits: Per group i32[n, C], what they start from.
          held: Per group i32[n, C], the blocks in their place.
          config: The cache's.
        """
        return control

    def evict(self, control: Any, group_id: int, block_ids: jax.Array, config: Any) -> Any:
        """Keeps what it can of cached blocks i32[n] of a group, which differ and are evicted next."""
        return control

    def publish(self, control: Any, block_ids: jax.Array, config: Any) -> Any:
        """Learns of indexed blocks i32[n] that were just published; nowhere is skipped."""
        return control

    def forget_contents(self, control: Any, config: Any) -> Any:
        """Forgets all contents."""
        return control

    def scrub(self, cache: Any, masks: Sequence[jax.Array], namespace: jax.Array | None) -> Any:
        """Overwrites what it keeps that continues blocks to overwrite, per group bool[num_blocks].

        With a `namespace` u32[4], all that is of it or of no namespace.
        """
        return cache

    def is_settled(self, control: Any) -> jax.Array | bool:
        """Tests whether no keys and values have to move, bool[]."""
        return True

    def settle(self, cache: Any) -> Any:
        """Moves the keys and values that have to move."""
        return cache
