"""What `experiments.decode_speed` times: the ways to decode, and the rows that they decode."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.bookkeeping.operations import scattered
from experiments.decode_speed import dense_decoder
from models.decoder import Decoder, DecoderConfig, cache_config, forward

BATCH, TABLE_LEN, BLOCK_SIZE, NUM_STEPS = 8, 4096, 16, 8
PAGED, ALONE, UNCACHED = "paged", "no attention", "no cache"
DENSE = tuple(f"dense {layout}" for layout in dense_decoder.LAYOUTS)


class Case(NamedTuple):
    """Rows to decode: the tokens that each holds after the last step, in a table of `table_len`."""

    name: str
    table_len: int
    lens: tuple[int, ...]

    @property
    def start_lens(self) -> np.ndarray:
        return np.asarray(self.lens, np.int32) - NUM_STEPS


def even(fill: float = 1.0, batch: int = BATCH) -> Case:
    length = round(fill * TABLE_LEN)
    return Case(f"{batch} rows of {length:,} in {TABLE_LEN:,}", TABLE_LEN, (length,) * batch)


FULL = even()
SHORT = Case("8 rows at 3-7% of 4,096", TABLE_LEN, tuple(int(x) for x in np.linspace(123, 286, BATCH)))
FILLS = [even(fill) for fill in (0.05, 0.125, 0.25, 0.5)]
BATCHES = [even(batch=batch) for batch in (1, 2, 4, 16)]


class Contexts(NamedTuple):
    """What the rows hold: tokens i32[b, t], keys and values `[num_layers, b, t, num_kv_heads, d]`."""

    tokens: jax.Array
    k: jax.Array
    v: jax.Array

    def cut(self, case: Case) -> "Contexts":
        """As many rows as the case has, in turn, as long as its table."""
        rows = np.arange(len(case.lens)) % len(self.tokens)
        k, v = (x[:, rows, : case.table_len] for x in (self.k, self.v))
        return Contexts(self.tokens[rows, : case.table_len], k, v)


def make_contexts(decoder: Decoder, num_rows: int = 2, length: int = TABLE_LEN) -> Contexts:
    tokens = np.random.default_rng(0).integers(decoder.config.vocab_size, size=(num_rows, length))
    tokens = jnp.asarray(tokens, jnp.int32)
    return Contexts(tokens, *jax.jit(dense_decoder.keys_and_values)(decoder, tokens))


@dataclasses.dataclass(frozen=True)
class Side:
    """A way to decode, from a state that holds the first `start_lens` tokens.

    `step` takes tokens i32[b] and gives logits f32[b, vocab_size], by what `prepare` makes of the decoder.
    """

    name: str
    start: Callable[[DecoderConfig, Case, Contexts], Any]
    step: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
    rewind: Callable[[Any, np.ndarray], Any]
    prepare: Callable[[Decoder], Any] = lambda decoder: decoder


def _start_paged(config: DecoderConfig, case: Case, contexts: Contexts, **options: Any) -> kv.Cache:
    rows = np.arange(len(case.lens))
    sizes = dict(max_seqs=len(rows), max_seq_len=case.table_len, block_size=BLOCK_SIZE)
    cache = scattered(kv.init(cache_config(config, **sizes, **options)))
    cache, admission = kv.allocate(cache, rows, case.start_lens)
    kv.raise_for_status(admission.status, "allocate")
    cache, step = kv.donate(kv.append)(cache, contexts.k, contexts.v, case.start_lens)
    kv.raise_for_status(step.status, "append")
    return cache


def _step_paged(decoder: Decoder, tokens: jax.Array, cache: kv.Cache) -> tuple[jax.Array, kv.Cache]:
    cache, step = kv.extend(cache, jnp.ones_like(tokens), max_new=1)
    logits, cache = forward(decoder, tokens[:, None], cache, step)
    # A row that found no room must not look fast.
    return jnp.where(step.status[:, None] == kv.Status.OK, logits[:, 0], jnp.nan), cache


def paged_side(name: str, **options: Any) -> Side:
    """The paged cache, with options of `cache_config`."""
    return Side(name, functools.partial(_start_paged, **options), _step_paged, _rewind_paged)


def _rewind_paged(cache: kv.Cache, start_lens: np.ndarray) -> kv.Cache:
    cache, status = kv.truncate(cache, np.arange(len(start_lens)), start_lens)
    kv.raise_for_status(status, "truncate")
    return cache


def _dense(layout: dense_decoder.Layout) -> Side:
    return Side(
        f"dense {layout}",
        lambda _, case, held: dense_decoder.dense_cache(held.k, held.v, case.start_lens, layout),
        functools.partial(dense_decoder.dense_step, layout=layout),
        lambda cache, start_lens: cache._replace(context_len=jnp.asarray(start_lens)),
        dense_decoder.unstacked,
    )


def _step_alone(
    decoder: dense_decoder.Unstacked, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x = tokens[:, None], position[:, None]
    return dense_decoder.run(decoder, *x, dense_decoder.no_attention)[:, 0], position + 1


SIDES = (paged_side(PAGED), *(_dense(layout) for layout in dense_decoder.LAYOUTS))
ALONE_SIDE = Side(
    ALONE,
    lambda _, case, __: jnp.asarray(case.start_lens),
    _step_alone,
    lambda _, lens: jnp.asarray(lens),
    dense_decoder.unstacked,
)
