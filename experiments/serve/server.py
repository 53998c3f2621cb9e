"""One side of a comparison: an engine, the requests that come to it, and what came of them."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvcache_jax as kv
from experiments.common.progress import progress
from experiments.serve.workload import Job, Workload

Counter = kv.engine.Counter
MOST_CHECK_INS = 240  # of a record


class Clock:
    """Seconds in which one side is at work; it waits while others have their turns.

    Where a side has nothing to do it is set to the next arrival, for no request waits then.
    """

    def __init__(self):
        self._seconds, self._started = 0.0, None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds, self._started = self.now(), None

    def now(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def skip_to(self, second: float) -> None:
        self._seconds += max(second - self.now(), 0.0)

    def count(self, figures: kv.engine.Figures) -> None:
        """Hears of a delivery; what time that took has passed already."""


def computed_tokens(counts: dict[Counter, int]) -> int:
    """Counts tokens that went through the model: of prompts, and each that another was drawn after."""
    return counts[Counter.PREFILL_TOKENS] + counts[Counter.GENERATED_TOKENS]


class CheckIn(NamedTuple):
    """A side at a `second` of its clock: rows, requests without one, referenced blocks; counts so far."""

    second: float
    running: int
    waiting: int
    blocks: int
    tokens: int
    preemptions: int


class Server:
    """Serves jobs, which are in the order of their arrival, a turn at a time.

    Where it `is_static` requests come in batches of `max_seqs`: those with the shortest prompts of all that
    are there, and none until the whole batch has ended.
    """

    def __init__(
        self,
        name: str,
        engine: kv.Engine,
        jobs: list[Job],
        *,
        max_steps: int | None = None,
        is_static: bool = False,
        clock: Clock | None = None,
    ):
        self.name, self.engine, self.jobs = name, engine, jobs
        self.max_steps, self.is_static, self.clock = max_steps, is_static, clock or Clock()
        self.check_ins: list[CheckIn] = []
        self.first_at = np.full(len(jobs), np.nan)
        self.last_at = np.full(len(jobs), np.nan)
        self.num_tokens = np.zeros(len(jobs), int)
        self.num_first = np.zeros(len(jobs), int)  # tokens of the first delivery
        self.num_ended = 0
        self._to_come = deque(range(len(jobs)))
        self._here: list[int] = []  # came, and is not pushed yet
        self._start: kv.engine.Figures = engine.figures()
        engine.clock = self.clock.now  # of its metrics

    @property
    def is_done(self) -> bool:
        return self.num_ended == len(self.jobs)

    @property
    def counts(self) -> dict[Counter, int]:
        """Events since this server was made."""
        return {name: num - self._start.counts[name] for name, num in self.engine.figures().counts.items()}

    @property
    def num_reads(self) -> int:
        """Reads of the device since this server was made."""
        return self.engine.figures().num_reads - self._start.num_reads

    def turn(self, num_tokens: int) -> None:
        """Serves until so many tokens are generated in all, or every request has ended."""
        self.clock.start()
        while not self.is_done and self.num_tokens.sum() < num_tokens:
            self.step()
        jax.block_until_ready(self.engine.state.outbox_len)  # what is under way is this side's
        self.clock.stop()

    def step(self) -> float:
        """Hands over what has come, waits for one delivery, and returns its second."""
        self._push()
        if not self.engine.num_unfinished and self._to_come:
            self.clock.skip_to(self.jobs[self._to_come[0]].arrival)
            self._push()
        self.engine.drain(self.max_steps)
        figures = self.engine.figures()
        self.clock.count(figures)
        now = self.clock.now()
        for event in self.engine.take_events():
            self._note(event, now)
        waiting = figures.waiting + len(self._here)
        names = Counter.GENERATED_TOKENS, Counter.PREEMPTIONS
        counts = (figures.counts[name] - self._start.counts[name] for name in names)
        self.check_ins.append(CheckIn(now, figures.running, waiting, figures.blocks_used, *counts))
        return now

    def _push(self) -> None:
        now = self.clock.now()
        while self._to_come and self.jobs[self._to_come[0]].arrival <= now:
            self._here.append(self._to_come.popleft())
        ready = self._here
        if self.is_static:
            if self.engine.num_unfinished:
                return
            ready = sorted(self._here, key=lambda i: len(self.jobs[i].prompt))[: self.engine.config.max_seqs]
        requests = (kv.GenerationRequest(self.jobs[i].prompt, self.jobs[i].num_tokens, id=i) for i in ready)
        taken = set(ready[: self.engine.push(requests)]) if ready else set()
        if taken:
            self._here = [i for i in self._here if i not in taken]

    def _note(self, event: kv.engine.TokenEvent, now: float) -> None:
        i: Any = event.id
        if event.tokens:
            if not self.num_tokens[i]:
                self.first_at[i] = now
                self.num_first[i] = len(event.tokens)
            self.last_at[i] = now
            self.num_tokens[i] += len(event.tokens)
        if event.finish_reason is not None:
            if event.finish_reason != "length":
                raise RuntimeError(
                    f"{self.name}: request {i} ended by {event.finish_reason!r}, not its length"
                )
            self.num_ended += 1

    def record(self) -> dict[str, Any]:
        counts, seconds = self.counts, self.clock.now()
        arrival = np.array([job.arrival for job in self.jobs])
        is_there = self.num_tokens > 0
        # The tokens of the first delivery came at once: nothing says how long each took.
        num_later = self.num_tokens - self.num_first
        is_measured = num_later > 0
        per_token = (self.last_at - self.first_at)[is_measured] / num_later[is_measured]
        num_tokens, num_steps = int(self.num_tokens.sum()), counts[Counter.STEPS]
        cached = counts[Counter.CACHED_TOKENS]
        prompts = cached + counts[Counter.PREFILL_TOKENS] + counts[Counter.ADMISSIONS]
        return {
            "side": self.name,
            "num_requests": self.num_ended,
            "num_tokens": num_tokens,
            "seconds": seconds,
            "tokens_per_s": num_tokens / seconds if seconds else 0.0,
            "first_token_s": percentiles((self.first_at - arrival)[is_there]),
            "per_token_ms": percentiles(1e3 * per_token),
            "num_steps": num_steps,
            "step_ms": 1e3 * seconds / max(num_steps, 1),
            "rows_per_step": num_tokens / max(num_steps, 1),
            "transfers": self.num_reads,
            "transfers_per_token": self.num_reads / max(num_tokens, 1),
            "transfers_per_step": self.num_reads / max(num_steps, 1),
            "hit_rate": cached / max(prompts, 1),
            "preemptions": counts[Counter.PREEMPTIONS],
            "peak_blocks": max((check_in.blocks for check_in in self.check_ins), default=0),
            "num_blocks": sum(group.num_blocks for group in self.engine.config.groups),
        }

    def timeline(self) -> list[list[float]]:
        """Check-ins, as many as a picture needs: [second, running, waiting, blocks, tokens, preemptions]."""
        every = -(-len(self.check_ins) // MOST_CHECK_INS) or 1
        return [[round(check_in.second, 3), *check_in[1:]] for check_in in self.check_ins[::every]]


def take_turns(servers: Sequence[Server], work: Workload, num_turns: int) -> None:
    """Has servers serve a workload in turns of as many tokens each."""
    with progress(work.name, num_turns, every=8) as show:
        for i in range(1, num_turns + 1):
            for server in servers:
                server.turn(work.num_tokens * i // num_turns)
            show(i, ", ".join(f"{server.name}: {server.num_ended} of {len(work.jobs)}" for server in servers))
            if all(server.is_done for server in servers):  # tokens come several at once
                break


def percentiles(values: np.ndarray) -> dict[str, Any]:
    """Computes the median and the 99th percentile; None of nothing."""
    return {f"p{q}": float(np.percentile(values, q)) if len(values) else None for q in (50, 99)}
