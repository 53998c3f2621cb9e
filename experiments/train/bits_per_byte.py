"""How many bits a decoder spends on each byte of a text: what training lowers and evaluation reports.

Both run through the cache. An empty cache is a value: every window of the text starts from the same one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvcache_jax as kv
from experiments.common import corpus
from models.decoder import Decoder, DecoderConfig, cache_config, forward

BATCH = 4  # windows that are evaluated together


def empty_cache(config: DecoderConfig, num_rows: int, length: int) -> kv.Cache:
    """Rows with room for `length` tokens each, in one block."""
    sizes = cache_config(
        config, max_seqs=num_rows, num_blocks=num_rows, block_size=length, max_seq_len=length
    )
    cache, _ = kv.allocate(kv.init(sizes), np.arange(num_rows), [length] * num_rows)
    return cache


def losses(decoder: Decoder, windows: jax.Array, cache: kv.Cache) -> jax.Array:
    """Nats for each byte of the windows i32[n, T + 1] but their first: f32[n, T]."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    cache, step = kv.extend(cache, jnp.full(len(tokens), tokens.shape[1], jnp.int32), max_new=tokens.shape[1])
    logits, _ = forward(decoder, tokens, cache, step)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def bits_of_files(
    decoder: Decoder,
    files: Sequence[bytes],
    progress: Callable[[Sequence], Iterable] = iter,
) -> list[np.ndarray]:
    """Bits that the decoder spends on each byte, f32[len(file)] per file.

    A window is `max_seq_len` bytes, and the next one of the file starts half of that later:

        window 0   |== counted ==|== counted ==|
        window 1                 |-- context --|== counted ==|
        window 2                               |-- context --|== counted ==|

    So every byte counts once, predicted from all bytes of its file before it or from at least half a window.
    `progress` wraps the batches of windows, to show how far it got.
    """
    length = decoder.config.max_seq_len
    stride = max(1, length // 2)
    texts = [np.frombuffer(corpus.with_end(file), np.uint8) for file in files]
    starts = [
        (file_id, start)
        for file_id, file in enumerate(files)
        for start in range(0, max(0, len(file) - length) + stride, stride)
    ]
    bits = [np.full(len(file), np.nan, np.float32) for file in files]
    cache = empty_cache(decoder.config, BATCH, length)
    for batch in progress(list(itertools.batched(starts, BATCH))):
        windows = np.zeros((BATCH, length + 1), np.int32)
        for row, (file_id, start) in enumerate(batch):
            piece = texts[file_id][start : start + length + 1]
            windows[row, : len(piece)] = piece
        found = np.asarray(_losses(decoder, windows, cache)) / math.log(2)
        for row, (file_id, start) in enumerate(batch):
            first = 0 if start == 0 else length - stride
            counted = bits[file_id][start + first : start + length]
            counted[:] = found[row, first : first + len(counted)]
    return bits


_losses = jax.jit(losses)
