"""The time until a prompt's first prediction: prefilled as a whole, or composed of passages."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.chunks import rows
from experiments.chunks.rows import Prompts
from experiments.common import timing
from models.decoder import Decoder, forward

ASKED, NUM_ROUNDS = 40, 15
FULL, FIRST, DEVIATION = "full prefill", "first", "key deviation"
SHARES = 0.0, 0.1, 0.2, 0.5, 1.0


@functools.partial(jax.jit, donate_argnames="cache")
def _prefill(decoder: Decoder, cache: kv.Cache, tokens: jax.Array) -> tuple[kv.Cache, jax.Array]:
    """Reads i32[1, T] in one step, predicts what follows, and frees the row."""
    cache, _ = kv.allocate(cache, [0], [tokens.shape[1]])
    return _ended(decoder, cache, tokens)


@functools.partial(jax.jit, static_argnames=("selector", "num", "rotate"), donate_argnames="cache")
def _compose(
    decoder: Decoder,
    cache: kv.Cache,
    tokens: jax.Array,
    question: jax.Array,
    chunk_ids: jax.Array,
    starts: jax.Array,
    selector: str,
    num: int,
    rotate: tuple[rows.Rotate, ...],
) -> tuple[kv.Cache, jax.Array]:
    """Composes a row of its chunks i32[1, K], computes `num` tokens again, and then reads the question."""
    cache, _ = kv.allocate(cache, [0], [tokens.shape[1] + question.shape[1]])
    cache, _ = kv.chunks.compose(cache, [0], chunk_ids, starts, rotate=rotate)
    if num:
        found = kv.chunks.metadata(cache, chunk_ids, starts)
        if selector == DEVIATION:
            k_deviation, _ = rows.deviations(decoder, cache, tokens, jnp.arange(tokens.shape[1])[None])
            found = found._replace(k_deviation=k_deviation)
        places = kv.chunks.select_tokens(selector, found, [num], max_select=num)
        cache, _ = rows.rewrite(decoder, cache, tokens, places)
    return _ended(decoder, cache, question)


def _ended(decoder: Decoder, cache: kv.Cache, tokens: jax.Array) -> tuple[kv.Cache, jax.Array]:
    cache, step = kv.extend(cache, [tokens.shape[1]], max_new=tokens.shape[1])
    logits, cache = forward(decoder, tokens, cache, step)
    cache, _ = kv.free(cache, [0])
    return cache, logits[0, -1]


def measure(decoder: Decoder, prompts: Prompts, num_rounds: int = NUM_ROUNDS) -> list[dict[str, Any]]:
    """Times the first prompt's ways in turns; compilation is in the first call, which is told apart."""
    tokens, question, starts = prompts.tokens[:1], prompts.question[:1, :ASKED], prompts.starts[:1]
    whole = np.concatenate([tokens, question], axis=1)
    sizes = dict(num_chunks=starts.shape[1], max_chunk_len=prompts.chunk_len)
    cache = rows.empty_cache(decoder, max_seqs=1, max_seq_len=whole.shape[1], **sizes)
    lengths = np.full_like(starts, prompts.chunk_len)
    cache, chunk_ids = rows.stored(decoder, cache, prompts.chunks[:1], lengths)
    rotate = rows.rotations_of(decoder, tokens.shape[1])
    placed = dict(tokens=tokens, question=question, chunk_ids=chunk_ids, starts=starts, rotate=rotate)
    ways: dict[tuple[str, float], Any] = {(FULL, 1.0): functools.partial(_prefill, tokens=whole)}
    for selector, share in [*((FIRST, share) for share in SHARES), (DEVIATION, 0.2)]:
        num = round(share * (tokens.shape[1] - prompts.chunk_len))
        ways[selector, share] = functools.partial(_compose, selector=selector, num=num, **placed)
    seconds: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    for _ in range(1 + num_rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            cache, logits = run(decoder, cache)
            is_right = bool(jnp.isfinite(logits).all())
            seconds[way].append(time.perf_counter() - start)
            if not is_right:  # a row that failed must not look fast
                raise RuntimeError(f"{way}: the logits are not finite")
    full, records = seconds[FULL, 1.0], []
    for (way, share), (first, *times) in seconds.items():
        record = {"way": way, "share": share, "first_call_s": first}
        records.append(record | {"times_full": timing.ratios(times, full[1:]), **timing.summary(times)})
    return records
