"""Calls of the model as one: each token a row of its own, attention by the plans of the calls."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.engine.inputs import asks_for


def can_join(config: CacheConfig, forward: Callable, width: int = 1) -> bool:
    """Tests whether a model can compute prompts and `width` next tokens of a row in one step.

    States differ in their last bits where other tokens are computed beside them, and so would what follows
    cached ones. Windows must leave prompts as much room as next tokens. A model must say that it reads no
    cache by itself; see `Forward`.
    """
    has_room = config.query_len_limit >= 2 * width or all(group.span.keeps_all for group in config.groups)
    return asks_for(forward, "logits_at") and not config.has_states and has_room


def join(cache: Cache, prompts: Step, following: Step) -> Step:
    """Joins two padded steps with plans to one of rows of a token."""
    steps = [by_token(cache, step, step.positions.size) for step in (prompts, following)]
    step: Step = jax.tree.map(lambda *columns: jnp.concatenate(columns), *steps)
    return dataclasses.replace(step, parts=(prompts, following))


def by_token(cache: Cache, step: Step, num_rows: int) -> Step:
    """Takes each token of a padded step for a row of its own, without plans; pads with empty rows."""
    width = step.positions.shape[1]
    is_token = jnp.arange(width, dtype=jnp.int32)[None] < step.query_len[:, None]
    is_first = jnp.arange(width, dtype=jnp.int32)[None] == 0
    follows = jnp.zeros_like(step.query_len, bool) if step.follows is None else step.follows

    def column(values: jax.Array, fill: int) -> jax.Array:
        values = jnp.broadcast_to(values, is_token.shape).reshape(-1)
        return jnp.pad(values, (0, num_rows - values.size), constant_values=fill)

    query_len = column(is_token.astype(jnp.int32), 0)
    positions = column(step.positions, 0)
    pools = zip(cache.control.block_pools, cache.config.groups, strict=True)
    nowhere = [pool.num_blocks * group.block_size for pool, group in pools]
    return dataclasses.replace(
        step,
        status=column(step.status[:, None], 0),
        seq_ids=column(step.seq_ids[:, None], cache.max_seqs),
        query_len=query_len,
        context_len=positions + query_len,
        positions=positions[:, None],
        slots=tuple(column(slots, end)[:, None] for slots, end in zip(step.slots, nowhere, strict=True)),
        follows=column(is_token & jnp.where(is_first, follows[:, None], True), False),
        plans=(),
    )


def without_rows(cache: Cache, step: Step, is_left: jax.Array) -> Step:
    """Leaves out of a padded step, without plans, the rows that are not in `is_left` bool[max_seqs]."""
    stays = jnp.append(is_left, False)[step.seq_ids]
    pools = zip(step.slots, cache.control.block_pools, cache.config.groups, strict=True)
    slots = tuple(
        jnp.where(stays[:, None], slots, pool.num_blocks * group.block_size) for slots, pool, group in pools
    )
    return dataclasses.replace(step, query_len=jnp.where(stays, step.query_len, 0), slots=slots)
