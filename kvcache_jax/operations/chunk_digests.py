"""The questions `chunk_digests` and `chunks_before`: short names of chunks, and of those in front of them."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.prefix.content_hash import block_hashes


@jax.named_scope("kvcache.chunk_digests")
def chunk_digests(tokens: ArrayLike, num_tokens: IntRows) -> jax.Array:
    """Computes digests of passages, by which statistics tell what stood in front of a chunk.

    They are good enough for estimates: where two passages have one digest, an estimate is wrong.

    Args:
      tokens: i32[n, P], the passages, padded at the end.
      num_tokens: i32[n], their lengths.

    Returns:
      u32[n, 2], of no passage 0; 0 where there is no token.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
      >>> import kvcache_jax as kv
      >>> digests = kv.chunk_digests([[7, 8, 0], [7, 8, 9], [7, 8, 9]], [2, 2, 3])
      >>> bool((digests[0] == digests[1]).all()), bool((digests[0] == digests[2]).all())
      (True, False)
    """
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    return _digests(token_arguments.token_ids(tokens, num_tokens.shape[0], None), num_tokens)


@jax.jit
def _digests(tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
    places = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    hashes = block_hashes(jnp.zeros(2, jnp.uint32), tokens[..., None], places)  # of each token
    is_token = (places < num_tokens[:, None])[..., None]
    digests = jnp.sum(jnp.where(is_token, hashes, 0), axis=1, dtype=jnp.uint32)
    return jnp.where(num_tokens[:, None] > 0, digests | jnp.uint32(1), 0)


def chunks_before(digests: ArrayLike) -> jax.Array:
    """Lists what stands in front of each chunk of a row, for `find_chunks(before=)` and `chunk_overhead`.

    Args:
      digests: u32[n, K, 2], of the chunks of n rows in their order; 0 for none.

    Returns:
      u32[n, K, K, 2], for each chunk those in front, then 0.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> kv.chunks_before(jnp.array([[[5, 1], [6, 1], [7, 1]]], jnp.uint32))[0, :, :, 0].tolist()
      [[0, 0, 0], [5, 0, 0], [5, 6, 0]]
    """
    digests = arguments.as_array("digests", digests)
    if digests.dtype != jnp.uint32 or digests.ndim != 3 or digests.shape[2] != 2:
        raise ValueError(f"digests is {digests.dtype}{list(digests.shape)}, expected uint32[n, K, 2]")
    shape = digests.shape[0], *digests.shape[1:2] * 2, 2
    chunk, other = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    return jnp.where(other < chunk, jnp.asarray(digests)[:, None], 0)
