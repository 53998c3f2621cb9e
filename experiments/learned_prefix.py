"""Question: can one train through the cache: a prefix that is stored once, forked, copied on write, attended?

Command: python -m experiments.learned_prefix [--json] [--steps N]
Machine: 2 cores of an AMD EPYC, busy with other work; jax 0.12.0
Answer:  yes. After 40 steps 1.85 to 1.86 bits per byte at three seeds, 2.04 without a prefix (2.05 to 2.14
  after the prefix as it started). The gradient is the dense reference's to 7e-7. What it takes of memory
  prints `python -m tests.attention.gradient_program`.
Record:  experiments/results/learned_prefix.json.

The decoder stays as it is. What is learned are the keys and values of PREFIX_LEN tokens that are no text
(prefix tuning): in every step they are appended to one row of an empty cache, that row is forked to the rows
of the batch, each row copies the last, shared block when it extends by its own tokens, and the gradient comes
back through all of that. The text is held-out source in capital letters, which the model has hardly seen.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvcache_jax as kv
from experiments.common import byte_model, command, corpus, timing
from experiments.common.report import add_options, at_most, deliver, framed
from experiments.decode_speed import dense_decoder
from experiments.train import bits_per_byte
from models.decoder import Decoder, DecoderConfig, cache_config, forward

PREFIX_LEN, BLOCK_SIZE = 20, 16  # the prefix ends within a block
NUM_ROWS, LENGTH = 8, 128
SEEDS = (0, 1, 2)
LEARNING_RATE = 0.03
NUM_BATCHES = 8  # that are measured, of NUM_ROWS windows each


class Prefix(NamedTuple):
    """Learned keys and values, f32[num_layers, prefix_len, num_kv_heads, head_dim]."""

    k: jax.Array
    v: jax.Array


def prefix_of(decoder: Decoder, tokens: jax.Array) -> Prefix:
    """What a cache keeps of tokens i32[prefix_len]."""
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=len(tokens), block_size=BLOCK_SIZE)
    cache, _ = kv.allocate(kv.init(config), [0], [len(tokens)])
    cache, step = kv.extend(cache, [len(tokens)], max_new=len(tokens))
    _, cache = forward(decoder, tokens[None], cache, step)
    layers = [kv.gather(cache, 0, layer)[:2] for layer in range(decoder.config.num_layers)]
    return Prefix(*map(jnp.stack, zip(*layers, strict=True)))


def empty_cache(config: DecoderConfig, prefix_len: int, num_rows: int, length: int) -> kv.Cache:
    """Row 0 is for the prefix; as many blocks as the batch needs when the others share it."""
    shared, prefix_blocks = prefix_len // BLOCK_SIZE, -(-prefix_len // BLOCK_SIZE)
    own_blocks = -(-(prefix_len + length) // BLOCK_SIZE) - shared
    num_blocks = prefix_blocks + num_rows * own_blocks
    sizes = dict(max_seqs=1 + num_rows, max_seq_len=prefix_len + length, block_size=BLOCK_SIZE)
    cache = kv.init(cache_config(config, **sizes, num_blocks=num_blocks))
    return kv.allocate(cache, [0], [prefix_len])[0]


def losses(prefix: Prefix, decoder: Decoder, windows: jax.Array, cache: kv.Cache) -> jax.Array:
    """Nats for each byte of the windows i32[n, T + 1] but their first, after the prefix: f32[n, T]."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    rows = jnp.arange(1, 1 + len(tokens), dtype=jnp.int32)
    cache, stored = kv.append(cache, prefix.k[:, None], prefix.v[:, None], [prefix.k.shape[1]], seq_ids=[0])
    cache, forked = kv.fork(cache, jnp.zeros_like(rows), rows)
    cache, step = kv.extend(
        cache, jnp.full_like(rows, tokens.shape[1]), max_new=tokens.shape[1], seq_ids=rows
    )
    logits, _ = forward(decoder, tokens, cache, step)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    is_ok = [(status == kv.Status.OK).all() for status in (stored.status, forked, step.status)]
    return jnp.where(jnp.stack(is_ok).all(), nats, jnp.nan)


def dense_losses(prefix: Prefix, decoder: Decoder, windows: jax.Array) -> jax.Array:
    """The same without a cache: the prefix is before the rows' own keys and values."""
    tokens, targets = windows[:, :-1], windows[:, 1:]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        before = (jnp.broadcast_to(x[layer], (len(k), *x.shape[1:])) for x in prefix)
        k, v = (jnp.concatenate(pair, axis=1) for pair in zip(before, (k, v), strict=True))
        return dense_decoder.causal_attention(layer, q, k, v)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]) + prefix.k.shape[1], tokens.shape)
    logits = dense_decoder.run(decoder, tokens, positions, attend)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def gradient_error(decoder: Decoder, prefix: Prefix, windows: jax.Array, cache: kv.Cache) -> float:
    """Largest difference to the dense reference's gradient, in its largest entry."""
    through_cache = jax.jit(jax.grad(lambda *x: losses(*x).sum()))(prefix, decoder, windows, cache)
    dense = jax.jit(jax.grad(lambda *x: dense_losses(*x).sum()))(prefix, decoder, windows)
    errors = [
        jnp.abs(got - want).max() / jnp.abs(want).max()
        for got, want in zip(through_cache, dense, strict=True)
    ]
    return float(jnp.stack(errors).max())


@functools.partial(jax.jit, static_argnames="optimizer")
def update(prefix, optimizer_state, decoder, windows, cache, *, optimizer):
    """One step: the new prefix, the new state, the mean loss in nats."""
    loss, gradient = jax.value_and_grad(lambda prefix: losses(prefix, decoder, windows, cache).mean())(prefix)
    changes, optimizer_state = optimizer.update(gradient, optimizer_state)
    return optax.apply_updates(prefix, changes), optimizer_state, loss


def learn(
    decoder: Decoder, text: np.ndarray, cache: kv.Cache, prefix: Prefix, seed: int, num_steps: int
) -> tuple[Prefix, list[float]]:
    """The prefix after so many updates on random windows of the text, and the bits per byte of each."""
    num_rows = cache.max_seqs - 1
    length = cache.config.max_seq_len - prefix.k.shape[1]
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, num_steps))
    optimizer_state, bits = optimizer.init(prefix), []
    for step in range(num_steps):
        windows = corpus.windows(text, seed, step, num_rows, length)
        prefix, optimizer_state, loss = update(
            prefix, optimizer_state, decoder, windows, cache, optimizer=optimizer
        )
        bits.append(float(loss) / math.log(2))
    return prefix, bits


def read_texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to learn from, and bytes to measure on."""
    files = [file.upper() for file in corpus.held_out_files().values()]
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in (files[::2], files[1::2]))  # type: ignore


def mean_bits(nats: Callable[[np.ndarray], jax.Array], text: np.ndarray) -> float:
    """Bits per byte on windows of the text that are the same in every call."""
    means = [
        float(nats(corpus.windows(text, 0, batch, NUM_ROWS, LENGTH)).mean()) for batch in range(NUM_BATCHES)
    ]
    return float(np.mean(means)) / math.log(2)


def measure(decoder: Decoder, num_steps: int) -> dict:
    learn_from, held_out = read_texts()
    cache = empty_cache(decoder.config, PREFIX_LEN, NUM_ROWS, LENGTH)
    nothing = bits_per_byte.empty_cache(decoder.config, NUM_ROWS, LENGTH)
    with_prefix, without = jax.jit(losses), jax.jit(bits_per_byte.losses)
    bits_without = mean_bits(lambda windows: without(decoder, windows, nothing), held_out)

    def bits_behind(prefix: Prefix) -> float:
        return mean_bits(lambda windows: with_prefix(prefix, decoder, windows, cache), held_out)

    seeds, error = [], 0.0
    for seed in SEEDS:
        windows = jnp.asarray(corpus.windows(learn_from, seed, num_steps, NUM_ROWS, LENGTH))
        start = time.perf_counter()
        first = jax.jit(prefix_of)(decoder, windows[0, :PREFIX_LEN])
        error = max(error, gradient_error(decoder, first, windows, cache)) if seed == SEEDS[0] else error
        prefix, bits = learn(decoder, learn_from, cache, first, seed, num_steps)
        found = {"seed": seed, "before": bits_behind(first), "after": bits_behind(prefix)}
        seeds.append(found | {"training_bits": bits, "seconds": time.perf_counter() - start})
    return {"num_steps": num_steps, "without": bits_without, "seeds": seeds, "error": error}


def bars_of(measured: dict) -> list[dict]:
    after = {f"bits per byte, seed {seed['seed']}": seed["after"] for seed in measured["seeds"]}
    bars = [at_most(what, bits, measured["without"]) for what, bits in after.items()]
    return [at_most("gradient, off the dense reference", measured["error"], 1e-4), *bars]


COLUMNS = {
    "prefix": f"{PREFIX_LEN} tokens, seed {{seed}}",
    "held-out text": "{after:.3f}",
    "as it started": "{before:.3f}",
    "time": "{seconds:.0f} s",
}


@framed
def show(report: dict) -> None:
    title = f"bits per byte, capital letters; {report['num_steps']} steps; {report['without']:.3f} without"
    timing.show_records(title, COLUMNS, report["seeds"])


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.learned_prefix", __doc__)
    add_options(parser, draws=False)
    parser.count("--steps", 40, "updates per seed")
    byte_model.add_option(parser)
    options = parser.parse_args(arguments)
    measured = measure(byte_model.load(parser, options.checkpoint), options.steps)
    return deliver(measured | {"bars": bars_of(measured)}, options, show)


if __name__ == "__main__":
    command.run(main)
