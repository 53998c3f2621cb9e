"""The tokens that rows let go from within, and the places and positions of those that are left."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass


@pytree_dataclass()
class Holes:
    """The tokens that rows let go from within: a place is an index into a row, a position one into its text.

    A row is up to four runs of places. The tokens of the first stand in the text where they do in the row,
    those of the last `num_dropped` further:

        0 ... start - num_kept ... start ... end ... context_len
        plain | kept | hidden | later

    Attributes:
      start: i32[rows], first place behind the plain and the kept tokens; 0 for rows that let nothing go.
      num_hidden: i32[rows], dropped tokens whose places the row still has, from `start` on.
      num_dropped: i32[rows], tokens that the row let go with their places.
      num_kept: i32[rows], tokens that were kept of more, whose positions in the text are not known; layers
        and heads may have kept others.
      first: i32[rows, groups], first place at which the row has a token in each layer group; above 0 where
        fewer were kept there than in another group.
    """

    start: jax.Array
    num_hidden: jax.Array
    num_dropped: jax.Array
    num_kept: jax.Array
    first: jax.Array

    @property
    def end(self) -> jax.Array:
        """i32[rows], first place behind the hidden ones."""
        return self.start + self.num_hidden

    @property
    def prefix_len(self) -> jax.Array:
        """i32[rows], first tokens that stand in the text where they do in the row, if any was let go."""
        return self.start - self.num_kept

    @property
    def is_plain(self) -> jax.Array:
        """bool[rows], the row let nothing go."""
        return (self.num_hidden == 0) & (self.num_dropped == 0)

    @property
    def kept_until(self) -> jax.Array:
        """i32[rows], the text up to which tokens were kept of more, or let go; 0 if none was kept.

        Where in this text the kept ones stand is not known.
        """
        return jnp.where(self.num_kept > 0, self.end + self.num_dropped, 0)

    def of_rows(self, rows: jax.Array) -> "Holes":
        """Reads those of `rows` i32[n]; nothing is dropped of nobody."""
        return jax.tree.map(lambda x: get_at(x, rows, 0), self)

    def with_rows(self, rows: jax.Array, new: "Holes") -> "Holes":
        """Sets those of `rows` i32[n], which differ; nowhere is skipped."""
        return jax.tree.map(lambda x, values: set_at(x, rows, values), self, new)

    def forgotten(self, mask: jax.Array) -> "Holes":
        """Returns them without those of the masked rows."""
        return jax.tree.map(lambda x: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), 0, x), self)

    def of_group(self, group_id: int) -> "Holes":
        """Reads those of one layer group: `first` is i32[rows]."""
        return dataclasses.replace(self, first=self.first[..., group_id])

    def positions(self, places: jax.Array) -> jax.Array:
        """Computes where the tokens at `places` i32[rows, ...] stand in the text; not of those kept."""
        num_dropped = _spread(self.num_dropped, places)
        return places + jnp.where(places >= _spread(self.start, places), num_dropped, 0)

    def is_hidden(self, places: jax.Array) -> jax.Array:
        """Tells at which `places` i32[rows, ...] there is no token to be seen, bool; of one layer group."""
        is_dropped = (places >= _spread(self.start, places)) & (places < _spread(self.end, places))
        return is_dropped | (places < _spread(self.first, places))

    def is_kept(self, places: jax.Array) -> jax.Array:
        """Tells which `places` i32[rows, ...] hold kept tokens, bool."""
        return (places >= _spread(self.prefix_len, places)) & (places < _spread(self.start, places))


def _spread(per_row: jax.Array, places: jax.Array) -> jax.Array:
    """Gives i32[rows] as many axes as `places`."""
    return per_row.reshape(-1, *[1] * (places.ndim - 1))
