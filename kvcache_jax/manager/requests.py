"""Requests and batches of `CacheManager`, and the checks of its arguments."""

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvcache_jax.arrays.number_checks import static_count, static_flag
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import hashable_id
from kvcache_jax.core.counter import Counter
from kvcache_jax.core.state import Step
from kvcache_jax.manager import errors
from kvcache_jax.operations.allocate import Prompts

TO_THE_END = np.iinfo(np.int32).max


class Batch(NamedTuple):
    """New tokens with reserved slots, for a step function; rows in the order in which they were passed.

    One request makes one row, several make `max_seqs` rows, of which the rows after the last are skipped.

    Attributes:
      tokens: i32[n, T], the new tokens; `T` is one of the manager's widths.
      step: The `Step`, for `attention`. Its `query_len` says how many tokens of each row count.
    """

    tokens: jax.Array
    step: Step


@dataclasses.dataclass(frozen=True)
class Request:
    """A request as the cache holds it.

    Attributes:
      request_id: Its id.
      seq_id: Its row.
      context_len: Tokens that it holds.
      num_blocks: Blocks that it holds in each layer group, reserved ones included.
      num_published: First blocks that can be found by their tokens.
      priority: For eviction policies.
      namespace: Four 32-bit words; requests of the same ones may share blocks.
    """

    request_id: Hashable
    seq_id: int
    context_len: int
    num_blocks: tuple[int, ...]
    num_published: int
    priority: int
    namespace: tuple[int, ...]


def prompt_of(
    token_ids: np.ndarray, max_seq_len: int, namespace: Any, priority: Any, reuse: bool, items: Any
) -> Prompts:
    """Pads the arguments of an admission to one shape; items are padded to a power of two."""
    tokens = np.zeros((1, max_seq_len), np.int32)
    tokens[0, : len(token_ids)] = token_ids
    spans = token_arguments.item_spans_of_one(items)
    if spans is not None:
        num_more = (1 << (spans.shape[1] - 1).bit_length()) - spans.shape[1]
        spans = np.pad(np.asarray(spans), [(0, 0), (0, num_more), (0, 0)])  # an empty one is none
    prompt: Any = (  # as a program takes it
        np.array([len(token_ids)], np.int32),
        arguments.namespace_words(namespace, 1),
        arguments.priorities([priority], 1),
        tokens,
        np.array([static_flag("reuse", reuse)]),
        spans,
    )
    return Prompts(*prompt)


def padded(
    sequences: Sequence[np.ndarray], num_rows: int, widths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths i32[num_rows] and padded tokens i32[num_rows, T], T the least sufficient width."""
    longest = max(len(ids) for ids in sequences)
    num_new = np.zeros(num_rows, np.int32)
    tokens = np.zeros((num_rows, next(width for width in widths if width >= longest)), np.int32)
    for i, ids in enumerate(sequences):
        num_new[i], tokens[i, : len(ids)] = len(ids), ids
    return num_new, tokens


def checked_widths(widths: Sequence[int] | None, limit: int) -> list[int]:
    """Sorts the widths; None is the usual ones up to `limit`."""
    if widths is None:
        widths = [1]
        while widths[-1] < limit:
            widths.append(min(max(16, 4 * widths[-1]), limit))
    if not isinstance(widths, Sequence | np.ndarray):
        raise TypeError(f"widths is {widths!r}, expected a list of integers")
    if not len(widths):
        raise ValueError("widths is empty, expected at least one")
    return sorted(
        {static_count("each of widths", width, most=limit, most_name="max_query_len") for width in widths}
    )


def checked_count(name: str, count: Any) -> int:
    """Converts an integer from 0 on; one beyond 32 bits means all."""
    return min(static_count(name, count, least=0), TO_THE_END)


def checked_final_len(request_id: Hashable, length: Any) -> int:
    """Converts the `final_len` of a commit; None means all tokens."""
    return TO_THE_END if length is None else checked_count(f"final_len of request {request_id!r}", length)


_REQUESTS_OF_HIT_RATE = 1000


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
        return hashable_id("request_id", request_id) in self._rows

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
                raise errors.foreign_row(row)
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
