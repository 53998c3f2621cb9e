"""Attention of Flax NNX that decodes on a cache of blocks."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.attention.attention import attention
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.layers.plain import FullAttention
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.extend import extend

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "kvcache_jax.integrations.flax_nnx needs flax, of the extra `models`: pip install "
        "'kvcache_jax[models]'"
    ) from error


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention` that decodes causally, any number of tokens a call.

    It has Flax's parameters under Flax's names, so that either's state fits the other, and computes as Flax
    does where it does not decode. A call that decodes stores its tokens after all before them, in the rows
    of `kv_cache`: a prompt is one call. Its output equals the same tokens of a causal call on all of them.
    A call with more tokens than are left of `max_length` changes nothing and returns NaN, where Flax
    overwrites the last token. (With `is_causal=True` a decoding layer of Flax 0.12.8 attends to its first
    token alone.)

    Args:
      *args: As in Flax.
      **kwargs: As in Flax, with its own `attention_fn` alone. While it decodes there is no dropout, and
        `mask`, `sow_weights` and `input_positions` are refused.

    Attributes:
      kv_cache: An `nnx.Cache` with the cache that `init_cache` made, whose row `i` is element `i` of the
        batch, its axes flattened; None before. Operations such as `fork` work on it.

    Raises:
      ValueError: an option that is refused, a call before `init_cache`, or one without tokens or with more of
        them than `max_length`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from kvcache_jax.integrations.flax_nnx import MultiHeadAttention
      >>> layer = MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=nnx.Rngs(0))
      >>> x = jax.random.normal(jax.random.key(0), (3, 6, 8))
      >>> layer.init_cache(x.shape)
      >>> found = [layer(x[:, :4]), layer(x[:, 4:5]), layer(x[:, 5:])]
      >>> whole = layer(x, decode=False, is_causal=True)
      >>> bool(abs(jnp.concatenate(found, axis=1) - whole).max() < 1e-5)
      True
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                f"attention_fn is {self.attention_fn!r}, expected none: this layer's attention is the cache's"
            )
        self.kv_cache: nnx.Cache[Cache] | None = nnx.data(None)

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache.

        Args:
          input_shape: `(*batch, max_length, features)`.
          dtype: Of the stored keys and values.

        Raises:
          ValueError: no such shape, or no such dtype.
        """
        if np.ndim(input_shape) != 1 or len(input_shape) < 2:
            raise ValueError(f"input_shape is {input_shape!r}, expected (*batch, max_length, features)")
        *batch, max_length, _ = input_shape
        num_rows = math.prod(batch)
        layer = FullAttention(self.num_kv_heads, self.head_dim)
        cache = init(CacheConfig([layer], max_seqs=num_rows, max_seq_len=max_length, dtype=dtype))
        cache, _ = allocate(cache, list(range(num_rows)), [0] * num_rows)
        self.kv_cache = nnx.Cache(cache)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        decode: bool | None = None,
        deterministic: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Attends as Flax does, or, while it decodes, to the stored tokens and the call's own up to each.

        Arguments are Flax's: `inputs_q`, `inputs_k` and `inputs_v` `[*batch, num_tokens, features]` of the
        same tokens, and a result `[*batch, num_tokens, out_features]`.
        """
        decode = self.decode if decode is None else decode
        if not decode:
            options |= dict(deterministic=deterministic, is_causal=is_causal, decode=decode)
            shardings = dict(out_sharding=out_sharding, qkv_sharding=qkv_sharding)
            return super().__call__(inputs_q, inputs_k, inputs_v, **options, **shardings)
        given = [name for name, value in options.items() if value is not None and value is not False]
        if refused := sorted({*given} - {"rngs"}):  # of the dropout
            named = ", ".join(refused)
            raise ValueError(f"{named} is given, expected none while decoding: the cache says who is seen")
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate is {self.dropout_rate} while decoding, expected deterministic=True"
            )
        if self.kv_cache is None:
            raise ValueError("there is no cache to decode with: call init_cache first")
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k, expected both, or neither")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        q, k, v = (
            project(inputs, out_sharding=qkv_sharding)
            for project, inputs in ((self.query, inputs_q), (self.key, inputs_k), (self.value, inputs_v))
        )
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)

        *batch, num_tokens, _, _ = q.shape
        cache = self.kv_cache.get_value()
        q, k, v = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (q, k, v))
        if len(q) != cache.max_seqs:
            raise ValueError(
                f"inputs_q has the batch {tuple(batch)}, expected init_cache's {cache.max_seqs} rows"
            )
        cache, step = extend(cache, [num_tokens] * len(q), max_new=num_tokens)
        cache, out = attention(cache, 0, q, k, v, step)
        assert isinstance(out, jax.Array)
        self.kv_cache.set_value(cache)
        # A row that had no room has no answer; the others go on.
        out = jnp.where((step.status == Status.OK)[:, None, None, None], out, jnp.nan)
        return self.out(out.reshape(*batch, *out.shape[1:]), out_sharding=out_sharding)
