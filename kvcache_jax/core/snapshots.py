"""Snapshots: the states of recurrent layers, and the windows before them, that a prefix cache keeps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import quotient
from kvcache_jax.arrays.number_checks import static_flag
from kvcache_jax.layers.layer_kind import check_positive_or_none

NUM_MARKS = 2
"""Lengths per row at which a prompt's states are kept: where other prompts parted from it, and its end."""
UNWANTED, TOKENS_SAVED = EVICTIONS = "unwanted", "tokens saved"


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """A choice of the states that a prefix cache keeps of recurrent layers.

    A snapshot is a published point: with it a prompt that begins alike starts at the point's end. A state is
    as large as the keys of hundreds of tokens, so that not every block gets one. Windows beside states follow
    them: the last tokens before each of them stay until they are published, and are evicted by the same rule.

    Attributes:
      at_junctions: Keep the state where the keys that a prompt found end and the states that it found do not
        reach: another prompt parted there, and the next one may part there too.
      at_prompt_end: Keep the last state that a prompt's repetition can start from.
      at_end: Keep the last state of a row that `commit(is_end=)` publishes, from which conversations go on.
      every: Keep the state after each multiple of so many tokens, too, that the step before a `commit`
        passed: a row has room for no more. The engine commits each step; `generate` each call of the model on
        prompts, and an answer at its end.
      max_bytes: Bytes for snapshots beside the states of the rows, where a layer's `num_blocks` does not say
        it. Default: as many as the rows may take.
      eviction: The state to evict first: "unwanted", one that no prompt asked for, such as the end of an
        answer that was not continued, and among equals the one released longest ago; or "tokens saved", the
        one that saves the fewest tokens, from the snapshot before it on, per time since its last release.

    References:
      Marconi (Pan et al.; MLSys 2025), for eviction by what a state saves.
    """

    at_junctions: bool = True
    at_prompt_end: bool = True
    at_end: bool = True
    every: int | None = None
    max_bytes: int | None = None
    eviction: str = UNWANTED

    def __post_init__(self):
        for name in ("at_junctions", "at_prompt_end", "at_end"):
            object.__setattr__(self, name, static_flag(name, getattr(self, name)))
        check_positive_or_none(self, "every", "max_bytes")
        if not isinstance(self.eviction, str) or self.eviction not in EVICTIONS:
            raise ValueError(f"snapshots.eviction is {self.eviction!r}, expected one of {EVICTIONS}")

    def next_wanted(self, length: jax.Array, junction: jax.Array) -> jax.Array:
        """Finds the first length from `length` on whose state others will want; beyond all rows for none."""
        found = jnp.where(junction >= length, junction, jnp.iinfo(jnp.int32).max // 2)
        if self.every:
            found = jnp.minimum(found, quotient(length + self.every - 1, self.every) * self.every)
        return found

    def max_per_step(self, max_query_len: int) -> int:
        """Counts the most lengths at which one step of a row keeps states for others."""
        return NUM_MARKS + (max_query_len // self.every + 1 if self.every else 0)


def check_snapshots(snapshots: Any) -> None:
    """Refuses a value that is no `Snapshots`."""
    if not isinstance(snapshots, Snapshots):
        raise TypeError(f"snapshots is {snapshots!r}, expected kvcache_jax.Snapshots(...)")
