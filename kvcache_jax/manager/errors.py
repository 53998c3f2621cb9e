"""Errors of `CacheManager`: one class per reason, all of them `CacheError`."""

from collections.abc import Hashable, Sequence

import numpy as np

from kvcache_jax.core.status import Status


class CacheError(RuntimeError):
    """Failure of a call of `CacheManager` that changed nothing.

    Attributes:
      request_id: The request concerned, or None.
      needed: Amount that the call asked for, in the unit that the subclass names; None if there is no such.
      available: Amount that there is.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: Hashable = None,
        needed: int | None = None,
        available: int | None = None,
    ):
        super().__init__(message)
        self.request_id, self.needed, self.available = request_id, needed, available


class OutOfBlocks(CacheError):
    """Shortage of blocks: `needed` and `available` are blocks of the layer group that lacks them."""


class OutOfRows(CacheError):
    """Shortage of rows: `needed` is 1 and `available` 0; see `CacheConfig.max_seqs`."""


class TooLong(CacheError):
    """Excess of tokens over the limit of a row or a call: `needed` and `available` are tokens."""


class UnknownRequest(CacheError):
    """An id that no request has."""


class DuplicateRequest(CacheError):
    """An id that a request has already; free that one, or pass `replace=True`."""


class WindowLost(CacheError):
    """Loss of keys that a sliding window would need at the shorter length; see `max_rollback`."""


class OutOfSync(CacheError):
    """A row that is not as the manager left it: a step function must neither start nor end rows.

    A request whose row was ended can only be freed or replaced.
    """


class StaleBatch(CacheError):
    """A batch that may no longer write.

    One of its requests ended, was truncated or moved, or another manager made it.
    """


class ManagerBusy(CacheError):
    """A call of the manager by a step function that it is running."""


class ManagerClosed(CacheError):
    """A call of a closed manager."""


class CacheLost(CacheError):
    """Loss of the cache: a step failed on the device after it was given the cache, or it was donated.

    The one error after which the manager is not as it was: it starts over, empty and ready. `__cause__` is
    the failure.

    Attributes:
      request_ids: The requests that were lost and can be allocated again.
    """

    def __init__(self, message: str, request_ids: Sequence[Hashable]):
        super().__init__(message)
        self.request_ids = list(request_ids)


def unknown(request_id: Hashable, num_requests: int) -> UnknownRequest:
    """Makes the error for an id that no request has."""
    return UnknownRequest(
        f"there is no request {request_id!r}, expected one of the {num_requests} of request_ids()",
        request_id=request_id,
    )


def duplicate(request_id: Hashable) -> DuplicateRequest:
    """Makes the error for a new id that is taken."""
    return DuplicateRequest(
        f"request {request_id!r} exists, expected a new id: free it first, or allocate it with replace=True",
        request_id=request_id,
    )


def out_of_rows(request_id: Hashable, max_seqs: int) -> OutOfRows:
    """Makes the error for a request without a row."""
    return OutOfRows(
        f"request {request_id!r} finds all max_seqs = {max_seqs} rows taken, expected an idle one: "
        "free a request",
        request_id=request_id,
        needed=1,
        available=0,
    )


def out_of_blocks(request_id: Hashable, needed: np.ndarray, available: np.ndarray) -> OutOfBlocks:
    """Names the layer group that lacks most; `needed` and `available` are i32[groups]."""
    group = int(np.argmax(needed - available))
    return OutOfBlocks(
        f"request {request_id!r} finds too few blocks of layer group {group}: the call needs "
        f"{needed[group]}, and {available[group]} are free or can be evicted: free a request, or raise "
        "num_blocks",
        request_id=request_id,
        needed=int(needed[group]),
        available=int(available[group]),
    )


def too_long(request_id: Hashable, num_tokens: int, max_seq_len: int) -> TooLong:
    """Makes the error for more tokens than a row may hold."""
    return TooLong(
        f"request {request_id!r} would have {num_tokens} tokens, expected at most max_seq_len = "
        f"{max_seq_len}",
        request_id=request_id,
        needed=num_tokens,
        available=max_seq_len,
    )


def too_many_at_once(request_id: Hashable, num_tokens: int, width: int) -> TooLong:
    """Makes the error for more tokens than one call may append."""
    return TooLong(
        f"request {request_id!r} got {num_tokens} tokens in one call, expected at most {width}, the "
        "largest of the manager's widths: append them in pieces",
        request_id=request_id,
        needed=num_tokens,
        available=width,
    )


def longer_than(request_id: Hashable, new_len: int, length: int) -> TooLong:
    """Makes the error for a truncation to more tokens than there are."""
    return TooLong(
        f"request {request_id!r} has {length} tokens, expected to keep at most as many, got {new_len}",
        request_id=request_id,
        needed=new_len,
        available=length,
    )


def window_lost(request_id: Hashable, new_len: int) -> WindowLost:
    """Makes the error for a truncation that goes back too far."""
    return WindowLost(
        f"request {request_id!r} cannot go back to {new_len} tokens, its window has moved on: "
        "raise max_rollback",
        request_id=request_id,
    )


def out_of_sync(request_id: Hashable, status: Status) -> OutOfSync:
    """Makes the error for a row that another caller started or ended."""
    return OutOfSync(
        f"the row of request {request_id!r} is not as the manager left it ({status.name}): rows start and "
        "end through the manager, not in a step function; free_request ends a request whose row is idle",
        request_id=request_id,
    )


def stale_batch(request_id: Hashable) -> StaleBatch:
    """Makes the error for a batch that may no longer write."""
    return StaleBatch(
        f"the batch is stale: request {request_id!r} has ended, was truncated or has moved to other blocks "
        "since it was made, expected batches to be run before that: append what is missing again",
        request_id=request_id,
    )


def foreign_batch() -> StaleBatch:
    """Makes the error for a batch of another manager."""
    return StaleBatch(
        "the batch was made by another manager, expected one of this manager's append_tokens: its slots "
        "belong to other requests here",
        request_id=None,
    )


def foreign_row(row: int) -> OutOfSync:
    """Makes the error for a row that another caller started."""
    return OutOfSync(
        f"row {row} is active and no request has it, expected rows to start and end through the manager: a "
        "step function that started it can free it",
        request_id=None,
    )
