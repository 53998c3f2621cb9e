"""Traces of requests: which prompts began alike, in the format that Mooncake published.

One JSON object per line and request, of which two entries are read:
  hash_ids      one id per prefix block of the prompt; equal ids mean equal tokens up to the block's end (an
                id that comes after others elsewhere counts as another one there)
  input_length  tokens of the prompt; all blocks but the last are full
Two such files, conversation_trace.jsonl and synthetic_trace.jsonl, are in the folder FAST25-release/traces of
github.com/kvcache-ai/Mooncake (Apache-2.0).
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from experiments.common.command import InputError, integer

SOURCE = "take conversation_trace.jsonl from FAST25-release/traces of github.com/kvcache-ai/Mooncake"


class Trace(NamedTuple):
    """Requests in the order of their arrival.

    Attributes:
      ids: i32[num_requests, longest], ids counted from 1, 0 after a request's last one.
      num_ids: i32[num_requests], ids of each request.
      num_tokens: i64[num_requests], tokens of each prompt.
      tokens_per_id: Tokens that an id stands for, unless it is a request's last.
    """

    ids: np.ndarray
    num_ids: np.ndarray
    num_tokens: np.ndarray
    tokens_per_id: int

    @property
    def num_distinct(self) -> int:
        """Different ids: a cache of as many blocks never evicts."""
        return int(self.ids.max())

    def num_hit_tokens(self, num_hits: np.ndarray) -> np.ndarray:
        """i64[num_requests], tokens in the first `num_hits` ids of each request."""
        return np.minimum(num_hits * np.int64(self.tokens_per_id), self.num_tokens)


def add_trace_options(parser: argparse.ArgumentParser, *, is_required: bool = True, **options: Any) -> None:
    """Adds --trace, with options of argparse, and --tokens-per-id."""
    add, text = parser.add_argument, "requests, see experiments/traces/trace.py"
    add("--trace", type=Path, required=is_required, metavar="FILE", help=text, **options)
    add("--tokens-per-id", type=integer(1, 2**31 - 1), default=512, metavar="N", help="default: 512")


def read_trace(path: Path, tokens_per_id: int) -> Trace:
    """Reads a file of requests."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"got --trace {path}, which cannot be read ({error}): {SOURCE}") from None
    # Not splitlines(): it also splits at characters that a text in an object may hold.
    lines = text.removesuffix("\n").split("\n") if text else []
    requests = [_parse(f"{path}, line {i}", line, tokens_per_id) for i, line in enumerate(lines, 1)]
    if not requests:
        raise InputError(f"got --trace {path}, which is empty, expected one request per line: {SOURCE}")
    chains, num_tokens = zip(*requests, strict=True)
    num_ids = np.array([len(chain) for chain in chains], np.int32)
    # Counted anew by what comes before them, so that they are valid token ids, whatever they were.
    numbers: dict[tuple[int, int], int] = {}
    ids = np.zeros((len(chains), int(num_ids.max())), np.int32)
    for row, chain in zip(ids, chains, strict=True):
        before = 0
        for i, name in enumerate(chain):
            row[i] = before = numbers.setdefault((before, name), len(numbers) + 1)
    return Trace(ids, num_ids, np.array(num_tokens, np.int64), tokens_per_id)


def full_blocks_only(trace: Trace) -> Trace:
    """The trace without the partly filled blocks at prompts' ends, which no cache of tokens publishes."""
    num_ids = np.minimum(trace.num_ids, trace.num_tokens // trace.tokens_per_id).astype(np.int32)
    is_kept = np.arange(trace.ids.shape[1]) < num_ids[:, None]
    return trace._replace(ids=np.where(is_kept, trace.ids, 0), num_ids=num_ids)


def _parse(where: str, line: str, tokens_per_id: int) -> tuple[list[int], int]:
    """(hash_ids, input_length) of one request."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):  # the first also of an integer of too many digits
        request = None
    if not isinstance(request, dict):
        raise InputError(f"{where} is {line[:40]!r}, expected a JSON object: {SOURCE}")
    ids, length = request.get("hash_ids"), request.get("input_length")
    if not isinstance(ids, list) or not ids or not _is_integer(length, 1):
        raise InputError(
            f"{where} has hash_ids {_shown(ids)} and input_length {_shown(length)}, "
            "expected a list of integers that is not empty, and an integer from 1 to 2**63 - 1"
        )
    wrong = next((i for i, name in enumerate(ids) if not _is_integer(name, 0)), None)
    if wrong is not None:
        raise InputError(
            f"{where} has {_shown(ids[wrong])} as hash_ids[{wrong}], expected an integer from 0 to 2**63 - 1"
        )
    num_blocks = -(-length // tokens_per_id)
    if num_blocks != len(ids):
        raise InputError(
            f"{where} has {len(ids)} hash_ids for {length} tokens, expected {num_blocks}: "
            f"--tokens-per-id says that an id stands for {tokens_per_id}"
        )
    return ids, length


def _is_integer(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
