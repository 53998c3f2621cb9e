"""The processes that run a loop's programs together."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.transfers import explicit_transfers


class ProcessLost(RuntimeError):  # noqa: N818
    """Says that a process with which this one runs its programs is silent, or failed; names it."""


class Team:
    """The processes that run a loop's programs, each on its own devices of a mesh: here this one alone.

    One of them leads. What its programs start with, the others are told, and run the same programs.

    Attributes:
      remedy: What is expected where the device failed, and a loop's state is lost.
    """

    remedy = "engine.reset(): all requests that have not ended go on"

    @property
    def is_leader(self) -> bool:
        """Tests whether this process decides."""
        return True

    def join(self, obey: Callable[..., None]) -> int:
        """Takes a member, the same in all processes; `obey(order, *args)` does what the leader told it.

        Returns:
          Its number.
        """
        return 0

    def tell(self, member: int, order: str, *args: Any) -> None:
        """Tells a member of all other processes what to do, before this process does it.

        Raises:
          RuntimeError: this process does not lead.
        """

    def require_all(self, call: str) -> None:
        """Refuses a call that all processes have to make, where the leader alone makes it.

        Raises:
          RuntimeError: it does.
        """

    def agree(self, call: str, what: str, marks: Callable[[], Mapping[str, Any]]) -> None:
        """Compares what all processes know under the same names, in a call that each makes.

        Raises:
          ValueError: another process has something else.
        """

    def wait(self, array: jax.Array) -> None:
        """Waits until an array of all processes is there.

        Raises:
          ProcessLost: one of them will not compute its part.
        """

    def explained(self, error: Exception) -> Exception:
        """Finds out whether an error of the device is another process's, and returns one that says so."""
        return error

    def forget_failures(self) -> None:
        """Goes on after errors of other processes, with a state that is made anew."""


ALONE = Team()


@explicit_transfers
def marks_of(params: Any) -> dict[str, int]:
    """Adds up the bits of the shards of arrays that this process has, {where: a number of 32 bits}."""
    marks = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for shard in jnp.asarray(leaf).addressable_shards:
            name = f"{jax.tree_util.keystr(path)} {shard.index}"
            marks[name] = _sum_of_bits(shard.data)
    return {name: int(mark) for name, mark in marks.items()}


@jax.jit
def _sum_of_bits(array: jax.Array) -> jax.Array:
    """Adds up a hash of the bits and the place of each number: u32[]."""
    values = array.reshape(-1)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    places = jnp.arange(values.size, dtype=jnp.uint32)
    mixed = (values.astype(jnp.uint32) ^ (places * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)
