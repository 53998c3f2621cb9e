"""The outbox: events on the device, written down until the host reads them.

An entry is a row of i32: slot, uid, token, bits of its log-probability, `Finish`; then the most probable
tokens, then the bits of theirs. A token is -1 where a request ends without one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, rank_true, set_at
from kvcache_jax.engine.state import EngineState

NUM_COLUMNS = 5
NO_TOKEN = -1


def outbox_width(num_top_logprobs: int) -> int:
    """Computes the length of an entry."""
    return NUM_COLUMNS + 2 * num_top_logprobs


def bits_of(values: jax.Array) -> jax.Array:
    """Takes floats as i32, bit by bit."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def note(
    state: EngineState,
    mask: jax.Array,
    slots: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    finish: jax.Array,
    tops: tuple[jax.Array, jax.Array] | None = None,
) -> EngineState:
    """Appends the masked entries, all i32[n] or f32[n], in their order; `tops` i32[n, K] and f32[n, K].

    The caller has seen to it that there is room.
    """
    uid = get_at(state.requests.uid, slots, -1)
    columns = [slots, uid, tokens, bits_of(logprobs), finish]
    entries = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    width = state.outbox.shape[1]
    if tops is not None:
        entries = jnp.concatenate([entries, tops[0].astype(jnp.int32), bits_of(tops[1])], axis=1)
    entries = jnp.pad(entries, ((0, 0), (0, width - entries.shape[1])))
    rank, num = rank_true(mask)
    place = jnp.where(mask, state.outbox_len + rank, state.outbox.shape[0])
    outbox = set_at(state.outbox, place, entries)
    return dataclasses.replace(state, outbox=outbox, outbox_len=state.outbox_len + num)
