"""Replicas of one model: what each holds of a prompt, and the choice among them."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.processes.index_events import (
    BlockRemoved,
    BlockStored,
    IndexEvent,
    hash_block,
    require_events,
)


def prompt_hashes(
    tokens: Sequence[int] | np.ndarray, block_size: int, *, namespace: ArrayLike | None = None
) -> tuple[int, ...]:
    """Computes the hashes that events give to the full blocks of a prompt.

    Args:
      tokens: i32[n], of the prompt.
      block_size: Tokens per block, as the replicas' caches have it.
      namespace: u32[4]. Default: 0.

    Returns:
      One hash per full block, each of all tokens up to the block's end.

    Raises:
      ValueError, TypeError: the tokens are no list of ids, or the block size is below 1.

    Example:
      >>> import kvcache_jax as kv
      >>> short, long = (kv.processes.prompt_hashes([5, 6, 7, 8, *end], 2) for end in ([], [9, 9, 9]))
      >>> len(short), len(long), long[:2] == short
      (2, 3, True)
    """
    block_size = static_count("block_size", block_size)
    words = np.asarray(arguments.namespace_words(namespace, 1))[0]
    ids = token_arguments.host_tokens("tokens", tokens)
    hashes: list[int] = []
    for end in range(block_size, len(ids) + 1, block_size):
        hashes.append(hash_block(words, ids[end - block_size : end], hashes[-1] if hashes else None))
    return tuple(hashes)


class ReplicaIndex:
    """The blocks that prompts find in one replica, as its events tell.

    Example:
      >>> import kvcache_jax as kv
      >>> hashes = kv.processes.prompt_hashes([5, 6, 7, 8], 2)
      >>> index = kv.processes.ReplicaIndex()
      >>> index.apply([kv.processes.BlockStored(hashes[:1], None, (5, 6), 2, "GPU", "")])
      >>> index.num_blocks(hashes)
      1
    """

    def __init__(self):
        self._held: set[tuple[int, str]] = set()

    def apply(self, events: Iterable[IndexEvent]) -> None:
        """Follows events, in their order.

        Raises:
          TypeError: no events; then the index is as before.
        """
        for event in require_events(events):
            match event:
                case BlockStored():
                    self._held.update((each, event.medium) for each in event.block_hashes)
                case BlockRemoved():
                    self._held.difference_update((each, event.medium) for each in event.block_hashes)
                case _:
                    self._held.clear()

    @property
    def hashes(self) -> frozenset[int]:
        """Lists the hashes of all blocks, wherever they are."""
        return frozenset(each for each, _ in self._held)

    def num_blocks(self, hashes: Sequence[int]) -> int:
        """Counts the blocks of a prompt that are there, up to the first that is not.

        Args:
          hashes: From `prompt_hashes`.
        """
        absent = (i for i, each in enumerate(hashes) if not {(each, "GPU"), (each, "CPU")} & self._held)
        return next(absent, len(hashes))


class Replica(NamedTuple):
    """A replica, as a router knows it when a prompt comes.

    Attributes:
      num_cached: Tokens at the prompt's beginning that it holds.
      num_queued: Tokens that it has yet to compute of prompts that it was sent before.
      num_running: Tokens in the rows that it decodes.
    """

    num_cached: int
    num_queued: int
    num_running: int


def choose_replica(
    replicas: Sequence[Replica], num_tokens: int, policy: str = "cost", *, turn: int = 0
) -> int:
    """Chooses the replica that a prompt is sent to; equal arguments give the same one.

    * "random": by a digest of `turn`.
    * "round robin": one after the other.
    * "least loaded": with the fewest tokens queued and running.
    * "longest prefix": which holds most of the prompt; of equals the least loaded.
    * "cost": with the fewest tokens to compute until the prompt is, its own and those queued before it; of
      equals the one with the fewest running.

    Replicas that are equal in this take turns.

    Args:
      replicas: What is known of each.
      num_tokens: Of the prompt.
      policy: One of the above.
      turn: Prompts that were sent before.

    Returns:
      The index of the replica.

    Raises:
      ValueError, TypeError: no replicas, another policy, a number below 0, or more tokens of the prompt held
        than it has.

    Example:
      >>> import kvcache_jax as kv
      >>> holds, idle = kv.processes.Replica(96, 40, 200), kv.processes.Replica(0, 0, 0)
      >>> [kv.processes.choose_replica([holds, idle], 100, policy) for policy in ("cost", "least loaded")]
      [0, 1]
    """
    num_tokens, turn = static_count("num_tokens", num_tokens, 0), static_count("turn", turn, 0)
    if not isinstance(replicas, Sequence):
        raise TypeError(f"replicas is {replicas!r}, expected a list of Replica")
    if not replicas:
        raise ValueError("got no replicas, expected at least one")
    known = []
    for i, replica in enumerate(replicas):
        if not isinstance(replica, Replica):
            raise TypeError(f"replicas[{i}] is {replica!r}, expected a Replica")
        values = {f"replicas[{i}].{name}": value for name, value in replica._asdict().items()}
        known.append(Replica(*(static_count(name, value, 0) for name, value in values.items())))
        static_count(f"replicas[{i}].num_cached", replica.num_cached, 0, num_tokens, "num_tokens")
    keys = [_keys(replica, num_tokens) for replica in known]
    names = "random", *keys[0]
    if not (isinstance(policy, str) and policy in names):
        raise ValueError(f"policy is {policy!r}, expected one of {', '.join(names)}")
    if policy == "random":
        return int.from_bytes(hashlib.blake2b(b"%d" % turn, digest_size=8).digest()) % len(known)
    # Without turns all that no replica holds would go to the first while all are idle.
    return min(range(len(known)), key=lambda i: (keys[i][policy], (i - turn) % len(known)))


def _keys(replica: Replica, num_tokens: int) -> dict[str, tuple[int, ...]]:
    """Computes by policy what the replica with the least is chosen by."""
    load = replica.num_queued + replica.num_running
    return {
        "round robin": (),
        "least loaded": (load,),
        "longest prefix": (-replica.num_cached, load),
        "cost": (num_tokens - replica.num_cached + replica.num_queued, replica.num_running),
    }
