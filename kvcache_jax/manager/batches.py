"""Records of the batches that `CacheManager` handed out, to refuse those that may no longer be run.

A batch has the slots that its requests had when it was made. Once another request has such a slot, a step
with this batch would overwrite the other one's tokens.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvcache_jax.core.state import Cache, Step
from kvcache_jax.manager import errors
from kvcache_jax.manager.requests import Batch


@dataclasses.dataclass
class _Handed:
    """A batch that a caller may still hold."""

    status: weakref.ref  # of its step, by which it is known
    request_ids: tuple[Hashable, ...]  # the requests of its rows, in order
    # Length of each request with the batch; requests that got no token by it are left out.
    ends: dict[Hashable, int]
    # A request that has ended since, or gave some of these tokens up, if there is one.
    lost_by: tuple[Hashable, ...] = ()
    may_have_moved: bool = False  # its requests may have other blocks by now


# The `status` of every batch of every manager that a caller still holds, by its id.
_of_any_manager: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


class Batches:
    """The batches that one manager handed out."""

    def __init__(self):
        self._handed: dict[int, _Handed] = {}

    def hand_out(self, batch: Batch, new: Mapping[Hashable, int], ends: Sequence[int]) -> None:
        """Records a batch that brings each request so many `new` tokens, and to `ends` of them."""
        for request_id, end in zip(new, ends, strict=False):
            self.lose(request_id, end - new[request_id])  # a step may have taken some back
        self.move(new)
        with_tokens = {name: end for name, end in zip(new, ends, strict=False) if new[name]}
        status = batch.step.status
        self._handed[id(status)] = _Handed(weakref.ref(status), tuple(new), with_tokens)
        _of_any_manager[id(status)] = status

    def lose(self, request_id: Hashable, length: int = 0) -> None:
        """Records that the request lost its tokens after the first `length`."""
        for each in self._held():
            if each.ends.get(request_id, 0) > length:
                each.lost_by = (request_id,)

    def move(self, request_ids: Iterable[Hashable]) -> None:
        """Records that the requests may have released blocks, or exchanged them."""
        for each in self._held():
            each.may_have_moved |= not each.ends.keys().isdisjoint(request_ids)

    def clear(self) -> None:
        """Forgets all batches."""
        self._handed.clear()

    def check(self, args: Any, cache: Cache, fetch: Callable[[Any], Any]) -> None:
        """Raises `StaleBatch` if a batch in the arguments of a step may not write here, or no longer.

        A batch is known by its arrays: copies of a batch that was handed out are not found.
        """
        for step in jax.tree.leaves(args, is_leaf=lambda node: isinstance(node, Step)):
            handed = self._handed.get(id(step.status)) if isinstance(step, Step) else None
            if handed is None or handed.status() is not step.status:
                if isinstance(step, Step) and _of_any_manager.get(id(step.status)) is step.status:
                    raise errors.foreign_batch()
                continue
            for request_id in handed.lost_by:
                raise errors.stale_batch(request_id)
            if handed.may_have_moved:
                has_moved = _has_moved(step, cache, fetch)
                for request_id, is_stale in zip(handed.request_ids, has_moved, strict=False):
                    if is_stale:
                        raise errors.stale_batch(request_id)

    def _held(self) -> Iterable[_Handed]:
        """Lists the batches that a caller still has."""
        self._handed = {key: each for key, each in self._handed.items() if each.status() is not None}
        return self._handed.values()


def _has_moved(step: Step, cache: Cache, fetch: Callable[[Any], Any]) -> np.ndarray:
    """Masks the rows whose tokens are elsewhere than where the padded step would write them, bool[n]."""
    pools = cache.control.block_pools
    tables = [pool.block_table for pool in pools]
    tables, slots, positions, seq_ids = fetch((tables, step.slots, step.cache_positions, step.seq_ids))
    rows = np.minimum(seq_ids, cache.max_seqs - 1)[:, None]
    has_moved = np.zeros(len(rows), bool)
    for group, pool, table, written in zip(cache.config.groups, pools, tables, slots, strict=True):
        columns, offsets = np.divmod(positions, group.block_size)
        held = table[rows, np.minimum(columns, table.shape[1] - 1)] * group.block_size + offsets
        is_token = written < pool.num_blocks * group.block_size
        has_moved |= (is_token & (written != held)).any(axis=1)
    return has_moved
