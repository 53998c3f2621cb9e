"""The records of `CacheManager` beside the cache: the row of each request, and the latest hit figures."""

import collections
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from kvcache_jax.core.counter import Counter
from kvcache_jax.manager import errors

_REQUESTS_OF_HIT_RATE = 1000


def hashable[T](request_id: T) -> T:
    """Refuses what cannot be an id."""
    try:
        hash(request_id)
    except TypeError as error:
        raise TypeError(
            f"request_id is {request_id!r} ({error}), expected an id that can be hashed, such as a string"
        ) from None
    if request_id != request_id:
        raise ValueError(
            f"request_id is {request_id!r}, which does not equal itself and could not be found again, "
            "expected an id that does, such as a string"
        )
    return request_id


class RequestRows:
    """The row of each request, in the order in which they started."""

    def __init__(self, max_seqs: int):
        self.max_seqs = max_seqs
        self._rows: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._rows)

    def __contains__(self, request_id: Hashable) -> bool:
        return hashable(request_id) in self._rows

    def row(self, request_id: Hashable) -> int:
        """Finds the row of a request; raises `UnknownRequest`."""
        if request_id not in self:
            raise errors.unknown(request_id, len(self._rows))
        return self._rows[request_id]

    def seq_ids_of(self, request_ids: Sequence[Hashable]) -> np.ndarray:
        """Lists the requests' rows: i32[1], or i32[max_seqs] with skipped rows after several."""
        rows = [self.row(request_id) for request_id in request_ids]
        if len(rows) > 1:
            rows += [self.max_seqs] * (self.max_seqs - len(rows))
        return np.array(rows, np.int32)

    def requests_at(self, rows: np.ndarray) -> list[Hashable]:
        """Lists the requests of rows, in this order; `max_seqs` is skipped."""
        requests = {row: request_id for request_id, row in self._rows.items()}
        rows = rows[rows < self.max_seqs]
        for row in rows.tolist():
            if row not in requests:
                raise errors.nobodys_row(row)
        return [requests[row] for row in rows.tolist()]

    def idle_row(self, request_id: Hashable) -> int:
        """Finds the first row without request."""
        taken = set(self._rows.values())
        for row in range(self.max_seqs):
            if row not in taken:
                return row
        raise errors.out_of_rows(request_id, self.max_seqs)

    def start(self, request_id: Hashable, row: int) -> None:
        """Gives a row to a request; one that is replaced becomes the last in order."""
        self._rows.pop(request_id, None)
        self._rows[request_id] = row

    def end(self, request_id: Hashable) -> None:
        """Takes the row from a request."""
        del self._rows[request_id]

    def clear(self) -> None:
        """Takes the rows from all requests."""
        self._rows.clear()


class Metrics:
    """Hits of the last requests that looked for a cached prefix, and events in integers that do not wrap."""

    def __init__(self):
        self._hits: collections.deque[tuple[int, int]] = collections.deque(maxlen=_REQUESTS_OF_HIT_RATE)
        self._counts = dict.fromkeys(Counter, 0)
        self._last_counters = np.zeros(len(Counter), np.uint32)

    def note_query(self, num_tokens: int, num_cached: int) -> None:
        """Records that a request looked for `num_tokens` and found `num_cached`."""
        self._hits.append((num_tokens, num_cached))

    def hit_rate(self) -> float | None:
        """Returns the hit rate by token; None before the first query."""
        if not self._hits:
            return None
        num_tokens, num_cached = (sum(column) for column in zip(*self._hits, strict=True))
        return num_cached / num_tokens if num_tokens else 0.0

    def count(self, counters: np.ndarray) -> dict[Counter, int]:
        """Counts all events so far, given the cache's counters, u32[len(Counter)]."""
        for counter in Counter:
            self._counts[counter] += (int(counters[counter]) - int(self._last_counters[counter])) % 2**32
        self._last_counters = counters
        return self._counts

    def restart(self) -> None:
        """Restarts the cache's counters at 0; the totals stay."""
        self._last_counters = np.zeros(len(Counter), np.uint32)
