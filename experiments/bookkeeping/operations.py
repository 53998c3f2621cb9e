"""What `experiments.bookkeeping` times: one entry of `OPERATIONS` each, and the states they start from."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv

NUM_ROWS, BLOCK_SIZE, MAX_SEQ_LEN, NUM_BLOCKS = 256, 16, 8192, 65_536
FLOOR, CALL, LOOP, ABOVE_FLOOR = "dispatch floor", "separate call", "in a loop", "call above floor"
SOME = np.arange(64, dtype=np.int32)
NOTHING, ROWS, EVERYTHING = "nothing is published", "the rows are published", "no block is free"


@dataclasses.dataclass(frozen=True)
class Workload:
    """How much the rows hold: a row up to `max_blocks` blocks, a prompt `prompt_len` tokens."""

    name: str
    max_blocks: int
    prompt_len: int

    def __str__(self) -> str:
        return f"rows of at most {self.max_blocks} blocks, prompt of {self.prompt_len:,} tokens"


FULL = Workload("full", max_blocks=256, prompt_len=8192)
# Fits into the smallest pool, so that growth compares the same rows in pools of any size.
SMALL = Workload("small", max_blocks=4, prompt_len=1024)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation to time.

    Attributes:
      name: As printed; sizes that differ between the workloads are in the title.
      lens: workload -> tokens that each row holds beforehand, -1 = idle.
      step: (cache, i, prompt_len) -> (cache, result): the `i`-th step; `result` is or has the status.
      num_steps: Steps that one prepared state has room for, in the full and in the small workload.
      bars: Figure -> microseconds that it may take, full workload.
      index: Of the prefix cache beforehand: None for none, else what is published.
    """

    name: str
    lens: Callable[[Workload], np.ndarray]
    step: Callable[[kv.Cache, jax.Array, jax.Array], tuple[kv.Cache, Any]]
    num_steps: tuple[int, int]
    bars: dict[str, float] = dataclasses.field(default_factory=dict)
    index: str | None = None
    policy: str = "lru"

    def steps_of(self, workload: Workload) -> int:
        return self.num_steps[0 if workload is FULL else 1]


def different_lens(workload: Workload) -> np.ndarray:
    """Rows of different lengths, as many at each offset in a block: 16 of 256 take a block each step."""
    shuffled = 101 * np.arange(NUM_ROWS) % NUM_ROWS
    return 1 + 17 * shuffled % (BLOCK_SIZE * workload.max_blocks)


def full_lens(workload: Workload) -> np.ndarray:
    return np.full(NUM_ROWS, BLOCK_SIZE * workload.max_blocks)


def half_lens(workload: Workload) -> np.ndarray:
    return full_lens(workload) // 2


def some_lens(workload: Workload) -> np.ndarray:
    """64 rows, full but for a few tokens; the others idle."""
    rows = np.arange(NUM_ROWS)
    return np.where(rows < len(SOME), full_lens(workload) - rows % BLOCK_SIZE, -1)


def no_lens(workload: Workload) -> np.ndarray:
    return np.full(NUM_ROWS, -1)


def extend(cache, i, prompt_len):
    return kv.extend(cache, jnp.ones(NUM_ROWS, jnp.int32), max_new=1)


def allocate(cache, i, prompt_len):
    return kv.allocate(cache, i[None], prompt_len[None])


def fork(cache, i, prompt_len):
    return kv.fork(cache, jnp.asarray(SOME), len(SOME) * (i + 1) + SOME)


def reorder(cache, i, prompt_len):
    """In beams of four each goes on from the one before it, so 16 rows' blocks come free."""
    return kv.reorder(cache, jnp.asarray(SOME), jnp.asarray(np.maximum(SOME - 1, SOME // 4 * 4)))


def free(cache, i, prompt_len):
    return kv.free(cache, len(SOME) * i + SOME)


def truncate(cache, i, prompt_len):
    return kv.truncate(cache, jnp.asarray(SOME), cache.context_len[: len(SOME)] - BLOCK_SIZE)


# With prefix caching. Every row has tokens of its own, so that nothing is found by accident.


def tokens_of(rows: jax.Array, positions: jax.Array) -> jax.Array:
    return (rows + 1) * MAX_SEQ_LEN + positions


def extend_with_index(cache, i, prompt_len):
    tokens = tokens_of(jnp.arange(NUM_ROWS, dtype=jnp.int32)[:, None], jnp.int32(0))
    return kv.extend(cache, jnp.ones(NUM_ROWS, jnp.int32), max_new=1, tokens=tokens)


def extend_and_commit(cache, i, prompt_len):
    cache, step = extend_with_index(cache, i, prompt_len)
    cache, status = kv.commit(cache)
    return cache, jnp.maximum(status, step.status)


def allocate_tokens(cache, i, prompt_len):
    """The prompt of row 0, which idle rows ask for one after the other."""
    tokens = tokens_of(jnp.int32(0), jnp.arange(MAX_SEQ_LEN, dtype=jnp.int32))
    return kv.allocate(cache, i[None] + 1, prompt_len[None], tokens=tokens[None])


def commit(cache, i, prompt_len):
    return kv.commit(cache, i[None])


def first_lens(workload: Workload) -> np.ndarray:
    """Row 0 holds the prompt; the others are idle."""
    return np.where(np.arange(NUM_ROWS) == 0, workload.prompt_len, -1)


def prompt_lens(workload: Workload) -> np.ndarray:
    """As many rows as the smallest pool has room for hold a prompt each."""
    return np.where(np.arange(NUM_ROWS) < 14, workload.prompt_len, -1)


OPERATIONS = (
    Operation(
        "extend 256 rows, 16 take a block", different_lens, extend, (400, 16), {LOOP: 40, ABOVE_FLOOR: 150}
    ),
    Operation("extend 256 rows, all take a block", half_lens, extend, (1, 1)),
    Operation("allocate a prompt, uncached", no_lens, allocate, (60, 14), {CALL: 1000}),
    Operation("fork 64 rows", some_lens, fork, (3, 3), {CALL: 1000}),
    Operation("reorder 64 rows", some_lens, reorder, (3, 3), {CALL: 2000}),
    Operation("free 64 rows", full_lens, free, (4, 4), {CALL: 1500}),
    Operation("truncate 64 rows by a block", some_lens, truncate, (50, 3)),
    Operation("extend 256 rows, with index", different_lens, extend_with_index, (400, 16), index=ROWS),
    Operation(
        "extend 256 rows, commit", different_lens, extend_and_commit, (400, 16), {LOOP: 80}, index=ROWS
    ),
    Operation(
        "extend 256 rows, evicting",
        different_lens,
        extend_with_index,
        (400, 16),
        {LOOP: 80},
        index=EVERYTHING,
    ),
    Operation(
        "extend 256 rows, evicting by hyperbolic",
        different_lens,
        extend_with_index,
        (100, 16),
        index=EVERYTHING,
        policy="hyperbolic",
    ),
    Operation("allocate a prompt, cached", first_lens, allocate_tokens, (60, 14), {CALL: 500}, index=ROWS),
    Operation(
        "allocate a prompt, not cached", no_lens, allocate_tokens, (60, 14), {CALL: 1000}, index=NOTHING
    ),
    Operation("commit a prompt", prompt_lens, commit, (14, 14), {CALL: 1000}, index=NOTHING),
    Operation("free 64 rows, published", full_lens, free, (4, 4), {CALL: 1500}, index=ROWS),
    Operation("reorder 64 rows, published", some_lens, reorder, (3, 3), {CALL: 2000}, index=ROWS),
)


def scattered(cache: kv.Cache) -> kv.Cache:
    """The empty cache, its blocks to be handed out in random order."""
    (pool,) = cache.control.block_pools
    order = np.random.default_rng(0).permutation(pool.num_blocks).astype(np.int32)
    pool = dataclasses.replace(pool, free_stack=jnp.asarray(order))
    return dataclasses.replace(cache, control=dataclasses.replace(cache.control, block_pools=(pool,)))


def prepare(operation: Operation, workload: Workload, num_blocks: int) -> kv.Cache:
    """The state before the operation's first step; its blocks lie scattered over the pool."""
    config = kv.CacheConfig(
        layers=[kv.FullAttention(num_kv_heads=1, head_dim=64)],
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_seqs=NUM_ROWS,
        max_seq_len=MAX_SEQ_LEN,
        enable_prefix_caching=operation.index is not None,
        eviction_policy=operation.policy,
    )
    cache = scattered(kv.init(config, storage=False))
    if operation.index == EVERYTHING:
        # Other tokens first, in every block, published and let go.
        per_row = jnp.full(NUM_ROWS, num_blocks // NUM_ROWS * BLOCK_SIZE, jnp.int32)
        cache, status = _fill(cache, per_row, 1_000_000, True, width=workload.prompt_len)
        require_ok(status, f"filling the pool for {operation.name}")
        cache, _ = kv.free(cache, np.arange(NUM_ROWS))
    lens = jnp.asarray(operation.lens(workload), jnp.int32)
    publish = operation.index in (ROWS, EVERYTHING)
    cache, status = _fill(cache, lens, 0, publish, width=workload.prompt_len)
    require_ok(status, f"preparing {operation.name}")
    return cache


@functools.partial(jax.jit, static_argnames="width")
def _fill(
    cache: kv.Cache, lens: jax.Array, salt: int, publish: bool, width: int
) -> tuple[kv.Cache, jax.Array]:
    """Rows of `lens` tokens, at most `width`; compiled once per pool, width and whether there is an index."""
    row = jnp.arange(cache.max_seqs, dtype=jnp.int32)
    tokens = None
    if cache.config.enable_prefix_caching:
        tokens = tokens_of(row[:, None], jnp.arange(width, dtype=jnp.int32)[None]) + salt
    seq_ids, num_new = jnp.where(lens < 0, cache.max_seqs, row), jnp.maximum(lens, 0)
    cache, _ = kv.allocate(cache, seq_ids, num_new, tokens=tokens)
    cache, step = kv.extend(cache, num_new, max_new=width, tokens=tokens)
    if tokens is not None:
        cache, _ = kv.commit(cache, jnp.where(publish, row, cache.max_seqs))
    return cache, step.status


def status_of(result: Any) -> jax.Array:
    return getattr(result, "status", result)


def require_ok(status: jax.Array, what: str) -> None:
    worst = int(np.max(np.asarray(status)))
    if worst != kv.Status.OK:
        raise RuntimeError(f"{what}: a row failed with {kv.Status(worst).name}")
