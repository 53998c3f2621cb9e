"""Studies of what the model of bytes predicts: their command, how rows read, and what predictions are worth.

def main(arguments=None):
    return quality.run_study("experiments.some", __doc__, arguments, measure, bars_of, show, draw)
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import kvcache_jax as kv
from experiments.common import byte_model, command, corpus, report
from models.decoder import Decoder, forward


def run_study(
    module: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    measure: Callable[[Decoder], dict[str, Any]],
    bars_of: Callable[[dict[str, Any]], list[dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], None],
    beside: str | None = None,
) -> int:
    """Runs the command of a study: `measure` makes the report of a model, `bars_of` its bars."""
    parser = command.Parser(module, doc)
    report.add_options(parser)
    byte_model.add_option(parser)
    options = parser.parse_args(arguments)
    found = measure(byte_model.load(parser, options.checkpoint, beside=beside))
    found |= {"model": options.checkpoint.name, "bars": bars_of(found)}
    report.deliver(found, options, show, draw)
    return 0


def started(cache: kv.Cache) -> kv.Cache:
    cache, admission = kv.allocate(cache, np.arange(cache.max_seqs), [1] * cache.max_seqs)
    kv.raise_for_status(admission.status, "allocate")
    return cache


@jax.jit
def read(
    decoder: Decoder, cache: kv.Cache, tokens: ArrayLike, num_new: ArrayLike | None = None
) -> tuple[kv.Cache, jax.Array]:
    """Appends tokens i32[n, T] to rows, all of them or the first i32[n] of each.

    Returns the cache, and log-probabilities f32[n, T, vocab_size] of what follows each token.
    """
    tokens = jnp.asarray(tokens)
    if num_new is None:
        num_new = jnp.full(tokens.shape[0], tokens.shape[1])
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1])
    logits, cache = forward(decoder, tokens, cache, step)
    return cache, jax.nn.log_softmax(logits)


def held_out_windows(num_files: int, skipped: int, length: int) -> np.ndarray:
    """Cuts i32[num_files, length], a piece of each of the first held-out files that are long enough.

    What is `skipped` before a piece is alike in many files.
    """
    pieces = [file[skipped : skipped + length] for file in corpus.held_out_files().values()]
    pieces = [piece for piece in pieces if len(piece) == length][:num_files]
    return np.stack([np.frombuffer(piece, np.uint8) for piece in pieces]).astype(np.int32)


def bits(log_p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Computes the bits f64[n, T] that log-probabilities `[n, T.., vocab]` spend on targets i32[n, T]."""
    of_targets = np.asarray(log_p, np.float64)[:, : targets.shape[1]]
    return -np.take_along_axis(of_targets, targets[..., None], axis=-1)[..., 0] / math.log(2)


def kl(log_p: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Computes the divergence, in nats a token, of log-probabilities `[..., vocab]` from exact ones."""
    exact = exact.astype(np.float64)
    return (np.exp(exact) * (exact - log_p.astype(np.float64))).sum(axis=-1)
