"""The choice of the tokens that `compress` keeps, by their scores, and of the places they move to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.holes import Holes
from kvcache_jax.layers.layer_group import LayerGroup


class Kept(NamedTuple):
    """The tokens that rows of one layer group keep.

    Attributes:
      sources: As in `TokenMoves`.
      first: i32[n], first place with a token.
      same_len: i32[n], first tokens, which stay where they are, in all layers and heads.
    """

    sources: jax.Array
    first: jax.Array
    same_len: jax.Array


def counts_of(num_keep: jax.Array, group: LayerGroup, config: CacheConfig) -> tuple[jax.Array, jax.Array]:
    """Reads how many tokens a group keeps, i32[n], and in which rows its layers differ, bool[n]."""
    if num_keep.ndim == 1:
        return num_keep, jnp.zeros_like(num_keep, bool)
    of_layers = num_keep[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    return of_layers[:, 0], (of_layers != of_layers[:, :1]).any(axis=1)


def scores_of(scores: jax.Array, group: LayerGroup, config: CacheConfig) -> jax.Array:
    """Reads a group's scores, `[n, layers, heads, max_seq_len]`, 1 layer or head where they are all's."""
    if scores.ndim > 2:
        scores = scores[:, np.array([config.own_layers.index(layer) for layer in group.layer_ids])]
    num_middle = scores.ndim - 2
    shape = scores.shape[0], *scores.shape[1:-1], *[1] * (2 - num_middle), scores.shape[-1]
    return scores.reshape(shape)


def keep(
    scores: jax.Array,
    context_len: jax.Array,
    holes: Holes,
    num_keep: jax.Array,
    new_len: jax.Array,
    group: LayerGroup,
) -> Kept:
    """Chooses what rows keep in a layer group, the last of it at place `new_len - 1`.

    Args:
      scores: f32[n, layers, heads, max_seq_len].
      context_len: i32[n], tokens before.
      holes: Holes of the rows and the group.
      num_keep: i32[n].
      new_len: i32[n].
      group: The layer group.
    """
    shape, width = scores.shape, group.max_blocks_per_seq * group.block_size
    num_keep, first = num_keep[:, None, None, None], new_len - num_keep
    places = lax.broadcasted_iota(jnp.int32, shape, 3)
    row_places = places[:, 0, 0]
    is_shown = (row_places < context_len[:, None]) & ~holes.is_hidden(row_places)
    scores = jnp.where(places < group.span.num_sink_tokens, jnp.inf, scores)
    is_less = jnp.broadcast_to(~is_shown[:, None, None], shape).astype(jnp.int32)
    # Visible tokens first, then by score, then by place; NaN sorts after all numbers, so it is kept last.
    *_, best = lax.sort((is_less, -scores, places), num_keys=3)
    chosen = jnp.sort(jnp.where(places < num_keep, best, width), axis=-1)  # `places` are ranks here

    target = lax.broadcasted_iota(jnp.int32, (*shape[:3], width), 3)
    nth = target - first[:, None, None, None]
    is_kept = (nth >= 0) & (nth < num_keep)
    found = jnp.take_along_axis(chosen, jnp.clip(nth, 0, shape[3] - 1), axis=-1)
    sources = jnp.where(is_kept, found, width)
    # What is kept ascends, so what stays in its place is the first of it.
    same_len = jnp.min(jnp.sum(sources == target, axis=-1, dtype=jnp.int32), axis=(1, 2))
    return Kept(sources, first, jnp.where(first + holes.first == 0, same_len, 0))
