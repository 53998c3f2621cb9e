"""A replica that computes nothing: its index, its queue and its clock, which goes by bytes and FLOPs."""

import collections
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.serve.simulate import MOST_PROMPT_TOKENS, Machine, ModelSizes
from kvcache_jax.processes import Replica

MOST_ROWS = 256


class Request(NamedTuple):
    """A prompt as its blocks, tokens that it and its answer have, and the second in which it comes."""

    ids: Sequence[int]
    num_tokens: int
    num_answer: int
    arrival: float


class Index:
    """Blocks of a replica: in use by rows, or left for others, of which the least recently used go first.

    Args:
      num_blocks: Of the pool.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_private = 0
        self._num_users: dict[int, int] = {}
        self._unused: collections.OrderedDict[int, None] = collections.OrderedDict()

    def num_hits(self, ids: Sequence[int]) -> int:
        """Counts the blocks of a prompt that are there."""
        absent = (i for i, each in enumerate(ids) if each not in self._num_users and each not in self._unused)
        return next(absent, len(ids))

    def take(self, ids: Sequence[int], num_blocks: int) -> int | None:
        """Takes a row's blocks, and returns how many of them are hits; None where there is no room."""
        num_hits = self.num_hits(ids)
        num_taken = sum(each in self._unused for each in ids[:num_hits])
        num_new = num_blocks - num_hits
        if self._num_private + len(self._num_users) + num_taken + num_new > self.num_blocks:
            return None
        self._use(ids[:num_hits])
        self._num_private += num_new
        while self._num_private + len(self._num_users) + len(self._unused) > self.num_blocks:
            self._unused.popitem(last=False)
        return num_hits

    def publish(self, ids: Sequence[int]) -> None:
        """Makes blocks that a row has filled known; of a block that others have, one copy stays."""
        self._num_private -= len(ids)
        self._use(ids)

    def release(self, ids: Sequence[int], num_private: int) -> None:
        """Gives a row's blocks back; those at the beginning of its prompt were used last."""
        self._num_private -= num_private
        for each in reversed(ids):
            self._num_users[each] -= 1
            if not self._num_users[each]:
                del self._num_users[each]
                self._unused[each] = None

    def _use(self, ids: Sequence[int]) -> None:
        for each in ids:
            self._unused.pop(each, None)
            self._num_users[each] = self._num_users.get(each, 0) + 1


class _Row:
    def __init__(self, request: Request, num_queued: int):
        self.request, self.num_queued, self.num_hits, self.start = request, num_queued, 0, 0


class SimulatedReplica:
    """Serves requests in the order in which they come, prompts in chunks beside the rows that decode.

    Args:
      machine: It runs on.
      model: Its costs.
      block_size: Tokens of a block.
    """

    def __init__(self, machine: Machine, model: ModelSizes, block_size: int):
        self._machine, self._model, self._block_size = machine, model, block_size
        self.index = Index(model.num_blocks(machine, block_size))
        self.clock = 0.0
        self.num_hit_tokens = self.num_requests = self.longest_queue = 0
        self.first_token_s: list[float] = []
        self._waiting: collections.deque[_Row] = collections.deque()
        self._prompts: collections.deque[_Row] = collections.deque()
        self._ends: list[tuple[int, int, _Row]] = []  # of decoding rows: the step in which each ends
        self._num_steps = self._num_queued = self._num_held = 0

    def known(self, request: Request) -> Replica:
        """Tells a router what this replica has to do, and what it has of a prompt."""
        num_cached = self.index.num_hits(request.ids) * self._block_size
        return Replica(num_cached, self._num_queued, self._num_held)

    def push(self, request: Request) -> None:
        """Queues a request that comes now."""
        self.clock = max(self.clock, request.arrival)
        row = _Row(request, request.num_tokens - self.known(request).num_cached)
        self._waiting.append(row)
        self._num_queued += row.num_queued
        self.num_requests += 1
        self.longest_queue = max(self.longest_queue, len(self._waiting) + len(self._prompts))

    def run(self, until: float) -> None:
        """Makes the steps that begin before a second."""
        while self.clock < until and (self._waiting or self._prompts or self._ends):
            self._admit()
            if self._prompts:
                self._compute_prompts()
            else:
                self._decode(until)

    def _admit(self) -> None:
        while self._waiting and len(self._prompts) + len(self._ends) < MOST_ROWS:
            row = self._waiting[0]
            num_hits = self.index.take(row.request.ids, self._num_blocks(row))
            if num_hits is None:
                break
            self._prompts.append(self._waiting.popleft())
            row.num_hits = num_hits
            # The last token of a prompt is always computed.
            row.start = min(num_hits * self._block_size, row.request.num_tokens - 1)
            self._num_queued += row.request.num_tokens - row.start - row.num_queued
            self.num_hit_tokens += row.start
        if not self._prompts and not self._ends:
            raise ValueError(f"a request of {self._num_blocks(self._waiting[0])} blocks does not fit")

    def _num_blocks(self, row: _Row) -> int:
        # The last token of an answer is not written.
        return -(-(row.request.num_tokens + row.request.num_answer - 1) // self._block_size)

    def _compute_prompts(self) -> None:
        """Makes a step: a chunk of prompts, and a token of each row."""
        left, done = MOST_PROMPT_TOKENS, []
        num_new = num_read = num_pairs = 0
        for row in self._prompts:
            num = min(left, row.request.num_tokens - row.start)
            num_pairs += num * (row.start + num // 2)
            row.start, left, num_new = row.start + num, left - num, num_new + num
            num_read += row.start
            if row.start == row.request.num_tokens:
                done.append(row)
            if not left:
                break
        self._num_queued -= num_new
        self._take_steps(1, num_new, num_read, num_pairs)
        for row in done:
            self._prompts.popleft()
            request = row.request
            self.index.publish(request.ids[row.num_hits :])
            self.first_token_s.append(self.clock - request.arrival)
            self._num_held += request.num_tokens
            end = self._num_steps + request.num_answer - 1
            heapq.heappush(self._ends, (end, len(self.first_token_s), row))
        self._release()

    def _decode(self, until: float) -> None:
        """Makes steps until a row ends, or the next request comes."""
        seconds = self._model.step_seconds(self._machine, len(self._ends), self._num_held)
        num = min(self._ends[0][0] - self._num_steps, math.ceil(min((until - self.clock) / seconds, 1e9)))
        self._take_steps(max(num, 1))
        self._release()

    def _take_steps(self, num: int, num_new: int = 0, num_read: int = 0, num_pairs: int = 0) -> None:
        rows = len(self._ends)
        held = self._num_held + rows * num // 2  # in the mean of the steps
        seconds = self._model.step_seconds(
            self._machine, rows + num_new, held + num_read, num_pairs=held + num_pairs
        )
        self.clock += num * seconds
        self._num_steps += num
        self._num_held += rows * num

    def _release(self) -> None:
        while self._ends and self._ends[0][0] <= self._num_steps:
            request = heapq.heappop(self._ends)[2].request
            self._num_held -= request.num_tokens + request.num_answer - 1
            row = _Row(request, 0)
            self.index.release(request.ids, self._num_blocks(row) - len(request.ids))
