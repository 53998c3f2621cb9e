"""Conversations: what their turns leave in the cache, and two eviction policies that know it.

A bias, never a lock: a block that a row left at `t` and that is retained for `d` is evicted where a block
that was left at `t + d` would be, so the bias decays as time goes by, and a pool that is needed is had.
Evictions happen inside of programs, so time is data: `now` changes when the cache is told, between programs.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at, max_at, min_at, set_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.eviction_policy import BlockMetadata, eviction_policy
from kvcache_jax.core.extras import MOST_TICKS, TICKS_PER_SECOND, Extra, Turn
from kvcache_jax.core.state import Cache, Control

NAME = "conversations"
"""The key of the turns in `Control.extras`."""


@pytree_dataclass()
class Turns:
    """Facts that rows say of their turns, and that ended ones said of the blocks that they left.

    Times are in ticks, sixteenths of a second. Entries of blocks that are not published are unspecified.

    Attributes:
      now: i32[], the latest time that the cache was told.
      conversation: i32[max_seqs], whose turn the row is; 0 for none.
      retain: i32[max_seqs], how long what the row leaves is worth more.
      until: i32[num_blocks], of the indexed group: when the block was left, and its retention, added up.
      owner: i32[num_blocks], the conversation that said so, or 0.
      is_spare: bool[num_blocks], it is among the last `spare_len` tokens of the row that left it last.
    """

    now: jax.Array
    conversation: jax.Array
    retain: jax.Array
    until: jax.Array
    owner: jax.Array
    is_spare: jax.Array


@dataclasses.dataclass(frozen=True)
class Conversations(Extra):
    """Learns which rows are turns of conversations, for the eviction policies "retention" and "tail lru".

    "retention" evicts first what was left longest ago, as "lru" does, but counts what a request left with
    `retain` seconds as left that much later. The next turn of a conversation says anew how long its blocks
    are retained; where others use a block too, the longest retention counts.

    "tail lru" evicts first the ends of conversations, `spare_len` tokens of each, the one left longest ago
    first; a turn that comes back computes these, and is not late. Then it evicts as "lru".

    Attributes:
      spare_len: Tokens that a turn may compute beside its own without being late; for "tail lru".

    Example:
      >>> import kvcache_jax as kv
      >>> config = kv.CacheConfig(
      ...     [kv.FullAttention(1, 8)], enable_prefix_caching=True,
      ...     extras=[kv.policies.Conversations()], eviction_policy="retention")

    References:
      Continuum (Li et al.; arXiv:2511.02230), for retention by the time that a tool takes.
      Tail-Optimized Caching for LLM Inference (Zhang et al.; arXiv:2510.15152), for the spare ends.
    """

    name: ClassVar[str] = NAME
    hears_turns: ClassVar[bool] = True

    spare_len: int = 512

    def __post_init__(self):
        object.__setattr__(self, "spare_len", static_count("spare_len", self.spare_len, 0, 2**30, "2**30"))

    def check(self, config: CacheConfig) -> None:
        """Refuses a cache that keeps nothing of rows that ended."""
        if not config.enable_prefix_caching:
            raise ValueError(
                "extras has Conversations and there is no prefix cache in which turns leave something, "
                "expected enable_prefix_caching=True with it"
            )

    def empty(self, config: CacheConfig, numpy: Any) -> Turns:
        """Builds the arrays of rows and blocks of which nothing was said."""
        num_blocks = config.groups[config.indexed_group].num_blocks
        return Turns(
            now=numpy.zeros((), jnp.int32),
            conversation=numpy.zeros(config.max_seqs, jnp.int32),
            retain=numpy.zeros(config.max_seqs, jnp.int32),
            until=numpy.zeros(num_blocks, jnp.int32),
            owner=numpy.zeros(num_blocks, jnp.int32),
            is_spare=numpy.zeros(num_blocks, bool),
        )

    def tick(self, control: Control, now: jax.Array) -> Control:
        """Sets the time, which never runs back: what was left later is worth no less."""
        now = jnp.clip(now, turns_of(control).now, MOST_TICKS)
        return with_turns(control, now=now)

    def begin(self, control: Control, rows: jax.Array, turn: Turn) -> Control:
        """Notes whose turns `rows` are, and for how long what they leave is retained."""
        turns = turns_of(control)
        return with_turns(
            control,
            conversation=set_at(turns.conversation, rows, turn.conversation),
            retain=set_at(turns.retain, rows, jnp.clip(turn.retain, 0, MOST_TICKS)),
        )

    def inherit(self, control: Control, rows: jax.Array, parent_ids: jax.Array) -> Control:
        """Makes `rows` turns of their parents' conversations."""
        turns = turns_of(control)
        return self.begin(
            control, rows, Turn(*(get_at(x, parent_ids) for x in (turns.conversation, turns.retain)))
        )

    def note_published(self, control: Control, block_ids: jax.Array) -> Control:
        """Forgets what was said of the contents that blocks i32[n] had before."""
        turns = turns_of(control)
        return with_turns(
            control,
            until=set_at(turns.until, block_ids, turns.now),
            owner=set_at(turns.owner, block_ids, 0),
            is_spare=set_at(turns.is_spare, block_ids, False),
        )

    def explain_evicted(self, control: Control, block_id: int) -> str:
        """States whether the retention of a block had lapsed."""
        turns = turns_of(control)
        seconds = (int(turns.until[block_id]) - int(turns.now)) / TICKS_PER_SECOND
        if seconds > 0:
            return f" It would be retained for {seconds:g} s more: the pool was needed."
        return f" Its retention, if it had any, lapsed {-seconds:g} s ago."

    def forget(self, control: Control, rows: jax.Array) -> Control:
        """Notes of the published blocks of `rows`, which end, until when they are retained, and the spare."""
        turns, index = turns_of(control), control.prefix_index
        assert index is not None
        pool = control.block_pools[index.group_links.index(None)]  # the indexed group's
        ids = get_at(pool.block_table, rows, pool.num_blocks)
        ids = jnp.where(block_pool.is_published(pool, ids), ids, pool.num_blocks)
        conversation = jnp.broadcast_to(get_at(turns.conversation, rows, 0)[:, None], ids.shape)
        end = jnp.broadcast_to(turns.now + get_at(turns.retain, rows, 0)[:, None], ids.shape)

        # What the same conversation said before counts no more; what others said does where it is longer.
        is_own = (conversation > 0) & (get_at(turns.owner, ids, 0) == conversation)
        until = set_at(turns.until, jnp.where(is_own, ids, pool.num_blocks), 0)
        until = max_at(until, ids, end)
        said = jnp.where(get_at(until, ids, -1) == end, ids, pool.num_blocks)
        owner = max_at(set_at(turns.owner, said, 0), said, conversation)

        first = jnp.arange(ids.shape[1], dtype=jnp.int32) * index.block_tokens.shape[1]
        is_spare = first[None] >= (get_at(control.context_len, rows, 0) - self.spare_len)[:, None]
        # Of rows that end together, all must be able to spare it.
        spare = min_at(set_at(turns.is_spare, ids, True), ids, is_spare)
        control = with_turns(control, until=until, owner=owner, is_spare=spare)
        return self.begin(control, rows, Turn(jnp.zeros_like(rows), jnp.zeros_like(rows)))

    def violations(self, cache: Cache) -> list[str]:
        """Finds idle rows of which something is said, and times that are none."""
        turns = jax.tree.map(np.asarray, turns_of(cache.control))
        idle = ~np.asarray(cache.is_active)
        violations = [
            f"row {row} is idle and is a turn of conversation {turns.conversation[row]}, retained for "
            f"{turns.retain[row]} ticks"
            for row in np.flatnonzero(idle & ((turns.conversation != 0) | (turns.retain != 0)))
        ]
        is_late = (turns.until < 0) | (turns.until > turns.now + MOST_TICKS)
        return violations + [
            f"block {block} is retained until {turns.until[block]}, and it is {turns.now}"
            for block in np.flatnonzero(is_late)
        ]


def turns_of(control: Control) -> Turns:
    """Returns the turns of a cache that learns of them."""
    return control.extras[NAME]


def with_turns(control: Control, **fields: jax.Array) -> Control:
    """Sets fields of the turns."""
    turns = dataclasses.replace(turns_of(control), **fields)
    return dataclasses.replace(control, extras=control.extras | {NAME: turns})


@eviction_policy("retention", extra=NAME)
def _first_to_lapse(blocks: BlockMetadata, turns: Turns) -> jax.Array:
    """Computes when each block was left, put off by its retention: no clock is read when it is evicted."""
    return turns.until


@eviction_policy("tail lru", extra=NAME)
def _spare_ends_first(blocks: BlockMetadata, turns: Turns) -> jax.Array:
    """Computes 0 for blocks whose loss makes no turn late, else 1."""
    return (~turns.is_spare).astype(jnp.int32)
