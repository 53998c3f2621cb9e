"""Outcomes of an operation per row, the first that applies, and the error that a host makes of them."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.backends import computed_once


class Status(enum.IntEnum):
    """Outcome of one row of an operation; a row whose status is not `OK` is exactly as it was."""

    OK = 0
    """Done (or nothing was asked of the row)."""
    SKIPPED = 1
    """`seq_id == max_seqs`: the caller left this place empty. Of a call for all rows: the row is idle."""
    OUT_OF_BLOCKS = 2
    """Some layer group has too few blocks that are free or can be evicted."""
    TOO_LONG = 3
    """More tokens than `max_seq_len` (or `max_source_len`), than the call has room for, or (truncate) than
    the row holds."""
    SEQ_IN_USE = 4
    """The row to start is active; free it first."""
    SEQ_NOT_ACTIVE = 5
    """The row holds no sequence; allocate or fork into it first."""
    BAD_SEQ_ID = 6
    """Outside `[0, max_seqs]`."""
    DUPLICATE_SEQ_ID = 7
    """An earlier entry of the call, which may have failed, names the row as the one to change. Entries name
    none if one of their ids is `max_seqs` or out of range, or if they ask `extend` for 0 tokens."""
    BAD_LENGTH = 8
    """A negative number of tokens, or (allocate, prefix caching) more than `tokens` has."""
    WINDOW_LOST = 9
    """Keys that a sliding window needs at the shorter length may have been given back; see `max_rollback`."""
    NO_PARENT = 10
    """The block before an imported one is neither published nor imported before it."""
    INDEX_FULL = 11
    """The prefix index has no place for an imported block, or another block has its hash."""
    HAS_SOURCE = 12
    """The row has a source, which is written once; free the row first."""
    BAD_CHUNK_ID = 13
    """No chunk is stored there, or not in the row's namespace."""
    OUT_OF_CHUNKS = 14
    """All places for chunks are taken; free some first."""


def first_failure(*checks: tuple[jax.Array, Status]) -> jax.Array:
    """Returns the i32 status of the first check whose condition holds, else OK."""
    status = jnp.asarray(Status.OK, jnp.int32)
    for condition, failure in reversed(checks):
        status = jnp.where(condition, jnp.int32(failure), status)
    return computed_once(status)


class StatusError(RuntimeError):
    """Failure of some rows of an operation; `statuses` holds all rows' outcomes."""

    def __init__(self, statuses: np.ndarray, operation: str):
        failures = [
            f"row {place[0] if len(place) == 1 else place}: {Status(int(status)).name}"
            for place, status in np.ndenumerate(statuses)
            if status not in (Status.OK, Status.SKIPPED)
        ]
        super().__init__(
            f"{operation} failed for {len(failures)} of {statuses.size} rows ({'; '.join(failures)})"
        )
        self.statuses, self._operation = statuses, operation

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it was made of: a process of a pool hands it over."""
        return StatusError, (self.statuses, self._operation)


@explicit_transfers
def raise_for_status(status: ArrayLike, operation: str = "the operation") -> None:
    """Raises `StatusError` unless every row is `OK` or `SKIPPED`. Host side: waits for the device.

    Args:
      status: i32[n], as returned by an operation, or i32[..., n] by one under `vmap`.
      operation: Its name, for the message.

    Raises:
      StatusError: names each failed row and its status.
      ValueError, TypeError: `status` holds something else.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.raise_for_status([kv.Status.OK, kv.Status.SKIPPED], "fork")
    """
    try:
        statuses = np.atleast_1d(np.asarray(status))
    except (TypeError, ValueError) as error:  # rows of several lengths, and keys of jax.random
        raise TypeError(f"status is no array ({error}), expected what an operation returned") from None
    if not np.issubdtype(statuses.dtype, np.integer):
        raise TypeError(
            f"status is a {type(status).__name__}, expected the integers that an operation returned, such as "
            "step.status or admission.status"
        )
    if not np.isin(statuses, list(Status)).all():
        raise ValueError(f"status holds {statuses.tolist()}, expected members of kvcache_jax.Status")
    if not np.isin(statuses, (Status.OK, Status.SKIPPED)).all():
        raise StatusError(statuses, operation)
