"""A layer's attention: what it makes of a token for the cache, and of what it reads there for the token."""

import jax
import jax.numpy as jnp
from flax import nnx

import kvcache_jax as kv
from models.config import DecoderConfig, Latents
from models.layers import Linear, RMSNorm, residual_gain
from models.rope import Rotation, rotate

Place = int | tuple[int, jax.Array]
"""Of a layer in the cache: its group, and i32[], the index in it."""

MOST_ABSORBED = 128
"""New tokens of a row for which there is room: up to here latents are read as they are, beyond expanded."""


def new_attention(config: DecoderConfig, rngs: nnx.Rngs) -> "Attention | LatentAttention":
    """Makes the attention that the model has."""
    if config.latents is None:
        return Attention(config, rngs)
    return LatentAttention(config, rngs, config.latents)


class Attention(nnx.Module):
    """Grouped-query attention; all it knows of the past is in the cache."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        self.soft_cap = config.attention_soft_cap
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(config, rngs, config.hidden_size, q_size, use_bias=config.use_qkv_bias)
        self.k = Linear(config, rngs, config.hidden_size, kv_size, use_bias=config.use_qkv_bias)
        self.v = Linear(config, rngs, config.hidden_size, kv_size, use_bias=config.use_qkv_bias)
        self.gate = Linear(config, rngs, config.hidden_size, q_size) if config.use_attention_gate else None
        gain, use_bias = residual_gain(config), config.use_out_bias
        self.out = Linear(config, rngs, q_size, config.hidden_size, gain=gain, use_bias=use_bias)
        self.norm_spans_heads = config.qk_norm_spans_heads
        q_normed, k_normed = (q_size, kv_size) if self.norm_spans_heads else (config.head_dim,) * 2
        self.q_norm = RMSNorm(config, q_normed) if config.use_qk_norm else None
        self.k_norm = RMSNorm(config, k_normed) if config.use_qk_norm else None
        sinks = nnx.Param(jnp.zeros(config.num_q_heads, config.param_dtype))
        self.sink_logits = sinks if config.use_sink_logits else None

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, rotation: Rotation | None
    ) -> tuple[jax.Array, kv.Cache]:
        q, k, v = self.project(x, rotation)
        sinks = None if self.sink_logits is None else self.sink_logits[...]
        cache, out = kv.attention(
            cache, place, q, k, v, step, scale=self.scale, soft_cap=self.soft_cap, sink_logits=sinks
        )
        assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
        out = out.reshape(*x.shape[:-1], -1)
        if self.gate is not None:
            out *= jax.nn.sigmoid(self.gate(x))
        return self.out(out), cache

    def project(self, x: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of tokens."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k = self.q(x), self.k(x)
        if not self.norm_spans_heads:
            q, k = q.reshape(heads), k.reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(heads)  # [..., num_q_heads, head_dim]
        k = k.reshape(heads)  # [..., num_kv_heads, head_dim]
        v = self.v(x).reshape(heads)  # [..., num_kv_heads, head_dim]
        return rotate(q, rotation), rotate(k, rotation), v


class LatentAttention(nnx.Module):
    """Multi-head latent attention: the cache holds a vector per token, from which keys and values follow.

    They are linear in it. Few queries are therefore multiplied by the keys' matrices and compared with the
    vectors themselves (absorbed); for many, keys and values are computed of the vectors (expanded).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, latents: Latents):
        self.latents, self.soft_cap = latents, config.attention_soft_cap
        self.scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        hidden_size, heads, eps = config.hidden_size, config.num_q_heads, latents.norm_eps
        q_in, q_size = latents.q_rank or hidden_size, heads * config.head_dim
        self.q_down = Linear(config, rngs, hidden_size, q_in) if latents.q_rank else None
        self.q_norm = RMSNorm(config, q_in, eps=eps) if latents.q_rank else None
        self.q = Linear(config, rngs, q_in, q_size)
        self.kv_down = Linear(config, rngs, hidden_size, latents.latent_dim + latents.rope_dim)
        self.kv_norm = RMSNorm(config, latents.latent_dim, eps=eps)
        self.kv = Linear(config, rngs, latents.latent_dim, heads * (latents.nope_dim + latents.value_dim))
        self.out = Linear(config, rngs, heads * latents.value_dim, hidden_size, gain=residual_gain(config))

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, rotation: Rotation | None
    ) -> tuple[jax.Array, kv.Cache]:
        q_nope, q_rope = self._queries(x, rotation)
        w_k, w_v = self._matrices()
        # In a packed step every token is a row of its own.
        is_absorbed = step.cu_query_lens is not None or x.shape[1] <= MOST_ABSORBED
        if is_absorbed:
            q_nope = _per_head("...hn,lhn->...hl", q_nope, w_k)
        cache, out = kv.attention(
            cache,
            place,
            jnp.concatenate([q_nope, q_rope], axis=-1),
            self._latents(x, rotation),
            None,
            step,
            scale=self.scale,
            soft_cap=self.soft_cap,
            weights=None if is_absorbed else {"k": w_k, "v": w_v},
        )
        assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
        if is_absorbed:
            out = _per_head("...hl,lhv->...hv", out, w_v)
        return self.out(out.reshape(*x.shape[:-1], -1)), cache

    def project(self, x: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array, None]:
        """Queries of the vectors themselves (absorbed), and the vectors, of tokens."""
        q_nope, q_rope = self._queries(x, rotation)
        q_nope = _per_head("...hn,lhn->...hl", q_nope, self._matrices()[0])
        return jnp.concatenate([q_nope, q_rope], axis=-1), self._latents(x, rotation), None

    def _queries(self, x: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array]:
        """The parts of queries that are not rotated `[..., heads, nope_dim]` and that are."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        q = self.q(x).reshape(*x.shape[:-1], -1, self.latents.nope_dim + self.latents.rope_dim)
        q_nope, q_rope = jnp.split(q, [self.latents.nope_dim], axis=-1)
        return q_nope, rotate(q_rope, rotation)

    def _latents(self, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        """What the cache holds of tokens, `[..., 1, latent_dim + rope_dim]`."""
        latent, k_rope = jnp.split(self.kv_down(x)[..., None, :], [self.latents.latent_dim], axis=-1)
        return jnp.concatenate([self.kv_norm(latent), rotate(k_rope, rotation)], axis=-1)

    def _matrices(self) -> tuple[jax.Array, jax.Array]:
        """What makes keys `[latent_dim, heads, nope_dim]` and values `[latent_dim, heads, value_dim]`."""
        kernel = self.kv.kernel[...].astype(self.kv.dtype)
        kernel = kernel.reshape(self.latents.latent_dim, -1, self.latents.nope_dim + self.latents.value_dim)
        w_k, w_v = jnp.split(kernel, [self.latents.nope_dim], axis=-1)
        return w_k, w_v


def _per_head(pattern: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiplies each head by its own matrix; the result has the dtype of `x`."""
    return jnp.einsum(pattern, x.astype(matrices.dtype), matrices).astype(x.dtype)
