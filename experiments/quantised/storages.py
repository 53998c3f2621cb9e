"""The ways to store keys and values that `experiments.quantised` compares, and what a model makes of each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.common import quality
from experiments.decode_speed import dense_decoder
from models.decoder import Decoder, DecoderConfig, cache_config

BLOCK_SIZE = 16
GROUP = 16  # tokens that share a step where keys are rounded per channel
FLOAT32, BFLOAT16, ROTATED = "float32", "bfloat16", "int4 rotated"


@dataclasses.dataclass(frozen=True)
class Storage:
    """A way to store keys and values.

    Attributes:
      name: As printed.
      quantise: From a layer's kind to that of fewer bits; None for none.
      dtype: Of the cache.
    """

    name: str
    quantise: Callable[[kv.LayerKind], kv.LayerKind] | None = None
    dtype: Any = jnp.float32

    @property
    def options(self) -> dict[str, Any]:
        """Of `cache_config`."""
        return {"quantise": self.quantise, "dtype": self.dtype}


def _quantised(name: str, **options: Any) -> Storage:
    return Storage(name, functools.partial(kv.Quantised, **options))


STORAGES = (
    Storage(FLOAT32),
    Storage(BFLOAT16, dtype=jnp.bfloat16),
    _quantised("int8", format="int8"),
    _quantised("fp8", format="fp8"),
    _quantised("int4", format="int4"),
    _quantised(ROTATED, format="int4", rotate=True),
)


def token_bytes(config: DecoderConfig, storage: Storage) -> int:
    """Bytes of a token in the cache, of all layers, scales included."""
    sizes = cache_config(config, num_blocks=1, block_size=BLOCK_SIZE, **storage.options)
    num_bytes, rest = divmod(kv.memory_bytes(sizes), BLOCK_SIZE)
    assert not rest
    return num_bytes


def stored_log_p(decoder: Decoder, windows: np.ndarray, storage: Storage) -> np.ndarray:
    """Log-probabilities f32[n, T, vocab_size] of what follows each token of the windows i32[n, T + 1].

    All tokens are appended in one step, and every layer reads from the cache what that stored of them.
    """
    num_rows, length = windows[:, :-1].shape
    sizes = dict(max_seqs=num_rows, block_size=BLOCK_SIZE, max_seq_len=length)
    cache = kv.init(cache_config(decoder.config, **sizes, **storage.options))
    return np.asarray(quality.read(decoder, quality.started(cache), windows[:, :-1])[1])


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A way to round keys and values without a cache.

    Attributes:
      num_bits: Of a number.
      keys: "per token" and head, or "per channel": per head and place in a vector, for `GROUP` tokens.
      values: "per token", or "as they are".
    """

    num_bits: int
    keys: str
    values: str = "per token"


ROUNDINGS = (
    Rounding(4, "per token"),
    Rounding(4, "per channel"),
    Rounding(2, "per token"),
    Rounding(2, "per channel"),
    Rounding(2, "per token", "as they are"),
    Rounding(2, "per channel", "as they are"),
)


def rounded_log_p(decoder: Decoder, windows: np.ndarray, rounding: Rounding) -> np.ndarray:
    """`stored_log_p` of rounded keys and values in dense attention; one program for all roundings."""
    ways = [way for way, _ in _WAYS]
    found = ways.index(rounding.keys), ways.index(rounding.values), 2**rounding.num_bits - 1
    return np.asarray(_rounded_log_p(decoder, jnp.asarray(windows[:, :-1]), *map(jnp.int32, found)))


@jax.jit
def _rounded_log_p(
    decoder: Decoder, tokens: jax.Array, keys: jax.Array, values: jax.Array, most: jax.Array
) -> jax.Array:
    unstacked, functions = dense_decoder.unstacked(decoder), [function for _, function in _WAYS]

    def of_row(row: jax.Array) -> jax.Array:
        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k, v = (lax.switch(way, functions, x, most) for way, x in ((keys, k), (values, v)))
            return dense_decoder.causal_attention(layer, q, k, v)

        positions = jnp.arange(len(row))
        return jax.nn.log_softmax(dense_decoder.run(unstacked, row[None], positions[None], attend)[0])

    return lax.map(of_row, tokens)  # one at a time, for the memory of their scores


def per_token(x: jax.Array, most: jax.Array) -> jax.Array:
    """Rounds `[b, t, h, d]` to steps 0 to `most` between the least and the greatest number of each vector."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = jnp.maximum((high - low) / most.astype(x.dtype), 1e-6)
    return jnp.round((x - low) / step) * step + low


def per_channel(x: jax.Array, most: jax.Array) -> jax.Array:
    """Rounds `[b, t, h, d]` to such steps, a place in the vectors of `GROUP` tokens at a time.

    The least number is kept as it is. Tokens that fill no group stay as they are, as in KIVI.
    """
    num_tokens = x.shape[1] - x.shape[1] % GROUP
    groups = x[:, :num_tokens].reshape(x.shape[0], -1, GROUP, *x.shape[2:])
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    step = jnp.maximum((high - low) / most.astype(x.dtype), 1e-6)
    rounded = jnp.round((groups - low) / step) * step + low
    return jnp.concatenate([rounded.reshape(x[:, :num_tokens].shape), x[:, num_tokens:]], axis=1)


_WAYS = (("as they are", lambda x, most: x), ("per token", per_token), ("per channel", per_channel))


def compared(log_p: np.ndarray, exact: np.ndarray, windows: np.ndarray) -> dict[str, Any]:
    """Compares log-probabilities with exact ones: bits per byte added, and nats of KL divergence to those.

    Returns:
      "bits_added", its parts "of_each" window, and "kl".
    """
    targets = windows[:, 1:]
    added = (quality.bits(log_p, targets) - quality.bits(exact, targets)).mean(axis=1)
    kl = quality.kl(log_p, exact).mean()
    return {"bits_added": float(added.mean()), "of_each": added.tolist(), "kl": float(kl)}
