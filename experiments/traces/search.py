"""Question: does an eviction policy without look-ahead beat LRU on real traces?

Command: python -m experiments.traces.search --trace FILE [FILE ...] [--replay] [--json]
Machine: 2 virtual cores of an Intel Xeon, shared with other work; jax 0.12.0
Answer:  a little. `hyperbolic`, which has no parameter to choose, serves 0.70 points more of the blocks than
  LRU in the second half of Mooncake's conversations at 10,000 blocks and 1.55 more of its synthetic trace,
  and nowhere between 1,000 and 100,000 blocks loses more than 0.22; in the first halves it gains -0.09 and
  0.85, and loses no more than 0.09. The others win at some sizes and lose at others, and the parameters that
  look best in the first halves do not hold in the second ones.
Record:  experiments/results/eviction_policies.json, of 24 minutes with --replay and --json.

Each trace is simulated whole; parameters are chosen by its first half, and its second half is reported. A
policy reaches the bar if it gains at least 0.5 points at 10,000 blocks on every trace and never loses more
than 0.3 at any size. Of each family the parameter with the highest mean gain at 10,000 blocks in the first
halves is chosen, among those that lose no more than 0.3 anywhere there.

Each trace counts twice: as published, and without the partly filled blocks at prompts' ends. No cache of
tokens publishes those; a policy that sorts them out (`ends first`) gains on paper what nobody can have.

A policy sees what is known of each block, see `experiments.traces.simulator`; children go before
parents.
With --replay, `hyperbolic` and LRU also run through the cache itself, which must serve the same blocks.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import command, timing
from experiments.common.report import add_options, deliver
from experiments.traces.replay import progress_bar, rates, replay
from experiments.traces.simulator import TICKS_PER_REQUEST, Blocks, EvictionKey, simulate
from experiments.traces.trace import Trace, add_trace_options, full_blocks_only, read_trace
from kvcache_jax.core.eviction_policy import LRU, BlockMetadata, eviction_keys

SIZES = (1_000, 5_000, 10_000, 30_000, 100_000)
JUDGED_SIZE = 10_000  # where a policy has to win; elsewhere it must not lose much
LEAST_GAIN, MOST_LOSS = 0.005, 0.003


class Candidate(NamedTuple):
    """One policy.

    Attributes:
      family: What it does, without the parameter.
      parameter: Which of the family; None if there is one only.
      key: From what is known of the blocks to a key per block; lower goes first.
    """

    family: str
    parameter: float | None
    key: EvictionKey

    @property
    def name(self) -> str:
        return self.family if self.parameter is None else f"{self.family}: {self.parameter:g}"


def lru(blocks: Blocks) -> jax.Array:
    return jnp.zeros_like(blocks.recency)


def of_library(policy: str) -> EvictionKey:
    return lambda blocks: eviction_keys(policy, BlockMetadata(*blocks[: len(BlockMetadata._fields)]))


def hits_last(blocks: Blocks) -> jax.Array:
    """Two queues, as in segmented LRU without a bound: blocks with a hit stay while there are others."""
    return jnp.minimum(blocks.num_hits, 1)


def ends_first(blocks: Blocks) -> jax.Array:
    """The last blocks of prompts that nobody asked for again or went on from."""
    return jnp.where((blocks.num_hits == 0) & (blocks.num_extensions == 0), 0, 1)


def hits_age_slower(blocks: Blocks, factor: float) -> jax.Array:
    """LRU in which the time since the last use counts `factor` times for blocks that were never hit.

    Large factors make it 2Q or S3-FIFO: what is new has to prove itself soon.
    """
    return -jnp.where(blocks.num_hits > 0, blocks.idle, _times(blocks.idle, factor))


def more_hits_age_slower(blocks: Blocks, weight: float) -> jax.Array:
    """LRU with a time that runs slower the more hits: LFU with aging."""
    speed = 1 + weight * jnp.log2(1 + blocks.num_hits.astype(jnp.float32))
    return -_times(blocks.idle, 256 / speed)


def hits_count_as_later(blocks: Blocks, share: float) -> jax.Array:
    """LRU in which a block with a hit counts as used later: by `share` requests per block of the cache."""
    bonus = int(share * TICKS_PER_REQUEST * blocks.idle.shape[0])
    return jnp.where(blocks.num_hits > 0, bonus, 0) - blocks.idle


def more_hits_count_as_later(blocks: Blocks, share: float) -> jax.Array:
    """The same, for each doubling of the uses."""
    bonus = share * TICKS_PER_REQUEST * blocks.idle.shape[0]
    return (bonus * jnp.log2(1 + blocks.num_hits.astype(jnp.float32))).astype(jnp.int32) - blocks.idle


def depth_ages_faster(blocks: Blocks, weight: float) -> jax.Array:
    """LRU in which the ends of long prompts age faster."""
    return -_times(blocks.idle, 1 + weight * blocks.depth.astype(jnp.float32))


def long_prompts_age_faster(blocks: Blocks, weight: float) -> jax.Array:
    """LRU in which all blocks of long prompts age faster."""
    return -_times(blocks.idle, 1 + weight * blocks.prompt_len.astype(jnp.float32))


def last_two_uses(blocks: Blocks, weight: float) -> jax.Array:
    """LRU-2 in part: `weight` times the gap between the last two uses is added to the time since the last."""
    never = 8 * blocks.idle.shape[0] // 100 * TICKS_PER_REQUEST
    gap = jnp.where(blocks.num_hits > 0, jnp.minimum(blocks.gap, never), never)
    return -(blocks.idle + _times(gap, weight))


def extended_age_slower(blocks: Blocks, factor: float) -> jax.Array:
    """LRU in which blocks age `factor` times as fast unless several prompts went on from them."""
    is_branch = blocks.num_extensions > 1
    return -jnp.where(is_branch, blocks.idle, _times(blocks.idle, factor))


def ends_first_hits_age_slower(blocks: Blocks, factor: float) -> jax.Array:
    """`ends_first`, then `hits_age_slower`."""
    is_end = (blocks.num_hits == 0) & (blocks.num_extensions == 0)
    return jnp.where(is_end, -(2**30), 0) + hits_age_slower(blocks, factor)


def _times(ticks: jax.Array, factor: jax.Array | float) -> jax.Array:
    return (ticks.astype(jnp.float32) * factor).astype(jnp.int32)


IN_LIBRARY = ("fifo", "lfu", "hyperbolic")
FAMILIES: dict[Callable, tuple[float, ...]] = {
    hits_last: (),
    ends_first: (),
    hits_age_slower: (1.25, 1.5, 2, 3, 5, 10),
    more_hits_age_slower: (0.2, 0.5, 1),
    hits_count_as_later: (0.02, 0.03, 0.04, 0.05, 0.1),
    more_hits_count_as_later: (0.02, 0.03, 0.05),
    depth_ages_faster: (0.003, 0.01),
    long_prompts_age_faster: (0.003, 0.01),
    last_two_uses: (0.5, 1, 2),
    extended_age_slower: (1.5, 2),
    ends_first_hits_age_slower: (1.5, 2),
}


def candidates() -> Iterator[Candidate]:
    """All that are tried; LRU is the first."""
    yield Candidate(LRU, None, lru)
    for policy in IN_LIBRARY:
        yield Candidate(policy, None, of_library(policy))
    for family, parameters in FAMILIES.items():
        name = family.__name__.replace("_", " ")
        if not parameters:
            yield Candidate(name, None, family)
        for parameter in parameters:
            yield Candidate(name, parameter, lambda blocks, p=parameter, f=family: f(blocks, p))


def half_rates(trace: Trace, num_hits: np.ndarray) -> list[float]:
    """The hit rate by block of the first and of the second half, given i32[num_requests] hit ids."""
    half = len(trace.ids) // 2
    return _by_block([rates(trace, num_hits, slice(0, half)), rates(trace, num_hits, slice(half, None))])


def _by_block(halves: list[dict]) -> list[float]:
    return [record["hit_rate_blocks"] or 0.0 for record in halves]  # None where there is no request


def search(traces: dict[str, Trace], sizes: Sequence[int], tell: Callable[[str, float], None]) -> list[dict]:
    """Per candidate its gains over LRU: per trace and size, of the first and of the second half."""
    records, lru_rates = [], {}
    runs = [(c, name, size) for c in candidates() for name in traces for size in sizes]
    for i, (candidate, name, size) in enumerate(runs):
        if candidate.family != LRU and size >= traces[name].num_distinct:
            found = lru_rates[name, size]  # nothing is evicted
        else:
            found = half_rates(traces[name], simulate(traces[name], size, candidate.key))
        if candidate.family == LRU:
            lru_rates[name, size] = found
        if not records or records[-1]["policy"] != candidate.name:
            family = {"family": candidate.family, "parameter": candidate.parameter}
            records.append({"policy": candidate.name, **family, "gains": {name: [] for name in traces}})
        gain = [rate - base for rate, base in zip(found, lru_rates[name, size], strict=True)]
        records[-1]["gains"][name].append(gain)
        tell("candidates", (i + 1) / len(runs))
    for record in records:
        record["first_half"], record["second_half"] = (judge(record["gains"], sizes, half) for half in (0, 1))
    return records


def judge(gains: dict[str, list[list[float]]], sizes: Sequence[int], half: int) -> dict[str, float | bool]:
    """The least and the mean gain at the judged size, over the traces, and the worst at any size."""
    judged = [by_size[list(sizes).index(JUDGED_SIZE)][half] for by_size in gains.values()]
    worst = min(gain[half] for by_size in gains.values() for gain in by_size)
    return {
        "least_gain": min(judged),
        "mean_gain": float(np.mean(judged)),
        "worst": worst,
        "reaches_bar": min(judged) >= LEAST_GAIN and worst >= -MOST_LOSS,
    }


def chosen_per_family(records: list[dict]) -> list[dict]:
    """Of each family the one with the highest mean gain in the first halves, if it loses little there."""
    chosen = {}
    for record in records[1:]:
        first = record["first_half"]
        if first["worst"] >= -MOST_LOSS:
            best = chosen.setdefault(record["family"], record)
            if first["mean_gain"] > best["first_half"]["mean_gain"]:
                chosen[record["family"]] = record
    return list(chosen.values())


def confirm(traces: dict[str, Trace], sizes: Sequence[int], tell: Callable[[str, float], None]) -> list[dict]:
    """The policies that the library has, replayed through the cache: the simulated hits, or an error."""
    records = []
    for policy, key in ((LRU, lru), ("hyperbolic", of_library("hyperbolic"))):
        for name, trace in traces.items():
            for size in sizes:
                replayed = replay(trace, size, policy, functools.partial(tell, f"{policy}, {name}, {size:,}"))
                found = _by_block(replayed["halves"])
                if found != (simulated := half_rates(trace, simulate(trace, size, key))):
                    raise RuntimeError(f"{policy} on {name}, {size} blocks: {found}, simulated {simulated}")
                records.append({"trace": name, **replayed})
    return records


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.traces.search", __doc__)
    add_trace_options(parser, nargs="+")
    parser.add_argument(
        "--replay", action="store_true", help="also replay what the library has through the cache itself"
    )
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    names = [path.stem for path in options.trace]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        parser.error(f"got two files called {repeated}, expected different names: the figures go by them")
    traces = {}
    with parser.refusing():
        for path in options.trace:
            traces[path.stem] = read_trace(path, options.tokens_per_id)
            traces[f"{path.stem}, full blocks"] = full_blocks_only(traces[path.stem])
    if (longest := max(int(trace.num_ids.max()) for trace in traces.values())) > SIZES[0]:
        parser.error(f"got a request of {longest} blocks, expected at most {SIZES[0]}, the smallest size")
    with progress_bar() as tell:
        records = search(traces, SIZES, tell)
        published = {path.stem: traces[path.stem] for path in options.trace}
        replays = confirm(published, SIZES, tell) if options.replay else []
    report = {
        "sizes": SIZES,
        "judged_size": JUDGED_SIZE,
        "candidates": records,
        "chosen_in_first_halves": [record["policy"] for record in chosen_per_family(records)],
        "replays": replays,
    }
    deliver(report, options, show)
    return 0


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as one table per trace."""
    chosen = report["chosen_in_first_halves"]
    for name in report["candidates"][0]["gains"]:
        rows = []
        for record in report["candidates"]:
            cells = [f"{100 * first:+.2f} {100 * second:+.2f}" for first, second in record["gains"][name]]
            verdict = "reaches the bar" if record["second_half"]["reaches_bar"] else ""
            rows.append([record["policy"], "chosen" if record["policy"] in chosen else "", verdict, *cells])
        header = ["policy", "1st halves", "2nd halves", *(f"{size:,} blocks" for size in report["sizes"])]
        timing.show_table(f"{name}: points above LRU, 1st and 2nd half", header, rows, num_text=3)
    for record in report["replays"]:
        second = record["halves"][1]["hit_rate_blocks"]
        print(
            f"replayed: {record['policy']}, {record['trace']}, {record['num_blocks']:,} blocks: {second:.4f}"
        )


if __name__ == "__main__":
    command.run(main)
