"""Question: what is it worth that a router knows which replica holds a prompt's prefix?

Command: python -m experiments.fleet --trace FILE [--requests N] [--replicas N] [--arrivals F ...] [--json]
  [--picture FILE]
Machine: 2 virtual cores of an AMD EPYC, shared with other work; jax 0.12.0.1
Answer:  with a router that asks for the longest prefix hits are 2.17 times round robin's, and 1.94 times with
  one that asks for the cost (bar 1.5); 99 of 100 first tokens come within 3.9 and 3.4 s, not 5.0. At 3.3
  times the load, which is more than the replicas can do, it is 1.53 and 1.33 times (missed).
Record:  experiments/results/fleet.json, docs/fleet.png.

The first requests of a trace, each at its time times a factor (--arrivals), go to replicas that compute
nothing: a chip each, Llama 3.1 8B, seconds by data sheets as in `experiments.serve --simulate`. The choice is
`kvcache_jax.processes.choose_replica`. The router knows at once what a replica holds. Hits are tokens of
prompts; the queue is of requests without a first token, at one replica.
"""

import argparse
import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common import command, log_axes
from experiments.common.report import add_options, at_least, deliver, figure, framed
from experiments.common.timing import show_records
from experiments.serve.server import percentiles
from experiments.serve.simulate import LLAMA, MACHINES, MOST_PROMPT_TOKENS, Machine, ModelSizes
from experiments.serve.workload import read_answers
from experiments.traces.trace import add_trace_options, full_blocks_only, read_trace
from kvcache_jax.processes import Replica, choose_replica

MOST_ROWS = 256
POLICIES = ("random", "round robin", "least loaded", "longest prefix", "cost")


class Request(NamedTuple):
    """A prompt as its blocks, tokens that it and its answer have, and the second in which it comes."""

    ids: Sequence[int]
    num_tokens: int
    num_answer: int
    arrival: float


class Index:
    """Blocks of a replica: in use by rows, or left for others, of which the least recently used go first."""

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


@dataclasses.dataclass
class _Row:
    request: Request
    num_queued: int
    num_hits: int = 0
    start: int = 0


class SimulatedReplica:
    """Serves requests in the order in which they come, prompts in chunks beside the rows that decode."""

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


COLUMNS = {
    "arrivals": "times {arrivals:g}",
    "policy": "{policy}",
    "hits": "{hit_rate:.1%}",
    "longest queue": "{longest_queue}",
    "first token, median": "{first_token_s[p50]:.2f} s",
    "p99": "{first_token_s[p99]:.2f} s",
    "requests of a replica": "{fewest_requests:,} - {most_requests:,}",
}
MEASURES = {
    "tokens of prompts found, %": lambda record: 100 * record["hit_rate"],
    "longest queue of a replica": lambda record: record["longest_queue"],
    "first token, p99, s": lambda record: record["first_token_s"]["p99"],
}


@framed
def show(report: dict[str, Any]) -> None:
    title = (
        "{num_requests:,} requests of {trace}; {num_replicas} simulated replicas of {model}, each "
        "{chips_per_replica} {chip} with {blocks_per_replica:,} blocks of {tokens_per_block} tokens"
    )
    show_records(title.format(**report), COLUMNS, report["records"], num_text=2)


@figure((9, 3.2), 1, 3, dpi=150, grid="x", sharey=True)
def draw(report: dict[str, Any], *panels: Any) -> None:
    records = report["records"]
    factors = list(dict.fromkeys(record["arrivals"] for record in records))
    for ax, (title, measure) in zip(panels, MEASURES.items(), strict=True):
        for i, factor in enumerate(factors):
            chosen = [record for record in records if record["arrivals"] == factor]
            places = [n + 0.8 * (i + 0.5) / len(factors) - 0.4 for n in range(len(chosen))]
            label = f"arrivals times {factor:g}"
            ax.barh(places, [measure(record) for record in chosen], 0.8 / len(factors), label=label)
            ax.set_yticks(range(len(chosen)), [record["policy"] for record in chosen])
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in panels[1:]:
        ax.set_xscale("log")
        log_axes.label(ax.xaxis)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.fleet", __doc__)
    add_trace_options(parser)
    positive = command.number(0, is_above=True)
    parser.count("--requests", 10_000)
    parser.count("--replicas", 4)
    parser.add_argument(
        "--arrivals", type=positive, nargs="+", default=[1, 0.5, 0.3], metavar="F", help="times the trace's"
    )
    parser.add_argument("--machine", choices=[*MACHINES], default="H200", help="of a replica; default: H200")
    parser.count("--chips", 1, "of a replica")
    add_options(parser)
    options = parser.parse_args(arguments)
    machine = dataclasses.replace(MACHINES[options.machine], num_chips=options.chips)
    with parser.refusing(ValueError):
        records, bars = [], []
        requests = read_requests(options.trace, options.tokens_per_id, options.requests)
        for arrivals in options.arrivals:
            sooner = [request._replace(arrival=request.arrival * arrivals) for request in requests]
            found = {policy: serve(sooner, policy, machine, options) for policy in POLICIES}
            records += [{"arrivals": arrivals, "policy": policy} | each for policy, each in found.items()]
            for policy in ("longest prefix", "cost"):
                ratio = found[policy]["num_hit_tokens"] / max(found["round robin"]["num_hit_tokens"], 1)
                name = f"hits of {policy!r}, in times of round robin's, arrivals times {arrivals:g}"
                bars.append(at_least(name, ratio, 1.5))
    report = {
        "trace": options.trace.name,
        "num_requests": len(requests),
        "num_replicas": options.replicas,
        "chip": options.machine,
        "chips_per_replica": options.chips,
        "blocks_per_replica": LLAMA.num_blocks(machine, options.tokens_per_id),
        "tokens_per_block": options.tokens_per_id,
        "model": LLAMA.name,
        "records": records,
        "bars": bars,
    }
    return deliver(report, options, show, draw)


def read_requests(path: Path, tokens_per_id: int, num: int) -> list[Request]:
    trace, answers = full_blocks_only(read_trace(path, tokens_per_id)), read_answers(path, num)
    return [
        Request(ids[:num_ids].tolist(), int(num_tokens), max(answer.num_tokens, 1), answer.arrival)
        for ids, num_ids, num_tokens, answer in zip(*trace[:3], answers, strict=False)
    ]


def serve(requests: list[Request], policy: str, machine: Machine, options: argparse.Namespace) -> dict:
    replicas = [SimulatedReplica(machine, LLAMA, options.tokens_per_id) for _ in range(options.replicas)]
    for turn, request in enumerate(requests):
        for replica in replicas:
            replica.run(request.arrival)
        known = [replica.known(request) for replica in replicas]
        replicas[choose_replica(known, request.num_tokens, policy, turn=turn)].push(request)
    for replica in replicas:
        replica.run(np.inf)
    seconds = np.concatenate([replica.first_token_s for replica in replicas])
    num_hit_tokens = sum(replica.num_hit_tokens for replica in replicas)
    return {
        "num_hit_tokens": num_hit_tokens,
        "hit_rate": num_hit_tokens / sum(request.num_tokens for request in requests),
        "longest_queue": max(replica.longest_queue for replica in replicas),
        "first_token_s": percentiles(seconds),
        "most_requests": max(replica.num_requests for replica in replicas),
        "fewest_requests": min(replica.num_requests for replica in replicas),
        "served_s": max(replica.clock for replica in replicas),
    }


if __name__ == "__main__":
    command.run(main)
