"""The operation `token_scores`: computes what each token of rows is worth in a layer."""

from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.gather import gather
from kvcache_jax.blocks.storage import keys_values_shapes
from kvcache_jax.compression.scorers import TokenMetadata, scorers, scores_by
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.state import Cache, Step


@takes_one
@jax.named_scope("kvcache.token_scores")
def token_scores(
    cache: Cache,
    layer: Layer,
    q: jax.Array,
    step: Step,
    scorer: str,
    *,
    key: jax.Array | None = None,
    queries: tuple[jax.Array, jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """Computes what each token of the step's rows is worth in a layer, for `compress`.

    Args:
      cache: Not changed; the step's keys and values are written.
      layer: As in `attention`.
      q: The step's queries, as in `attention_scores`; of its last tokens as many as the scorer looks at.
      step: As in `attention_scores`, from `extend`.
      scorer: A name, "snapkv" (the last 64 tokens' attention), "h2o" (all tokens'
        of the step), "tova" (the last token's), "keydiff", "knorm", "expected attention", "recency",
        "random", or one registered with `token_scorer`.
      key: Of `jax.random`, for scorers that need it.
      queries: From `future_queries`, for scorers that need it.
      **options: Of `attention_scores`: `scale`, `soft_cap`, `sink_logits` and `weights`.

    Returns:
      f32[n, num_kv_heads, max_seq_len]; at places without a token any number.

    Raises:
      ValueError, TypeError: there is no such scorer, or it needs what was not given.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> layers, sizes = [kv.FullAttention(1, 8)], dict(num_blocks=4, max_seqs=2, max_seq_len=64)
      >>> cache = kv.init(kv.CacheConfig(layers, extras=[kv.compression.Dropping()], **sizes))
      >>> cache, _ = kv.allocate(cache, [0], [20])
      >>> cache, step = kv.extend(cache, [20, 0], max_new=20)
      >>> q, new = jnp.ones((2, 20, 4, 8)), jnp.ones((2, 20, 1, 8))
      >>> cache = kv.write(cache, 0, new, new, step)
      >>> scores = kv.compression.token_scores(cache, 0, q, step, "recency")
      >>> scores.shape, kv.compression.compress(cache, step.seq_ids, scores[:, None], [8, 0])[1].tolist()
      ((2, 1, 64), [0, 5])
    """
    refuse_donated("token_scores", cache)  # also where a scorer reads no key
    found = scorers.find(scorer)
    for name, given in (("key", key), ("queries", queries)):
        if name in found.needs and given is None:
            raise ValueError(f"{name} is None, expected a value: the scorer {scorer!r} needs it")
    group_id, _, pool = arguments.located(cache, layer, step)
    group = cache.config.groups[group_id]
    num_kv_heads = keys_values_shapes(pool, group, options.get("weights")).k.shape[0]
    places = jnp.arange(group.max_len, dtype=jnp.int32)
    is_token = places[None] < step.context_len[:, None]
    if (holes := cache.control.holes) is not None:
        of_rows = holes.of_rows(step.seq_ids).of_group(group_id)
        is_token &= ~of_rows.is_hidden(jnp.broadcast_to(places[None], is_token.shape))
    num_last, attention = found.options["num_last"], None
    if "attention" in found.needs:
        num_last = None if num_last is None else min(num_last, q.shape[1])
        attention = attention_scores(cache, layer, q, step, num_last=num_last, **options)
    num_queries = step.query_len if num_last is None else jnp.minimum(step.query_len, num_last)
    k = v = None
    if found.needs & {"k", "v"}:
        k, v, _ = jax.vmap(lambda row: gather(cache, row, layer))(step.seq_ids)
        k, v = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in (k, v))
    tokens = TokenMetadata(
        is_token=is_token,
        num_tokens=step.context_len,
        num_queries=num_queries,
        num_kv_heads=num_kv_heads,
        k=k if "k" in found.needs else None,
        v=v if "v" in found.needs else None,
        attention=attention,
        queries=queries if "queries" in found.needs else None,
        key=key if "key" in found.needs else None,
    )
    return scores_by(scorer, tokens)
