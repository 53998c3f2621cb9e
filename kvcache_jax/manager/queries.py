"""Read-only methods of a `CacheManager`: all but the hit rate read the cache each time."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np

from kvcache_jax.arrays.number_checks import as_integer
from kvcache_jax.core.arguments import checked_group
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.status import Status
from kvcache_jax.manager import errors, programs
from kvcache_jax.manager.locked_cache import CacheHolder
from kvcache_jax.manager.requests import Metrics, Request, RequestRows


class Queries:
    """The methods of `CacheManager` that change nothing."""

    _config: CacheConfig
    _holder: CacheHolder
    _rows: RequestRows
    _figures: Metrics

    def request_ids(self) -> list[Hashable]:
        """Lists all requests, in the order in which they started."""
        with self._holder.turn("request_ids"):
            return list(self._rows)

    def request(self, request_id: Hashable) -> Request:
        """Describes a request's row in the cache. Raises `UnknownRequest`, `OutOfSync`."""
        with self._holder.turn("request") as cache:
            control = cache.control
            columns = control.context_len, control.num_published, control.priority, control.namespace
            tables = [pool.block_table for pool in control.block_pools]
            seq_id, (columns, tables) = self._read(request_id, (columns, tables))
            length, num_published, priority, namespace = columns
            return Request(
                request_id=request_id,
                seq_id=seq_id,
                context_len=int(length[seq_id]),
                num_blocks=tuple(
                    int((table[seq_id] < pool.num_blocks).sum())
                    for table, pool in zip(tables, control.block_pools, strict=True)
                ),
                num_published=int(num_published[seq_id]),
                priority=int(priority[seq_id]),
                namespace=tuple(namespace[seq_id].tolist()),
            )

    def num_computed_tokens(self, request_id: Hashable) -> int:
        """Counts the tokens that a request holds. Raises `UnknownRequest`, `OutOfSync`.

        Tokens found cached and tokens appended count alike.
        """
        with self._holder.turn("num_computed_tokens") as cache:
            seq_id, lengths = self._read(request_id, cache.context_len)
            return int(lengths[seq_id])

    def block_table(self, request_id: Hashable, *, group: int = 0) -> np.ndarray:
        """Lists the blocks of a request by column, i32[n]; `num_blocks` where a window has a hole.

        Raises:
          UnknownRequest, OutOfSync: no such request, or no longer.
        """
        group = checked_group(self._config, group)
        with self._holder.turn("block_table") as cache:
            pool = cache.control.block_pools[group]
            seq_id, table = self._read(request_id, pool.block_table)
            entries = table[seq_id]
            held = np.flatnonzero(entries < pool.num_blocks)
            return entries[: held[-1] + 1 if len(held) else 0].copy()

    def slot_for(self, request_id: Hashable, position: int, *, group: int = 0) -> int:
        """Returns the slot, `block_id * block_size + offset`, of a token that the request holds.

        Raises:
          UnknownRequest, OutOfSync: no such request, or no longer.
          IndexError: it holds no such token, a window has released it, or the group has no block for it, as
            for a state that is kept once its block is full.
        """
        position, group = as_integer("position", position), checked_group(self._config, group)
        with self._holder.turn("slot_for"):
            length = self.num_computed_tokens(request_id)
            if not 0 <= position < length:
                raise IndexError(f"position is {position}, expected 0 <= position < {length} tokens")
            layer_group = self._config.groups[group]
            column, offset = divmod(position, layer_group.block_size)
            table = self.block_table(request_id, group=group)
            if column >= len(table):  # states have blocks for what the next tokens read alone
                raise IndexError(
                    f"position {position} of request {request_id!r} is in no block of group {group}, "
                    f"{layer_group.kind.label}"
                )
            block_id = int(table[column])
            if block_id == layer_group.num_blocks:
                raise IndexError(f"position {position} of request {request_id!r} has left the window")
            return block_id * layer_group.block_size + offset

    def usage(self) -> float:
        """Returns referenced / total blocks of the fullest group, 0 to 1; cached blocks count as room."""
        with self._holder.turn("usage") as cache:
            return float(self._holder.fetch(programs.figures(programs.without_pools(cache)))[1])

    def hit_rate(self) -> float | None:
        """Returns cached / prompt tokens of the last 1,000 requests that looked; None before the first."""
        with self._holder.turn("hit_rate"):
            return self._figures.hit_rate()

    def stats(self) -> dict[str, int | float | None]:
        """Returns the figures of `Stats` by name as Python numbers; events are counted beyond 2**32.

        Also `num_requests`, `usage` and `hit_rate` (None before the first query). Ready to be exported.
        """
        with self._holder.turn("stats") as cache:
            figures, usage = self._holder.fetch(programs.figures(programs.without_pools(cache)))
            counts = self._figures.count(self._holder.fetch(cache.control.counters))
            result: dict[str, int | float | None] = {
                field.name: getattr(figures, field.name).item() for field in dataclasses.fields(figures)
            }
            result |= {f"num_{counter.name.lower()}": count for counter, count in counts.items()}
            return result | {
                "num_requests": len(self._rows),
                "usage": float(usage),
                "hit_rate": self._figures.hit_rate(),
            }

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._rows

    def __repr__(self) -> str:
        return f"CacheManager({len(self._rows)} requests; {self._holder.describe()})"

    def _read(self, request_id: Hashable, values: Any) -> tuple[int, Any]:
        """Finds the row of a request that is active, and fetches `values` of the cache."""
        seq_id, cache = self._rows.row(request_id), self._holder.cache
        assert cache is not None
        is_active, values = self._holder.fetch((cache.is_active, values))
        if not is_active[seq_id]:
            raise errors.out_of_sync(request_id, Status.SEQ_NOT_ACTIVE)
        return seq_id, values
