"""Rows that read passages, or are composed of them: the steps of `experiments.chunks`."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import corpus
from experiments.common.quality import read, started
from experiments.decode_speed import dense_decoder
from models.decoder import Decoder, cache_config, forward
from models.rope import Rope

NUM_FILES, NUM_CHUNKS, CHUNK_LEN = 12, 4, 160
SAME, MIXED = "same", "mixed"
_SKIPPED, _LEAST_LEN = 2500, 5800  # what a file begins with is alike in many
BLOCK_SIZE = 16
Rotate = Callable[[jax.Array, jax.Array], jax.Array]
_store = jax.jit(kv.chunks.store)
_compose = jax.jit(kv.chunks.compose, static_argnames="rotate")


class Prompts(NamedTuple):
    """Prompts of equal lengths.

    Attributes:
      name: "same": the passages follow one another in a file, and the question is what comes next. "mixed":
        they are of several files, and the question begins as the second one does, and goes on with it.
      chunks: i32[n, NUM_CHUNKS, chunk_len].
      question: i32[n, question_len].
      first_scored: The first place of the question whose prediction counts.
      others: i32[n, chunk_len], a passage of another file.
    """

    name: str
    chunks: np.ndarray
    question: np.ndarray
    first_scored: int
    others: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.chunks)

    @property
    def chunk_len(self) -> int:
        return self.chunks.shape[2]

    @property
    def tokens(self) -> np.ndarray:
        """i32[n, NUM_CHUNKS * chunk_len], the passages."""
        return self.chunks.reshape(self.num_rows, -1)

    @property
    def starts(self) -> np.ndarray:
        """i32[n, NUM_CHUNKS], where the passages begin."""
        return np.tile(self.chunk_len * np.arange(self.chunks.shape[1], dtype=np.int32), (self.num_rows, 1))


def read_prompts(num_files: int = NUM_FILES, chunk_len: int = CHUNK_LEN) -> list[Prompts]:
    """Makes the prompts, one of each kind for each of the first held-out files that are long enough."""
    length, asked_len = NUM_CHUNKS * chunk_len, chunk_len // 4
    files = [file for file in corpus.held_out_files().values() if len(file) > _LEAST_LEN][:num_files]
    files = [np.frombuffer(file, np.uint8).astype(np.int32) for file in files]

    def piece(i: int, start: int, length: int = chunk_len) -> np.ndarray:
        return files[i % len(files)][_SKIPPED + start :][:length]

    each = range(len(files))
    passages = np.stack([piece(i, 0, length).reshape(NUM_CHUNKS, chunk_len) for i in each])
    others = np.stack([piece(i + 5, 1000) for i in each])
    asked = np.stack([piece(i, 500) for i in each])
    mixed = np.stack([[piece(i + 3, 0), asked[i], piece(i + 7, 0), piece(i + 3, 1500)] for i in each])
    return [
        Prompts(SAME, passages, np.stack([piece(i, length) for i in each]), 0, others),
        Prompts(MIXED, mixed, asked, asked_len, others),
    ]


def rotations_of(decoder: Decoder, max_distance: int) -> tuple[Rotate, ...]:
    """Makes the rotations of each layer's keys by up to `max_distance` positions, equal ones once."""

    @functools.cache
    def rotation(rope: Rope) -> Rotate:
        frequencies = rope.frequencies(decoder.config.rope_dim)
        return kv.chunks.key_rotation(frequencies, max_distance, is_interleaved=rope.is_interleaved)

    return tuple(rotation(rope) for rope in decoder.config.layer_ropes if rope is not None)


def empty_cache(
    decoder: Decoder, *, max_seqs: int, max_seq_len: int, num_chunks: int, max_chunk_len: int
) -> kv.Cache:
    blocks_of_row, blocks_of_chunk = -(-max_seq_len // BLOCK_SIZE), -(-max_chunk_len // BLOCK_SIZE) + 1
    num_blocks = max_seqs * blocks_of_row + num_chunks * blocks_of_chunk
    sizes = dict(max_seqs=max_seqs, max_seq_len=max_seq_len, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    store = kv.chunks.Store(num_chunks, max_chunk_len)
    return kv.init(cache_config(decoder.config, **sizes, extras=[store]))


def repaired(decoder: Decoder, cache: kv.Cache, tokens: np.ndarray, places: np.ndarray) -> kv.Cache:
    """Computes tokens of all rows again: of the rows' tokens i32[n, S] those at the places i32[n, T]."""
    cache, status = _repair(decoder, cache, tokens, places)
    kv.raise_for_status(status, "rewrite")
    return cache


@jax.jit
def _repair(
    decoder: Decoder, cache: kv.Cache, tokens: jax.Array, places: jax.Array
) -> tuple[kv.Cache, jax.Array]:
    cache, step = rewrite(decoder, cache, tokens, places)
    return cache, step.status


def rewrite(
    decoder: Decoder, cache: kv.Cache, tokens: jax.Array, places: jax.Array
) -> tuple[kv.Cache, kv.Step]:
    """Computes the tokens at places again; part of a program."""
    cache, step = kv.rewrite(cache, jnp.arange(len(places)), places)
    new = jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[1] - 1), axis=1)
    _, cache = forward(decoder, new, cache, step)
    return cache, step


def stored(
    decoder: Decoder, cache: kv.Cache, passages: np.ndarray, lengths: np.ndarray
) -> tuple[kv.Cache, np.ndarray]:
    """Computes passages i32[n, K, T] of `lengths` i32[n, K], each alone, and stores them.

    The cache has n idle rows, which are idle again afterwards. Returns it, and the ids i32[n, K].
    """
    ids, each = [], np.arange(cache.max_seqs)
    for tokens, num in zip(passages.swapaxes(0, 1), lengths.T, strict=True):
        cache, _ = read(decoder, started(cache), tokens, num)
        cache, found = _store(cache, each, 0 * each, num, tokens)
        kv.raise_for_status(found.status, "store_chunk")
        cache, _ = kv.free(cache, each)
        ids.append(np.asarray(found.chunk_ids))
    return cache, np.stack(ids, axis=1)


def composed(
    cache: kv.Cache,
    chunk_ids: np.ndarray,
    starts: np.ndarray,
    rotate: Rotate | Sequence[Rotate | None] | None,
) -> kv.Cache:
    """Starts all rows, which are idle, and composes them of chunks i32[n, K] at their starts."""
    cache, status = _compose(started(cache), np.arange(cache.max_seqs), chunk_ids, starts, rotate=rotate)
    kv.raise_for_status(status, "compose")
    return cache


@jax.jit
def inter_attention(decoder: Decoder, cache: kv.Cache, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Computes what tokens give to all that is in front of their passage, mean of heads and layers.

    The rows were prefilled, and do not change; tokens i32[n, T] are a passage of each. Returns
    f32[n, max_seq_len], 0 but at the places.
    """
    cache, step = kv.rewrite(cache, jnp.arange(len(places)), places)
    starts, lengths = places[:, :1], jnp.full((len(places), 1), places.shape[1])
    found = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = kv.attention_scores(cache, layer, q, step)
        found.append(kv.chunks.attention(scores, places, starts, lengths))
        return _attended(cache, layer, q, step)

    dense_decoder.run(dense_decoder.unstacked(decoder), tokens, step.positions, attend)
    return jnp.stack(found).mean(axis=0)


@jax.jit
def deviations(
    decoder: Decoder, cache: kv.Cache, tokens: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes how far stored keys and values of the second layer are from new ones, f32[n, max_seq_len].

    In the first layer they depend on the token and its position alone, and so are right in composed rows;
    new ones of the second need the first layer of all tokens i32[n, S]. The rows do not change.
    """
    cache, step = kv.rewrite(cache, jnp.arange(len(places)), places)
    found = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if layer == 0:
            return _attended(cache, layer, q, step)
        found.append(kv.chunks.deviation(cache, layer, k, v, step)[1])
        return q  # the result is not read

    unstacked = dense_decoder.unstacked(decoder)
    two_layers = dense_decoder.Unstacked(unstacked.decoder, unstacked.layers[:2])
    dense_decoder.run(two_layers, tokens, step.positions, attend)
    (of_both,) = found
    return of_both


def _attended(cache: kv.Cache, layer: int, q: jax.Array, step: kv.Step) -> jax.Array:
    _, out = kv.attend(cache, layer, q, step)
    assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
    return out
