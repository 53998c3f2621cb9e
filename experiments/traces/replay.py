"""Question: how much of real prompts does the prefix cache serve, by its size and eviction policy?

Command: python -m experiments.traces.replay --trace FILE --blocks N [N ...] [--policy P ...] [--json]
         [--eviction-batch N]
Machine: 2 virtual cores of an Intel Xeon, shared with other work; jax 0.12.0
Answer:  LRU, hit rate by block with 1,000 / 10,000 / 30,000 / 50,000 / 100,000 / infinite blocks:
  0.0445 / 0.2116 / 0.3257 / 0.3546 / 0.3637 / 0.3664 of Mooncake's conversations (12,031 requests) and
  0.0841 / 0.4239 / 0.6242 / 0.6396 / 0.6396 / 0.6396 of its synthetic trace (3,993). `hyperbolic`, which has
  no parameter to choose, serves 0.70 and 1.55 points more than LRU of the second halves at 10,000 blocks, and
  nowhere loses more than 0.22.
Record:  experiments/results/eviction_policies.json, of a search among 34 policies at revision dc0d76d.

A trace has no tokens, only ids of the prompts' prefix blocks (see `experiments.traces.trace`), so an id is
replayed as one token of a block of size 1, one request after the other, all in one `lax.scan` over the public
functions. A prompt's last token is always computed anew: every request gets one token more, never published,
and the pool one block more for it, so that neither counts. `--blocks infinite` has a block for every id.

`hit_rate_blocks` is hit ids / ids; `hit_rate_tokens` weighs an id by its tokens, of which a prompt's last one
has fewer.
"""

import argparse
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.common import command
from experiments.common.progress import progress
from experiments.common.report import add_options, deliver, framed
from experiments.common.timing import show_records
from experiments.traces.trace import Trace, add_trace_options, read_trace
from kvcache_jax.core.eviction_policy import LRU, policies

INFINITE = "infinite"
EXTRA_TOKEN = 0  # ids are counted from 1


@functools.partial(kv.donate)
def serve_all(cache: kv.Cache, ids: jax.Array, num_ids: jax.Array) -> tuple[kv.Cache, jax.Array, jax.Array]:
    """Serves requests i32[num_requests, longest] in one row, one after the other.

    Returns the cache, i32[num_requests] hit ids, and i32[] the worst status of all operations.
    """
    width = ids.shape[1] + 1

    def serve(cache: kv.Cache, request: tuple[jax.Array, jax.Array]):
        ids, num_ids = request
        tokens = jnp.full(2 * width, EXTRA_TOKEN, jnp.int32).at[: ids.shape[0]].set(ids)
        row = jnp.zeros(1, jnp.int32)
        cache, admission = kv.allocate(cache, row, num_ids[None] + 1, tokens=tokens[None, :width])
        num_hits = admission.num_cached
        new = lax.dynamic_slice(tokens, num_hits, (width,))
        cache, step = kv.extend(
            cache, num_ids[None] + 1 - num_hits, max_new=width, seq_ids=row, tokens=new[None]
        )
        cache, committed = kv.commit(cache, row, final_len=num_ids[None])
        cache, freed = kv.free(cache, row)
        statuses = jnp.concatenate([admission.status, step.status, committed, freed])
        return cache, (num_hits[0], statuses.max())

    cache, (num_hits, statuses) = lax.scan(serve, cache, (ids, num_ids))
    return cache, num_hits, statuses.max()


def replay(trace: Trace, num_blocks: int, policy: str, eviction_batch: int = 1, num_hosted: int = 0) -> dict:
    """Replays a trace with `num_blocks` blocks for its ids.

    With `num_hosted` more blocks are in host memory, see `kvcache_jax.tiers.Host`.
    """
    config = kv.CacheConfig(
        layers=[kv.FullAttention(num_kv_heads=1, head_dim=1)],
        num_blocks=num_blocks + 1,
        block_size=1,
        max_seqs=1,
        max_seq_len=trace.ids.shape[1] + 1,
        enable_prefix_caching=True,
        eviction_policy=kv.policies.InBatches(policy, eviction_batch),
        extras=[kv.tiers.Host(num_hosted)] if num_hosted else (),
    )
    cache = kv.init(config, storage=False)
    start = time.perf_counter()
    program = serve_all.lower(cache, trace.ids, trace.num_ids).compile()  # pyright: ignore
    compiled = time.perf_counter()
    cache, hits, status = program(cache, trace.ids, trace.num_ids)
    kv.raise_for_status(status[None], "replay")
    num_hits, finished = np.asarray(hits), time.perf_counter()
    half = len(trace.ids) // 2
    return {
        "policy": policy,
        "num_blocks": num_blocks,
        "eviction_batch": eviction_batch,
        "num_hosted": num_hosted,
        **rates(trace, num_hits, slice(None)),
        "halves": [rates(trace, num_hits, slice(0, half)), rates(trace, num_hits, slice(half, None))],
        "num_evictions": int(kv.stats(cache).num_evictions),
        "compile_s": compiled - start,
        "replay_s": finished - compiled,
    }


def rates(trace: Trace, num_hits: np.ndarray, part: slice) -> dict[str, float | None]:
    """Hit rates of some requests, given i32[num_requests] hit ids of all; None of no requests."""

    def rate(hits: np.ndarray, asked: np.ndarray) -> float | None:
        return float(hits[part].sum() / asked[part].sum()) if asked[part].any() else None

    return {
        "hit_rate_blocks": rate(num_hits, trace.num_ids),
        "hit_rate_tokens": rate(trace.num_hit_tokens(num_hits), trace.num_tokens),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.traces.replay", __doc__)
    add_trace_options(parser)
    parser.add_argument(
        "--blocks", type=capacity, nargs="+", required=True, metavar="N", help=f"sizes, or {INFINITE!r}"
    )
    parser.add_argument("--policy", choices=policies.names, nargs="+", default=[LRU], help="default: lru")
    parser.count("--eviction-batch", 1, "exact")
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    with parser.refusing():
        trace = read_trace(options.trace, options.tokens_per_id)
    longest = int(trace.num_ids.max())
    sizes = sorted({size or max(trace.num_distinct, longest) for size in options.blocks})
    if sizes[0] < longest:
        parser.error(
            f"got --blocks {sizes[0]}, expected at least {longest}: the longest request must fit in the cache"
        )
    if options.eviction_batch > sizes[0]:
        parser.error(f"got --eviction-batch {options.eviction_batch}, expected at most the {sizes[0]} blocks")
    records, runs = [], [*itertools.product(dict.fromkeys(options.policy), sizes)]
    with progress("replays", len(runs), every=1) as tell:
        for num_done, (policy, size) in enumerate(runs, 1):
            try:
                records.append(replay(trace, size, policy, options.eviction_batch))
                tell(num_done, f"{policy}, {size:,} blocks")
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                parser.fail(
                    f"a cache of {size:,} blocks does not fit in memory: {str(error).splitlines()[0]}"
                )
    report = {
        "trace": {
            "name": options.trace.name,
            "num_requests": len(trace.ids),
            "num_ids": int(trace.num_ids.sum()),
            "num_distinct": trace.num_distinct,
            "num_tokens": int(trace.num_tokens.sum()),
        },
        "records": records,
    }
    return deliver(report, options, show)


def capacity(text: str) -> int | None:
    """An argparse `type`: a number of blocks; None for as many as the trace has ids."""
    if text == INFINITE:
        return None
    try:
        return command.integer(1, 2**30)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {INFINITE!r}") from None


def rate(value: float | None) -> str:
    """Four decimals; a dash where there was nothing to hit."""
    return "–" if value is None else f"{value:.4f}"


def above_lru(record: dict[str, Any], of_lru: dict[str, Any] | None) -> str:
    """Points that a policy serves more of the blocks than LRU in the same pool, in each half."""
    if of_lru is None:
        return ""
    halves = zip(record["halves"], of_lru["halves"], strict=True)
    pairs = [tuple(half["hit_rate_blocks"] for half in pair) for pair in halves]
    return " ".join("–" if own is None else f"{100 * (own - other):+.2f}" for own, other in pairs)


@framed
def show(report: dict[str, Any]) -> None:
    trace, records = report["trace"], report["records"]
    of_lru = {record["num_blocks"]: record for record in records if record["policy"] == LRU}
    title = (
        f"{trace['name']}: {trace['num_requests']:,} requests, {trace['num_ids']:,} blocks, "
        f"{trace['num_distinct']:,} different ones, {trace['num_tokens']:,} tokens"
    )
    columns = {
        "policy": "{policy}",
        "blocks": "{num_blocks:,}",
        "hit rate": lambda record: rate(record["hit_rate_blocks"]),
        "by token": lambda record: rate(record["hit_rate_tokens"]),
        "1st half": lambda record: rate(record["halves"][0]["hit_rate_blocks"]),
        "2nd half": lambda record: rate(record["halves"][1]["hit_rate_blocks"]),
        "halves, points above LRU": lambda record: above_lru(record, of_lru.get(record["num_blocks"])),
        "evicted": "{num_evictions:,}",
        "time": "{replay_s:.1f} s",
        "compile": "{compile_s:.1f} s",
    }
    show_records(title, columns, records)


if __name__ == "__main__":
    command.run(main)
