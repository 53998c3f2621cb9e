"""The formulas of Cache-Craft, which say how much of a chunk is to be computed again behind other chunks.

Of chunk `i`, with the chunks `j` that stood in front of it then, `inter(i, j)` is the attention that
its tokens gave to `j`, and `intra(i)` what they gave to the chunk itself, mean over heads and layers:

* `a = sum_j inter(i, j) / (|i| |j|)` and `b = intra(i) / |i|^2`; CCI, how much the others mattered
* beta, the share of `inter` that went to chunks that stand in front of it again
* gamma, the share of pairs of those that changed their order (Kendall); beta' = beta (1 - gamma)
* CFO = min(1, alpha CCI (1 - beta')), the share to compute again; N = ceil(CFO |i|)

References:
  Cache-Craft (Agarwal et al.; arXiv:2502.15734).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

Numbers = ArrayLike | Sequence[Any]
"""An array, or nested lists."""


def context_impact(a: Numbers, b: Numbers) -> jax.Array:
    """Computes CCI = 1 / (1 + exp(-a / b)), f32[...] from 1/2, where nothing stood in front, to 1.

    Args:
      a: f32[...], attention per pair of tokens to the chunks in front.
      b: f32[...], attention per pair of tokens within the chunk.

    Example:
      >>> import kvcache_jax as kv
      >>> round(float(kv.context_impact(0.5, 0.5)), 4)
      0.7311
    """
    a, b = _of_one_shape(a, b)
    ratio = a / jnp.where(b > 0, b, 1)
    return jax.nn.sigmoid(jnp.where(b > 0, ratio, jnp.where(a > 0, jnp.inf, 0)))


def prefix_overlap(inter: Numbers, new_order: Numbers) -> jax.Array:
    """Computes beta' = beta (1 - gamma), f32[...]: how much of what stood in front of a chunk does so again.

    Args:
      inter: f32[..., J], attention to each chunk that stood in front, in their order then.
      new_order: i32[..., J], the place of each in the order of those that stand in front now; negative where
        it does not, or where there were fewer.

    Returns:
      1 where all stand there again in the same order, and where nothing stood in front or mattered.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.prefix_overlap([6.0, 2.0], [[0, 1], [1, 0], [0, -1]]).tolist()
      [1.0, 0.0, 0.75]
    """
    inter, new_order = _of_one_shape(inter, new_order)
    is_common = new_order >= 0
    total, common = inter.sum(axis=-1), jnp.where(is_common, inter, 0).sum(axis=-1)
    beta = jnp.where(total > 0, common / jnp.where(total > 0, total, 1), 1)
    is_pair = is_common[..., :, None] & is_common[..., None, :]
    is_turned = is_pair & (new_order[..., :, None] > new_order[..., None, :])
    first, second = (lax.broadcasted_iota(jnp.int32, is_pair.shape, is_pair.ndim - d) for d in (2, 1))
    num_pairs, num_turned = (
        jnp.sum(mask & (first < second), axis=(-2, -1)).astype(jnp.float32) for mask in (is_pair, is_turned)
    )
    gamma = num_turned / jnp.maximum(num_pairs, 1)
    return beta * (1 - gamma)


def fix_overhead(impact: Numbers, overlap: Numbers, alpha: Numbers = 1.0) -> jax.Array:
    """Computes CFO = min(1, alpha CCI (1 - beta')), f32[...]: the share of a chunk to compute again.

    Args:
      impact: f32[...], CCI, of `context_impact`.
      overlap: f32[...], beta', of `prefix_overlap`.
      alpha: f32[...], the least one that is good enough on prompts of one's own.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.fix_overhead(0.75, [1.0, 0.5, 0.0], alpha=2).tolist()
      [0.0, 0.75, 1.0]
    """
    impact, overlap, alpha = _of_one_shape(impact, overlap, alpha)
    return jnp.minimum(alpha * impact * (1 - overlap), 1)


def num_of_share(share: Numbers, num_tokens: Numbers) -> jax.Array:
    """Counts N = ceil(share |C|), the tokens that a share of `num_tokens` i32[...] is, i32[...].

    Example:
      >>> import kvcache_jax as kv
      >>> kv.num_of_share([0.0, 0.2, 0.21, 1.0], 10).tolist()
      [0, 2, 3, 10]
    """
    share, num_tokens = _of_one_shape(share, num_tokens)
    # A share such as 0.2 is rounded, which adds no token.
    exact = jnp.ceil(share * num_tokens * (1 - 2**-21))
    return jnp.clip(exact, 0, num_tokens).astype(jnp.int32)


def _of_one_shape(*values: Numbers) -> list[jax.Array]:
    """Converts numbers to f32 arrays of the shape that they have together."""
    arrays = [jnp.asarray(x, jnp.float32) for x in values]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return [jnp.broadcast_to(x, shape) for x in arrays]
