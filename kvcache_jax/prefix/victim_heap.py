"""The least of many blocks, again and again, as blocks leave and others enter.

The blocks stand in groups, and the least of each group is known. The least of all is looked for among these,
and when a block leaves or enters, its group alone is looked at again.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import quotient, read_first, remainder, set_at

FIRST, LAST, OUT = 0, 1, 2
"""Tiers: of a block that competes, of one that goes when no other is left; what is added while it is out."""
# Blocks of a group: about as many as there are groups in a big pool.
_GROUP = 256
_MAX = jnp.iinfo(jnp.int32).max


class Worth(NamedTuple):
    """What a block is compared by: lesser tiers first, then lesser keys, then lesser recency.

    Attributes:
      tier: i32[n].
      key: i32[n].
      recency: i32[n], not negative and different for all that compete.
    """

    tier: jax.Array
    key: jax.Array
    recency: jax.Array


class Tournament(NamedTuple):
    """Who competes, and who leads.

    Attributes:
      worth: Of each block; filled up to whole groups with some that are out.
      leaders: i32[num_groups], of each group the least block.
    """

    worth: Worth
    leaders: jax.Array


def start(worth: Worth) -> Tournament:
    """The tournament of blocks `worth` i32[num_blocks]."""
    missing = (0, -worth.tier.shape[0] % _GROUP)
    worth = Worth(*(jnp.pad(x, missing, constant_values=OUT) for x in worth))
    leaders = _least(Worth(*(x.reshape(-1, _GROUP) for x in worth)), _lowest_by_halves)
    return Tournament(worth, leaders + _GROUP * jnp.arange(leaders.shape[0], dtype=jnp.int32))


def take(now: Tournament, most: jax.Array, batch: int, nowhere: int) -> tuple[Tournament, jax.Array]:
    """The least of those that compete, out of it; of the `LAST` tier only if there is no other at first.

    Args:
      now: The tournament.
      most: i32[], how many are wanted at most.
      batch: How many at most, as a shape.
      nowhere: What stands for no block.

    Returns:
      The tournament, and i32[batch] block ids, the least first, then nowhere.
    """
    last_tier = jnp.minimum(jnp.min(now.worth.tier[now.leaders]), LAST)

    def take_one(state: _Taking) -> _Taking:
        now, taken, num_taken, _ = state
        leading = Worth(*(x[now.leaders] for x in now.worth))
        group = _least(leading)
        is_taken = (num_taken < most) & (leading.tier[group] <= last_tier)
        block_id = now.leaders[group]
        taken = set_at(taken, num_taken[None], jnp.where(is_taken, block_id, nowhere))
        now = _move(now, jnp.where(is_taken, block_id, -1), OUT)
        return _Taking(now, taken, num_taken + is_taken.astype(jnp.int32), is_taken)

    state = _Taking(now, jnp.full_like(most, nowhere, shape=batch), most & 0, most > 0)
    if batch == 1:
        state = take_one(state)
    else:
        state = lax.while_loop(lambda state: state.goes_on & (state.num_taken < batch), take_one, state)
    return state.now, state.taken


class _Taking(NamedTuple):
    """What is carried from block to block: how many are taken, and whether there may be one more."""

    now: Tournament
    taken: jax.Array
    num_taken: jax.Array
    goes_on: jax.Array


def enter(now: Tournament, block_ids: jax.Array) -> Tournament:
    """Blocks i32[n], which may repeat and compete already, compete; negative ones are skipped."""
    if block_ids.shape[0] == 1:
        return _move(now, block_ids[0], 0)
    end = jnp.max(jnp.where(block_ids >= 0, jnp.arange(1, block_ids.shape[0] + 1, dtype=jnp.int32), 0))
    return lax.fori_loop(0, end, lambda n, now: _move(now, block_ids[n], 0), now)


def _move(now: Tournament, block_id: jax.Array, out: int) -> Tournament:
    """Puts a block out (`OUT`) or in (0), and finds the leader of its group; a negative one is skipped."""
    group = quotient(jnp.maximum(block_id, 0), _GROUP)
    first = group * _GROUP
    members = Worth(*(lax.dynamic_slice_in_dim(x, first, _GROUP) for x in now.worth))
    members, now = read_first(members, now)
    is_it = jnp.arange(_GROUP, dtype=jnp.int32) == block_id - first
    moved = remainder(members.tier, OUT) + out
    members = members._replace(tier=jnp.where(is_it, moved, members.tier))
    tier = lax.dynamic_update_slice_in_dim(now.worth.tier, members.tier, first, axis=0)
    leaders = set_at(now.leaders, group[None], first + _least(members))
    return Tournament(now.worth._replace(tier=tier), leaders)


def _lowest(values: jax.Array) -> jax.Array:
    return jnp.min(values, axis=-1, keepdims=True)


def _lowest_by_halves(values: jax.Array) -> jax.Array:
    """`_lowest` of many groups: CPUs compare halves by vectors, where they reduce number by number."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = jnp.minimum(values[..., :half], values[..., half:])
    return values


def _least(worth: Worth, lowest: Callable[[jax.Array], jax.Array] = _lowest) -> jax.Array:
    """The place of the least along the last axis of i32[..., n] each."""
    is_least = worth.tier == lowest(worth.tier)
    is_least &= worth.key == lowest(jnp.where(is_least, worth.key, _MAX))
    is_least &= worth.recency == lowest(jnp.where(is_least, worth.recency, _MAX))
    order = jnp.arange(worth.tier.shape[-1], dtype=jnp.int32)
    return lowest(jnp.where(is_least, order, _MAX))[..., 0]
