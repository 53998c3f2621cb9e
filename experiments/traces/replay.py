"""Question: how much of real prompts does the prefix cache serve, by its size and eviction policy?

Command: python -m experiments.traces.replay --trace FILE --blocks N [N ...] [--policy P ...] [--json]
         [--eviction-batch N] [--picture FILE]
Machine: 2 virtual cores of an Intel Xeon, shared with other work; jax 0.12.0
Answer:  LRU, hit rate by block with 1,000 / 10,000 / 30,000 / 50,000 / 100,000 / infinite blocks:
  0.0445 / 0.2116 / 0.3257 / 0.3546 / 0.3637 / 0.3664 of Mooncake's conversations (12,031 requests) and
  0.0841 / 0.4239 / 0.6242 / 0.6396 / 0.6396 / 0.6396 of its synthetic trace (3,993);
  by token 0.3736 and 0.6512 at most. A replay takes 0.2 to 2.7 s, after 2 to 4 s
  of compilation on an idle machine.

A trace has no tokens, only ids of the prompts' prefix blocks (see `experiments.traces.trace`), so an
id is replayed as one token of a block of size 1. Each request is allocated, extended by its tokens, committed
and freed
before the next one comes, all requests in one `lax.scan` over the public functions. A prompt's last token is
always computed anew: every request gets one token more, never published, and the pool one block more for it,
so that neither the token nor its block counts. `--blocks infinite` has a block for every id of the trace.

A hit is a prefix of the prompt that is still there. `hit_rate_blocks` is hit ids / ids; `hit_rate_tokens`
weighs an id by its tokens, of which a prompt's last one has fewer.
"""

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

import kvcache_jax as kv
from experiments.common import command
from experiments.common.report import add_options, deliver
from experiments.traces.report import draw, show
from experiments.traces.trace import Trace, add_trace_options, read_trace
from kvcache_jax.core.eviction_policy import policies

INFINITE = "infinite"
NUM_SEGMENTS = 20  # between which the progress bar moves
EXTRA_TOKEN = 0  # ids are counted from 1


@functools.partial(kv.donate)
def serve_all(cache: kv.Cache, ids: jax.Array, num_ids: jax.Array) -> tuple[kv.Cache, jax.Array, jax.Array]:
    """One request after the other; those without an id are passed over.

    Args:
      cache: One row.
      ids: i32[num_requests, longest].
      num_ids: i32[num_requests].

    Returns:
      The cache, i32[num_requests] hit ids, and i32[] the worst status of all operations.
    """
    width = ids.shape[1] + 1

    def serve(cache: kv.Cache, request: tuple[jax.Array, jax.Array]):
        ids, num_ids = request
        tokens = jnp.full(2 * width, EXTRA_TOKEN, jnp.int32).at[: ids.shape[0]].set(ids)
        row = jnp.where(num_ids > 0, 0, cache.max_seqs)[None]
        cache, admission = kv.allocate(cache, row, num_ids[None] + 1, tokens=tokens[None, :width])
        num_hits = admission.num_cached
        new = lax.dynamic_slice(tokens, num_hits, (width,))
        cache, step = kv.extend(
            cache, num_ids[None] + 1 - num_hits, max_new=width, seq_ids=row, tokens=new[None]
        )
        cache, committed = kv.commit(cache, row, final_len=num_ids[None])
        cache, freed = kv.free(cache, row)
        statuses = jnp.concatenate([admission.status, step.status, committed, freed])
        statuses = jnp.where(row < cache.max_seqs, statuses, jnp.int32(kv.Status.OK))
        return cache, (num_hits[0], statuses.max())

    cache, (num_hits, statuses) = lax.scan(serve, cache, (ids, num_ids))
    return cache, num_hits, statuses.max()


def replay(
    trace: Trace,
    num_blocks: int,
    policy: str,
    progress: Callable[[float], None] = lambda share: None,
    eviction_batch: int = 1,
    num_hosted: int = 0,
) -> dict:
    """Replays a trace with `num_blocks` blocks for its ids; `progress` is told the share that is done.

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
    size = -(-len(trace.ids) // NUM_SEGMENTS)
    padding = -len(trace.ids) % size
    ids = np.pad(trace.ids, ((0, padding), (0, 0))).reshape(-1, size, trace.ids.shape[1])
    num_ids = np.pad(trace.num_ids, (0, padding)).reshape(-1, size)

    start = time.perf_counter()
    program = serve_all.lower(cache, ids[0], num_ids[0]).compile()  # pyright: ignore
    compiled = time.perf_counter()
    hits = []
    for i, segment in enumerate(zip(ids, num_ids, strict=True)):
        cache, num_hits, status = program(cache, *segment)
        kv.raise_for_status(status[None], "replay")
        hits.append(np.asarray(num_hits))
        progress((i + 1) / len(ids))
    finished = time.perf_counter()
    half = len(trace.ids) // 2
    num_hits = np.concatenate(hits)[: len(trace.ids)]
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
    parser.add_argument("--policy", choices=policies.names, nargs="+", default=["lru"], help="default: lru")
    parser.add_argument(
        "--eviction-batch", type=command.integer(1), default=1, metavar="N", help="default: 1, exact"
    )
    add_options(parser)
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
    records = []
    with progress_bar() as show_progress:
        for policy, size in itertools.product(dict.fromkeys(options.policy), sizes):
            show_share = functools.partial(show_progress, f"{policy}, {size:,} blocks")
            try:
                records.append(replay(trace, size, policy, show_share, options.eviction_batch))
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
    deliver(report, options, show, draw)
    return 0


def capacity(text: str) -> int | None:
    """An argparse `type`: a number of blocks; None for as many as the trace has ids."""
    if text == INFINITE:
        return None
    try:
        return command.integer(1, 2**30)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {INFINITE!r}") from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error for what `show(name, share)` says; silent where that is a file."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), "{task.percentage:>3.0f}%", TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {}

        def show_share(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=1.0)
            progress.update(tasks[name], completed=share)

        yield show_share


if __name__ == "__main__":
    command.run(main)
