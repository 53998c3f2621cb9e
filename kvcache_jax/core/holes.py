"""Tokens removed from inside a row: which places are hidden, and which text position each place has."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.arrays.pytree import pytree_dataclass


@pytree_dataclass()
class Holes:
    """Tokens removed from inside rows: a place is an index into a row, a position one into its text.

    A row is up to four runs of places. In the first run a token's position in the text is its
    place in the row; in the last run it is the place plus `num_dropped`:

        0 ... start - num_kept ... start ... end ... context_len
        plain | kept | hidden | later
    """

    # i32[rows], first place after the plain and the kept tokens; 0 for rows that dropped nothing.
    start: jax.Array
    num_hidden: jax.Array  # i32[rows], dropped tokens whose places the row still has, from `start` on
    num_dropped: jax.Array  # i32[rows], tokens that the row dropped with their places
    # i32[rows], tokens that were kept of more, whose positions in the text are not known; layers and heads
    # may have kept others.
    num_kept: jax.Array
    # i32[rows, groups], first place at which the row has a token in each layer group; above 0 where fewer
    # were kept there than in another group.
    first: jax.Array

    @property
    def end(self) -> jax.Array:
        """i32[rows], first place after the hidden ones."""
        return self.start + self.num_hidden

    @property
    def prefix_len(self) -> jax.Array:
        """i32[rows], first tokens whose position in the text is their place, if any token was dropped."""
        return self.start - self.num_kept

    @property
    def is_plain(self) -> jax.Array:
        """bool[rows], the row dropped nothing, in no layer group."""
        return (self.num_hidden == 0) & (self.num_dropped == 0) & (self.num_kept == 0)

    @property
    def kept_until(self) -> jax.Array:
        """i32[rows], the text up to which tokens were kept of more, or dropped; 0 if none was kept.

        The positions of the kept tokens within this text are not known.
        """
        return jnp.where(self.num_kept > 0, self.end + self.num_dropped, 0)

    def of_rows(self, rows: jax.Array) -> "Holes":
        """Reads the holes of `rows` i32[n]; all are 0 for an entry that is no row."""
        return jax.tree.map(lambda x: get_at(x, rows, 0), self)

    def with_rows(self, rows: jax.Array, new: "Holes") -> "Holes":
        """Sets the holes of `rows` i32[n], of which no two are equal; entries that are no row are skipped."""
        return jax.tree.map(lambda x, values: set_at(x, rows, values), self, new)

    def forgotten(self, mask: jax.Array) -> "Holes":
        """Returns the holes with 0 for the masked rows."""
        return jax.tree.map(lambda x: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), 0, x), self)

    def of_group(self, group_id: int) -> "Holes":
        """Reads the holes of one layer group: `first` is i32[rows]."""
        return dataclasses.replace(self, first=self.first[..., group_id])

    def positions(self, places: jax.Array) -> jax.Array:
        """Computes the text positions of the tokens at `places` i32[rows, ...]; not of kept tokens."""
        num_dropped = _spread(self.num_dropped, places)
        return places + jnp.where(places >= _spread(self.start, places), num_dropped, 0)

    def is_hidden(self, places: jax.Array) -> jax.Array:
        """Masks the `places` i32[rows, ...] without a visible token, bool; of one layer group."""
        is_dropped = (places >= _spread(self.start, places)) & (places < _spread(self.end, places))
        return is_dropped | (places < _spread(self.first, places))

    def is_kept(self, places: jax.Array) -> jax.Array:
        """Masks the `places` i32[rows, ...] that hold kept tokens, bool."""
        return (places >= _spread(self.prefix_len, places)) & (places < _spread(self.start, places))


def _spread(per_row: jax.Array, places: jax.Array) -> jax.Array:
    """Gives i32[rows] as many axes as `places`."""
    return per_row.reshape(-1, *[1] * (places.ndim - 1))
