"""Attention without a cache, in jnp: the reference of gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def dense_attention(
    q, k, v, *, window=None, num_sink_tokens=0, sink_logits=None, soft_cap=None, is_hidden=False
):
    """Of one row, the queries being its last tokens; no query sees the keys that are hidden, bool[L].

    q [T, num_q_heads, head_dim], k and v [L, num_kv_heads, head_dim] -> out like q, lse [T, num_q_heads].
    """
    num_new, num_q_heads, head_dim = q.shape
    num_tokens, num_kv_heads, _ = k.shape
    k, v = (jnp.repeat(x, num_q_heads // num_kv_heads, axis=1) for x in (k, v))
    logits = jnp.einsum("thd,shd->hts", q, k) / np.sqrt(head_dim)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    i, j = np.arange(num_tokens - num_new, num_tokens)[:, None], np.arange(num_tokens)
    seen = (j <= i) & ~jnp.atleast_1d(is_hidden)[None]
    if window is not None:
        seen &= (i - j < window) | (j < num_sink_tokens)
    logits = jnp.where(seen, logits, -jnp.inf)
    if sink_logits is not None:
        sinks = jnp.broadcast_to(sink_logits[:, None, None], (*logits.shape[:2], 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None])[..., :num_tokens]
    return jnp.einsum("hts,shd->thd", weights, v), lse.T
