"""Question: how soon does an engine answer, and what do short dispatches cost in tokens a second?

Command: python -m experiments.first_token [--trials N] [--requests N] [--json]
Machine: 2 virtual cores of an AMD EPYC, nothing beside it; jax 0.12.0.1
Answer:  In 1.51, 0.85 and 0.89 times the time that dispatches of one step take (bar 2), with 0.997 times the
  tokens a second of 32 steps (bar 0.97): all hold.
Record:  docs/measured.md

One engine of the small model, 8 rows, is drained by a thread as a server does it: with dispatches of the
length that the engine chooses, of one step, and of 32 steps. Milliseconds until a request's first token is
there, where no other runs and where six rows decode, and until the end of a request that is cancelled while
it is one of seven that decode. The three ways take turns, trial by trial, and a trial begins at a random
moment. Then the first and the last serve the same requests, in turns of as many tokens.
"""

import random
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, corpus, timing
from experiments.common.report import add_options, at_least, at_most, deliver, table
from experiments.serve.server import Server
from experiments.serve.sides import CONTINUOUS, Sizes, make_engine, warm_up
from experiments.serve.workload import human_eval
from models import checkpoint

WAYS: dict[str, int | None] = {"chosen": None, "one step": 1, "32 steps": 32}
MOMENTS = ("first token, idle", "first token, six rows decode", "end of a cancelled one")
PROMPT_LEN, MAX_LEN, NUM_DECODING = 100, 2048, 6
GAP_S = (0.2, 1.5)  # before a trial: shorter and longer than the engine remembers news
NUM_TURNS = 6
MOST_RATIO, LEAST_SPEED = 2.0, 0.97


class Consumer:
    """Drains an engine in a thread, and notes when the first token and the end of each request came."""

    def __init__(self, engine: kv.Engine):
        self.engine = engine
        self.max_steps: int | None = None
        self.first_at: dict[Any, float] = {}
        self.end_at: dict[Any, float] = {}
        self._came = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Consumer":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over = True
        with self._came:
            self._came.notify_all()
        self._thread.join()

    def push(self, request_id: Any, max_new: int) -> float:
        """Hands a request over, and returns when."""
        rng = np.random.default_rng(len(self.first_at))
        prompt = rng.integers(32, 127, PROMPT_LEN).tolist()
        with self._came:
            self.engine.push([kv.GenerationRequest(prompt, max_new, id=request_id)])
            self._came.notify_all()
        return time.perf_counter()

    def wait(self, times: dict[Any, float], request_id: Any) -> float:
        """Waits for an entry of `first_at` or `end_at`."""
        with self._came:
            self._came.wait_for(lambda: request_id in times)
        return times[request_id]

    def wait_until_idle(self) -> None:
        """Waits until the device has heard of all ends."""
        while self.engine.num_unfinished:
            time.sleep(0.001)

    def _run(self) -> None:
        while not self._is_over:
            if not self.engine.num_unfinished:
                with self._came:
                    self._came.wait_for(lambda: self._is_over or self.engine.num_unfinished)
                continue
            self.engine.drain(self.max_steps)
            now, events = time.perf_counter(), self.engine.take_events()
            with self._came:
                for event in events:
                    if event.tokens:
                        self.first_at.setdefault(event.id, now)
                    if event.finish_reason is not None:
                        self.end_at[event.id] = now
                self._came.notify_all()


def measure(engine: kv.Engine, num_trials: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by moment and way, of as many trials."""
    rng, found = random.Random(0), {moment: {way: [] for way in WAYS} for moment in MOMENTS}
    with Consumer(engine) as consumer:
        for trial in range(num_trials):
            for way, max_steps in WAYS.items():
                consumer.max_steps = max_steps
                times = _trial(consumer, (trial, way), rng)
                for moment, seconds in zip(MOMENTS, times, strict=True):
                    found[moment][way].append(seconds)
    return found


def _trial(consumer: Consumer, name: Any, rng: random.Random) -> tuple[float, float, float]:
    """Measures one moment after the other, of one way."""
    engine, longest = consumer.engine, MAX_LEN - PROMPT_LEN
    idle, late, crowd = (name, "idle"), (name, "late"), [(name, i) for i in range(NUM_DECODING)]
    consumer.wait_until_idle()
    time.sleep(rng.uniform(*GAP_S))
    begun = consumer.push(idle, longest)
    first_idle = consumer.wait(consumer.first_at, idle) - begun
    engine.cancel(idle)
    consumer.wait_until_idle()
    for one in crowd:
        consumer.push(one, longest)
    for one in crowd:
        consumer.wait(consumer.first_at, one)
    time.sleep(rng.uniform(*GAP_S))
    begun = consumer.push(late, longest)
    first_late = consumer.wait(consumer.first_at, late) - begun
    time.sleep(rng.uniform(*GAP_S))
    begun = time.perf_counter()
    engine.cancel(late)
    end = consumer.wait(consumer.end_at, late) - begun
    for one in crowd:
        engine.cancel(one)
    return first_idle, first_late, end


def speeds(decoder: Any, num_requests: int) -> dict[str, list[float]]:
    """Tokens a second of dispatches as the engine chooses them, and of 32 steps: of each turn."""
    work = human_eval(None, None, num_requests, 0.0, 1.0)
    servers = {}
    for way in ("chosen", "32 steps"):
        engine = make_engine(CONTINUOUS, decoder, Sizes(8, work.longest))
        warm_up(engine)
        servers[way] = Server(way, engine, work.jobs, max_steps=WAYS[way])
    found = {way: [] for way in servers}
    for i in range(1, NUM_TURNS + 1):
        for way, server in servers.items():
            tokens, seconds = server.num_tokens.sum(), server.clock.now()
            server.turn(work.num_tokens * i // NUM_TURNS)
            found[way].append((server.num_tokens.sum() - tokens) / (server.clock.now() - seconds))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.first_token", __doc__)
    parser.count("--trials", 12)
    parser.count("--requests", 48, "of the tokens a second")
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    decoder = checkpoint.load(corpus.MODEL, dtype=jnp.float32)
    engine = make_engine(CONTINUOUS, decoder, Sizes(8, MAX_LEN))
    engine.compile()
    warm_up(engine)
    found = measure(engine, options.trials)
    rates = speeds(decoder, options.requests)
    records: list[dict[str, Any]] = [
        {"moment": moment} | {way: timing.summary(times) for way, times in ways.items()}
        for moment, ways in found.items()
    ]
    bars = [
        at_most(
            f"{record['moment']}: times that of one step",
            record["chosen"]["median_us"] / record["one step"]["median_us"],
            MOST_RATIO,
        )
        for record in records
    ]
    low, ratio, high = timing.ratios(rates["chosen"], rates["32 steps"])
    bars.append(at_least(f"tokens/s, times those of 32 steps ({low:.2f} - {high:.2f})", ratio, LEAST_SPEED))
    columns = {"ms": "{moment}"} | {way: timing.with_spread(way, 1e3) for way in WAYS}
    show = table("median (p10 - p90)", columns)
    deliver({"records": records, "tokens_per_s": rates, "bars": bars}, options, show)
    return 0


if __name__ == "__main__":
    command.run(main)
