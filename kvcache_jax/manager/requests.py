"""Requests and batches of `CacheManager`, and the checks of its arguments."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvcache_jax.arrays.number_checks import as_integer, static_count, static_flag
from kvcache_jax.core import token_arguments
from kvcache_jax.core.state import Step
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
    priority = as_integer("priority", priority)
    if not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority is {priority}, expected -2**31 <= priority < 2**31")
    is_reused = np.bool_(static_flag("reuse", reuse))
    words = np.zeros(4, np.uint32) if namespace is None else np.asarray(namespace)
    if words.dtype != np.uint32 or words.shape != (4,):
        raise ValueError(f"namespace is {words.dtype}{words.shape}, expected uint32 (4,): see kv.namespace")
    tokens = np.zeros(max_seq_len, np.int32)
    tokens[: len(token_ids)] = token_ids
    spans = token_arguments.item_spans_of_one(items)
    if spans is not None:
        num_more = (1 << (spans.shape[1] - 1).bit_length()) - spans.shape[1]
        spans = np.pad(np.asarray(spans)[0], [(0, num_more), (0, 0)])  # an empty one is none
    length = np.int32(len(token_ids))
    prompt = length, words, np.int32(priority), tokens, is_reused, spans
    return Prompts(*jax.device_put(tuple(None if field is None else field[None] for field in prompt)))


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
