"""The tokens that rows dropped from within, and the places and positions of those that are left."""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.pytree import pytree_dataclass


@pytree_dataclass()
class Holes:
    """The tokens that rows dropped, a run of each: those between its first place and the tokens behind it.

    A place is an index into what the row holds, a position one into the text.

    Attributes:
      start: i32[rows], place of the first one.
      num_hidden: i32[rows], those whose places the row still has, from `start` on.
      num_dropped: i32[rows], those that went with their blocks: a token behind them stands so many places
        further in the text.
    """

    start: jax.Array
    num_hidden: jax.Array
    num_dropped: jax.Array

    @property
    def end(self) -> jax.Array:
        """i32[rows], first place behind the hidden ones."""
        return self.start + self.num_hidden

    def of_rows(self, rows: jax.Array) -> "Holes":
        """Reads those of `rows` i32[n]; nothing is dropped of nobody."""
        return jax.tree.map(lambda x: get_at(x, rows, 0), self)

    def positions(self, places: jax.Array) -> jax.Array:
        """Computes where the tokens at `places` i32[rows, ...] stand in the text."""
        shape = (-1, *[1] * (places.ndim - 1))
        num_dropped = self.num_dropped.reshape(shape)
        return places + jnp.where(places >= self.start.reshape(shape), num_dropped, 0)

    def is_hidden(self, places: jax.Array) -> jax.Array:
        """Tells which `places` i32[rows, ...] hold dropped tokens, bool."""
        shape = (-1, *[1] * (places.ndim - 1))
        return (places >= self.start.reshape(shape)) & (places < self.end.reshape(shape))
