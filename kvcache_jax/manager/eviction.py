"""Eviction of cached blocks and preemption of whole requests, by a `CacheManager`."""

import functools
from collections.abc import Callable, Hashable

import numpy as np

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.manager import programs
from kvcache_jax.manager.batches import Batches
from kvcache_jax.manager.queries import Queries
from kvcache_jax.manager.requests import checked_count
from kvcache_jax.operations.preempt import preempt_to_utilization, select_rows_to_preempt


class Eviction(Queries):
    """The methods of `CacheManager` that give up cached contents, or requests."""

    _batches: Batches

    def evict(self, num_blocks: int) -> int:
        """Gives up cached blocks, the least valuable first; returns how many were evicted."""
        num_blocks = checked_count("num_blocks", num_blocks)
        with self._holder.turn("evict"):
            self._holder.cache, count = self._holder.on_control(programs.evict, np.int32(num_blocks))
            return int(count)

    def select_requests_to_preempt(self, policy: str, n: int) -> list[Hashable]:
        """Selects the requests to preempt first, at most `n`; ends none.

        See `kvcache_jax.select_rows_to_preempt`.

        Raises:
          OutOfSync: A step function started a row that would be one of them.
        """
        with self._holder.turn("select_requests_to_preempt") as cache:
            num_rows = max(1, min(static_count("n", n, least=0), cache.max_seqs))
            rows = select_rows_to_preempt(programs.without_pools(cache), policy, num_rows)
            return self._rows.requests_at(self._holder.fetch(rows)[:n])

    def preempt_to_utilization(
        self, target: float, policy: str | None = None, *, operation: Callable = preempt_to_utilization
    ) -> list[Hashable]:
        """Takes blocks back from requests until `usage` is at most `target`.

        Args:
          target: Share of referenced blocks, 0 to 1.
          policy: The order of the requests. Default: the operation's.
          operation: `(cache, target, policy=...) -> (cache, rows)`, on the control state alone. Default:
            `kvcache_jax.preempt_to_utilization`, which ends requests; others may continue them.

        Returns:
          The requests that gave blocks back, in that order; those that were ended are no longer known, and
          their published blocks stay cached.

        Raises:
          OutOfSync: A step function started a row that would be among them; changed nothing.
          ValueError, TypeError: As the operation's.
        """
        options = {} if policy is None else {"policy": policy}
        with self._holder.turn("preempt_to_utilization"):
            cache, rows = self._holder.on_control(functools.partial(operation, target=target, **options))
            preempted = self._rows.requests_at(rows)
            is_active = self._holder.fetch(cache.is_active)
            self._holder.cache = cache
            for request_id, row in zip(preempted, rows.tolist(), strict=False):  # rows end with nowhere
                if not is_active[row]:
                    self._end(request_id)
            return preempted

    def reset_prefix_cache(self) -> int:
        """Forgets all published contents; returns how many blocks of all layer groups they had.

        When the weights change, end all requests first: their keys were computed with the old ones.
        """
        with self._holder.turn("reset_prefix_cache"):
            self._holder.cache, count = self._holder.on_control(programs.reset_prefix_cache)
            return int(count)

    def _end(self, request_id: Hashable) -> None:
        """Ends a request whose row is idle: neither its row nor its batches are known any more."""
        self._batches.lose(request_id)
        self._rows.end(request_id)
