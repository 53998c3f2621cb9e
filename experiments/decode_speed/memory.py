"""What paging saves in memory, counted by the library itself on control states without keys and values."""

import csv
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common.command import InputError

TRACE = "AzureLLMInferenceTrace_conv.csv"
WHERE = f"get {TRACE} from https://github.com/Azure/AzurePublicDataset (folder data)"
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_ROWS, NUM_DRAWS = 32, 20

BLOCK_SIZE = 16
# Blocks of the prompt and of each sample's own tokens.
PROMPTS = ((4, 4), (16, 4), (64, 8))
NUM_SAMPLES = (2, 4, 8, 16)


def memory_report(data: Path | None) -> dict:
    """Padding and sharing; `skipped` says why there is no padding."""
    if data is None:
        reason = f"no folder was named with --data or KVCACHE_DATA_DIR; {WHERE}"
        return {"padding": [], "skipped": reason, "sharing": sharing()}
    trace = next(iter(sorted(data.rglob(TRACE))), None)
    if trace is None:
        raise InputError(f"got --data {data}, expected {TRACE} in it: {WHERE}")
    return {"padding": padding(conversation_lens(trace)), "skipped": None, "sharing": sharing()}


def conversation_lens(trace: Path) -> np.ndarray:
    """i32[requests], tokens that each conversation holds when it ends: prompt and answer."""
    try:
        with trace.open(newline="", encoding="utf-8") as file:
            rows = [int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise InputError(f"{trace} cannot be read as the Azure trace ({error!r}): {WHERE}") from error
    if not rows or not 0 < min(rows) <= max(rows) < 2**31:
        raise InputError(
            f"{trace} has {len(rows)} requests, expected some, each of 1 to 2**31 - 1 tokens: {WHERE}"
        )
    return np.asarray(rows, np.int32)


def padding(lens: np.ndarray) -> list[dict]:
    """Unused share of the token slots, per block size: median and range over draws of i32[requests] lengths.

    Block size None is a dense cache as long as its longest row.
    """
    draws = np.random.default_rng(0).choice(lens, (NUM_DRAWS, NUM_ROWS))
    longest = int(draws.max())
    dense = [1 - draw.sum() / (NUM_ROWS * draw.max()) for draw in draws]
    records = [{"block_size": None, **_spread(dense)}]  # dense
    for block_size in BLOCK_SIZES:
        expected = (-(-draws // block_size)).sum(axis=1)
        cache, unused = _control(block_size, NUM_ROWS, longest, int(expected.max())), []
        for draw, wanted in zip(draws, expected, strict=True):
            num_blocks = int(_fill(cache, jnp.asarray(draw), max_new=longest))
            if num_blocks != wanted:
                raise RuntimeError(f"blocks of {block_size}: {num_blocks} used, expected each row rounded up")
            unused.append(1 - draw.sum() / (num_blocks * block_size))
        records.append({"block_size": block_size, **_spread(unused)})
    return records


def sharing() -> list[dict]:
    """Blocks that n samples of a prompt save by sharing it, counted and by the closed form.

    A prompt ends within a block, so that every sample but the last to write copies that block: it is one of
    the sample's own.
    """
    records = []
    for prompt_blocks, own_blocks in PROMPTS:
        rest = BLOCK_SIZE // 3
        prompt_len, own_len = prompt_blocks * BLOCK_SIZE + rest, own_blocks * BLOCK_SIZE - rest
        for num_samples in NUM_SAMPLES:
            apart = num_samples * (prompt_blocks + own_blocks)
            cache = _control(BLOCK_SIZE, num_samples, (prompt_blocks + own_blocks) * BLOCK_SIZE, apart)
            used = int(_sample(cache, prompt_len=prompt_len, own_len=own_len))
            records.append(
                {
                    "prompt_blocks": prompt_blocks,
                    "own_blocks": own_blocks,
                    "num_samples": num_samples,
                    "blocks_used": used,
                    "saved": 1 - used / apart,
                    "closed_form": prompt_blocks * (num_samples - 1) / apart,
                }
            )
    return records


def _control(block_size: int, max_seqs: int, max_seq_len: int, num_blocks: int) -> kv.Cache:
    sizes: Any = dict(
        block_size=block_size, max_seqs=max_seqs, max_seq_len=max_seq_len, num_blocks=num_blocks
    )
    return kv.init(kv.CacheConfig([kv.FullAttention(num_kv_heads=1, head_dim=64)], **sizes), storage=False)


@functools.partial(jax.jit, static_argnames="max_new")
def _fill(cache: kv.Cache, lens: jax.Array, max_new: int) -> jax.Array:
    """Blocks used once the rows hold `lens` tokens; a row that failed would show as too few."""
    cache, _ = kv.allocate(cache, jnp.arange(cache.max_seqs), lens)
    cache, _ = kv.extend(cache, lens, max_new=max_new)
    return kv.stats(cache).num_blocks_used


@functools.partial(jax.jit, static_argnames=("prompt_len", "own_len"))
def _sample(cache: kv.Cache, prompt_len: int, own_len: int) -> jax.Array:
    """Blocks used once every row holds the same prompt, computed once, and tokens of its own."""
    cache, _ = kv.allocate(cache, [0], [prompt_len])
    cache, _ = kv.extend(cache, [prompt_len], max_new=prompt_len, seq_ids=[0])
    others = jnp.arange(1, cache.max_seqs)
    cache, _ = kv.fork(cache, jnp.zeros_like(others), others)
    cache, _ = kv.extend(cache, jnp.full(cache.max_seqs, own_len), max_new=own_len)
    return jnp.where((cache.context_len == prompt_len + own_len).all(), kv.stats(cache).num_blocks_used, -1)


def _spread(shares: list[float]) -> dict[str, float]:
    return {"median": float(np.median(shares)), "least": float(min(shares)), "most": float(max(shares))}
