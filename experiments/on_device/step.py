"""The decoder's whole step for `experiments.first_gpu_run`, beside the bytes that it must read.

`models.decoder` with random bfloat16 parameters, on a cache of random keys and values whose blocks lie
scattered; all rows hold as many tokens. A launch is one step: `kv.extend`, all layers, the logits; the tokens
are given, and rows go back to where they started once per sample. The last step's logits are checked against
the same decoder in float32. Its roofline is every parameter and every
key and value of the rows, read once.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvcache_jax as kv
from experiments.bookkeeping.operations import scattered
from experiments.on_device.contests import OURS, XLA_ATTENTION, Contest, Program, Side, compiled, jax_program
from experiments.on_device.problem import error_of, random_pool
from kvcache_jax.attention.mosaic import interpreted
from kvcache_jax.core.backends import MOSAIC_GPU, XLA
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from models.rope import Llama3Scaling, Rope

TOLERANCE = 3e-2
"""Of the logits, as norms, from float32's. A rounding to bfloat16 is off by 2^-9 / sqrt(3), as a root of the
mean square; nine of them in each of 16 layers, independent of each other, make 1.4e-2: this is twice that."""

LLAMA_SCALING = Llama3Scaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)
LLAMA_1B = DecoderConfig(
    vocab_size=128256,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=16,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_seq_len=131072,
    rope=Rope(theta=500_000.0, scaling=LLAMA_SCALING),
    norm_eps=1e-5,
    tie_embeddings=True,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)
"""The shape of Llama-3.2-1B."""
TINY = dataclasses.replace(
    LLAMA_1B, vocab_size=32, hidden_size=64, mlp_size=32, num_layers=1, num_q_heads=2, num_kv_heads=1
)


class StepSizes(NamedTuple):
    """A decoder's rows, and the tokens that each holds after the last step of a sample."""

    batch: int
    context: int
    num_steps: int = 32
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"step of {self.batch} x {self.context} tokens"

    @property
    def start_len(self) -> int:
        return self.context - self.num_steps


STEPS = (StepSizes(8, 2048), StepSizes(32, 8192))
TINY_STEPS = (StepSizes(2, 32, num_steps=1),)


def param_bytes(decoder: Decoder) -> int:
    """Of the parameters that a step reads; an embedding that is not tied is read only in parts."""
    unread = 0 if decoder.config.tie_embeddings else decoder.embedding[...].nbytes
    return sum(leaf.nbytes for leaf in jax.tree.leaves(decoder)) - unread


def kv_bytes(config: DecoderConfig, sizes: StepSizes) -> int:
    """Of the keys and values that a step's rows hold, the mean over the steps of a sample; bfloat16."""
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    mean_len = sizes.context - (sizes.num_steps - 1) / 2
    return round(sizes.batch * mean_len * token_bytes)


def make_decoder(config: DecoderConfig = LLAMA_1B) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0))


def step_contest(
    decoder: Decoder,
    sizes: StepSizes,
    interpret: bool = False,
    laid_out: Callable[[Decoder], Decoder] = lambda decoder: decoder,
) -> tuple[Contest, list[Side]]:
    """XLA's attention and ours with the kernels, in bfloat16, as `laid_out`, both checked against float32."""
    expected = expected_logits(decoder, sizes)
    decoder = laid_out(decoder)
    num_bytes = param_bytes(decoder) + kv_bytes(decoder.config, sizes)
    wrong_by = functools.partial(error_of, expected=expected)
    contest = Contest(sizes.name, num_bytes, wrong_by, TOLERANCE, sizes.num_steps)
    xla = functools.partial(_prepare, decoder, sizes, XLA, False)
    ours = functools.partial(_prepare, decoder, sizes, MOSAIC_GPU, interpret)
    return contest, [Side(XLA_ATTENTION, xla), Side(OURS, ours, is_ours=True)]


def expected_logits(decoder: Decoder, sizes: StepSizes) -> np.ndarray:
    """f32[b, vocab_size] of the last step, all in float32, with the same parameters, keys and values."""
    with jax.default_matmul_precision("highest"):  # else a GPU multiplies float32 in fewer bits
        program = _prepare(_in_float32(decoder), sizes, XLA, False, sizes.num_steps)
    return program.result(program.run())


def _in_float32(decoder: Decoder) -> Decoder:
    config = dataclasses.replace(decoder.config, dtype=jnp.float32, param_dtype=jnp.float32)
    structure = jax.tree.structure(jax.eval_shape(lambda: make_decoder(config)))
    return structure.unflatten(leaf.astype(jnp.float32) for leaf in jax.tree.leaves(decoder))


def steps(cache: kv.Cache, decoder: Decoder, tokens: jax.Array, start_len: int) -> tuple[kv.Cache, jax.Array]:
    """Rows go back to `start_len` and take the tokens i32[steps, b], one a step; the last logits, f32."""
    batch, vocab_size = tokens.shape[1], decoder.config.vocab_size
    cache, status = kv.truncate(cache, jnp.arange(batch), jnp.full(batch, start_len))

    def body(carry: tuple[kv.Cache, jax.Array], tokens: jax.Array) -> tuple[tuple, None]:
        cache, logits = carry
        cache, step = kv.extend(cache, jnp.ones_like(tokens), max_new=1)
        # A row that found no room must not look fast.
        is_right = (step.status == kv.Status.OK) & ~jnp.isnan(logits[:, 0])
        logits, cache = forward(decoder, tokens[:, None], cache, step)
        return (cache, jnp.where(is_right[:, None], logits[:, 0], jnp.nan)), None

    is_right = (status == kv.Status.OK)[:, None]
    logits = jnp.broadcast_to(jnp.where(is_right, 0.0, jnp.nan), (batch, vocab_size))
    (cache, logits), _ = lax.scan(body, (cache, logits), tokens)
    return cache, logits


def _prepare(
    decoder: Decoder, sizes: StepSizes, implementation: str, interpret: bool, num_launches: int
) -> Program:
    shape = (num_launches, sizes.batch)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, decoder.config.vocab_size)
    held = [_filled_cache(decoder.config, sizes, implementation)]
    arguments, options = (decoder, tokens, sizes.start_len), dict(donate_argnums=0, static_argnums=3)
    with interpreted() if interpret else contextlib.nullcontext():
        program = compiled(steps, held[0], *arguments, **options)

    def run() -> jax.Array:
        cache, logits = program(held.pop(), decoder, tokens)
        held.append(cache)
        return logits

    return jax_program(run, interpret)


def _filled_cache(model: DecoderConfig, sizes: StepSizes, implementation: str) -> kv.Cache:
    """Random keys and values, the same in each dtype; the values large: attention must show in the logits."""
    shapes = dict(max_seqs=sizes.batch, max_seq_len=sizes.context, block_size=sizes.block_size)
    # XLA plans no work for the prompt, which is not attended to.
    cache = scattered(kv.init(cache_config(model, **shapes, implementation=XLA)))
    lens = np.full(sizes.batch, sizes.start_len, np.int32)
    cache, admission = kv.allocate(cache, np.arange(sizes.batch), lens)
    kv.raise_for_status(admission.status, "allocate")
    cache, step = kv.extend(cache, lens, max_new=sizes.start_len)
    kv.raise_for_status(step.status, "extend")
    (pool,) = cache.pools
    keys = jax.random.split(jax.random.key(0))
    shape, dtype, scales = pool.k.shape, pool.k.dtype, (1.0, math.sqrt(sizes.context))
    del pool
    drawn = zip("kv", keys, scales, strict=True)
    arrays = {name: random_pool(key, shape, scale).astype(dtype) for name, key, scale in drawn}
    config = dataclasses.replace(cache.config, implementation=implementation)
    return dataclasses.replace(cache, pools=(kv.state.KVPool(arrays=arrays),), config=config)
