"""The counters of a cache: events since `init`."""

import enum

import jax
import jax.numpy as jnp
import numpy as np


class Counter(enum.IntEnum):
    """Index into `Control.counters`."""

    ALLOCATIONS = 0
    """Rows started by `allocate`."""
    FORKS = 1
    """Rows started by `fork`."""
    FREES = 2
    """Rows ended by `free`."""
    COPIES = 3
    """Blocks copied because a row wrote into a block that others hold too, or that is published."""
    EVICTIONS = 4
    """Cached blocks whose contents were given up, of the indexed layer group alone."""
    ADOPTIONS = 5
    """Blocks given back by `commit` because their contents were already published."""
    REQUEST_QUERIES = 6
    """Rows for which `allocate` looked for a cached prefix."""
    REQUEST_HITS = 7
    """Those that found one."""
    BLOCK_QUERIES = 8
    """Full blocks of their prompts."""
    BLOCK_HITS = 9
    """Those that were reused."""
    TOKEN_QUERIES = 10
    """Tokens of their prompts."""
    TOKEN_HITS = 11
    """Those in reused blocks."""
    TOKENS_WITHOUT_STATE = 12
    """Tokens of prompts whose keys are cached and not the states of recurrent layers."""


def count_events(counters: jax.Array, events: dict[Counter, jax.Array]) -> jax.Array:
    """Adds each count of `events` to `counters`, the u32[len(Counter)] of a control state."""
    order = np.arange(len(Counter))
    for counter, num_events in events.items():
        counters += jnp.asarray(num_events).astype(jnp.uint32) * (order == counter).astype(np.uint32)
    return counters
