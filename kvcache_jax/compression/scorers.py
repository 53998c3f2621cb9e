"""The scores of tokens: scorers by name, and the operation `token_scores`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.registry import Registry
from kvcache_jax.attention.attention_scores import attention_scores
from kvcache_jax.attention.gather import gather
from kvcache_jax.blocks.storage import keys_values_shapes
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import refuse_donated, takes_one
from kvcache_jax.core.state import Cache, Step


class TokenMetadata(NamedTuple):
    """Metadata of one layer that a scorer sees: n rows of S places; None where the scorer did not ask for it.

    Entries at places without a token are arbitrary.

    Attributes:
      is_token: bool[n, S], the place holds a token that can be kept.
      num_tokens: i32[n], places in use, up to and including the row's last token.
      num_queries: i32[n], queries in `attention`, the row's last tokens.
      num_kv_heads: Heads of the keys.
      k: f32[n, num_kv_heads, S, key_dim], keys as they are multiplied, rotated.
      v: f32[n, num_kv_heads, S, value_dim], values.
      attention: f32[n, num_q_heads, w, S], weights of the row's last tokens, padded at the end; see
        `attention_scores`.
      queries: Mean f32[n, num_q_heads, key_dim] and covariance f32[n, num_q_heads, key_dim, key_dim] of
        queries to come; see `future_queries`.
      key: A key of `jax.random`.
    """

    is_token: jax.Array
    num_tokens: jax.Array
    num_queries: jax.Array
    num_kv_heads: int
    k: jax.Array | None = None
    v: jax.Array | None = None
    attention: jax.Array | None = None
    queries: tuple[jax.Array, jax.Array] | None = None
    key: jax.Array | None = None

    @property
    def places(self) -> jax.Array:
        """i32[1, 1, S]."""
        return lax.broadcasted_iota(jnp.int32, (1, 1, self.is_token.shape[1]), 2)

    def is_last(self, num: int | jax.Array) -> jax.Array:
        """Masks the places that hold the row's last `num` tokens, bool[n, 1, S]."""
        first = self.num_tokens - num
        return (self.places >= first[:, None, None]) & (self.places < self.num_tokens[:, None, None])

    def mean_of_groups(self, x: jax.Array) -> jax.Array:
        """Averages `[n, num_q_heads, S]` over the query heads of each key head."""
        return x.reshape(x.shape[0], self.num_kv_heads, -1, x.shape[-1]).mean(axis=2)


Scorer = Callable[[TokenMetadata], jax.Array]

scorers = Registry[Scorer]("a token scorer", "compression.token_scorer", "scorer", TokenMetadata)


def token_scorer(
    name: str, *, needs: Sequence[str] = (), num_last: int | None = None
) -> Callable[[Scorer], Scorer]:
    """Registers a function from `TokenMetadata` to scores, f32[n, S] or `[n, num_kv_heads, S]`.

    Args:
      name: For `token_scores`.
      needs: The fields of `TokenMetadata` that it reads beside the first four: only these are computed.
      num_last: Last tokens of a row whose attention it looks at. Default: all of the step.

    Returns:
      The decorator; it returns the function unchanged.

    Raises:
      ValueError, TypeError: the name is taken, or `needs` names no field.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> @kv.compression.token_scorer("longest values", needs=["v"])
      ... def longest_values(tokens: kv.compression.TokenMetadata):
      ...     return jnp.linalg.norm(tokens.v, axis=-1)
    """
    if num_last is not None:
        num_last = static_count("num_last", num_last)
    return scorers.decorate(name, needs, num_last=num_last)


def scores_by(name: str, tokens: TokenMetadata) -> jax.Array:
    """Computes a scorer's scores, f32[n, num_kv_heads, S]; the same for all heads where it gives one."""
    num_rows, num_places = tokens.is_token.shape
    shape = num_rows, tokens.num_kv_heads, num_places
    scores = scorers.call(name, tokens, (num_rows, num_places), shape, dtype=jnp.float32)
    return jnp.broadcast_to(scores if scores.ndim == 3 else scores[:, None], shape)


def future_queries(
    q: jax.Array,
    is_query: jax.Array,
    rotate: Callable[[jax.Array, jax.Array], jax.Array],
    next_position: jax.Array,
    *,
    num_future: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """Estimates mean and covariance of queries to come from those so far: `TokenMetadata.queries`.

    Args:
      q: `[n, T, num_q_heads, key_dim]`, queries before their rotation.
      is_query: bool[n, T], those that count, one at least.
      rotate: `(x [positions, rows, key_dim], positions i32[positions]) -> x`, the model's linear rotation of
        queries at positions of the text.
      next_position: i32[n], the position of the first query to come.
      num_future: Positions from there on, over which the rotation is averaged.

    Raises:
      ValueError, TypeError: shapes or dtypes do not fit, or `rotate` is no function or returns another shape.
    """
    arguments.require_floats("q", q)
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}, expected [n, T, num_q_heads, key_dim]")
    counts = arguments.as_array("is_query", is_query)
    if counts.dtype != bool or counts.shape != q.shape[:2]:
        raise ValueError(f"is_query is {counts.dtype}{list(counts.shape)}, expected bool{list(q.shape[:2])}")
    if not callable(rotate):
        raise TypeError(f"rotate is {rotate!r}, expected a function of queries and positions")
    next_position = jnp.asarray(arguments.int_column("next_position", next_position, q.shape[0]))
    num_future = static_count("num_future", num_future, most=2**30, most_name="2**30")
    q, mask = jnp.asarray(q, jnp.float32), jnp.asarray(counts)[..., None, None]
    count = jnp.sum(mask, axis=1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(mask, q, 0), axis=1) / count
    off = jnp.where(mask, q - mean[:, None], 0)
    covariance = jnp.einsum("nthd,nthe->nhde", off, off, precision="highest") / count[..., None]
    unit = jnp.eye(q.shape[-1], dtype=jnp.float32)

    def average(position: jax.Array) -> jax.Array:
        positions = position + jnp.arange(num_future, dtype=jnp.int32)
        turned = rotate(axes := jnp.broadcast_to(unit, (num_future, *unit.shape)), positions)
        if (shape := getattr(turned, "shape", None)) != axes.shape:
            raise ValueError(f"rotate returned shape {shape}, expected {axes.shape} as its queries have")
        return turned.mean(axis=0).astype(jnp.float32)  # its rows are the rotated axes

    matrix = jax.vmap(average)(next_position)
    mean = jnp.einsum("nhd,nde->nhe", mean, matrix, precision="highest")
    return mean, jnp.einsum("nhde,ndf,neg->nhfg", covariance, matrix, matrix, precision="highest")


def pyramid_budgets(num_keep: ArrayLike, num_layers: int, window: int, num_tokens: ArrayLike) -> jax.Array:
    """Spreads the tokens to keep over layers, more of them for the first ones, as PyramidKV does.

    Layers keep the window and, on average, `num_keep - window` tokens more; of these the last layer a
    twentieth, and the first as many more than the average as the last has less.

    Args:
      num_keep: i32[n], average over the layers; of less than the window, each layer keeps the window.
      num_layers: Layers.
      window: Last tokens, which every layer keeps.
      num_tokens: i32[n], tokens that the rows hold; no layer keeps more, and all keep all where fewer than
        `num_keep` or the window are held.

    Returns:
      i32[n, num_layers] for `compress(num_keep=)`, which wants layers of different numbers in groups of their
      own.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.compression.pyramid_budgets([96], 6, 64, [768]).tolist()
      [[126, 114, 102, 90, 78, 66]]

    References:
      PyramidKV (Cai et al.; arXiv:2406.02069).
    """
    num_keep = arguments.int_column("num_keep", num_keep)
    num_tokens = arguments.int_column("num_tokens", num_tokens, num_keep.shape[0])
    num_layers, window = static_count("num_layers", num_layers), static_count("window", window, least=0)
    keep, held = (jnp.asarray(x, jnp.float32)[:, None] for x in (num_keep, num_tokens))
    recent = jnp.minimum(held, window)
    average = jnp.clip(keep, recent, held) - recent
    most = jnp.minimum(2 * average - average / 20, held - recent)
    least = 2 * average - most
    # Alone, a layer is the average.
    share = jnp.linspace(0, 1, num_layers, dtype=jnp.float32)[None] if num_layers > 1 else 0.5
    return jnp.round(recent + most + (least - most) * share).astype(jnp.int32)


_WINDOW, _POOL, _SINKS = 64, 5, 4


@token_scorer("snapkv", needs=["attention"], num_last=_WINDOW)
def _snapkv(tokens: TokenMetadata) -> jax.Array:
    """Scores by the attention of the last tokens, and keeps these (SnapKV, Li et al., arXiv:2404.14469)."""
    is_last = tokens.is_last(tokens.num_queries)
    num_queries = jnp.maximum(tokens.num_queries, 1)[:, None, None]
    received = jnp.where(is_last, 0, _received(tokens) / _float(num_queries))
    padded = jnp.pad(received, [(0, 0), (0, 0), (_POOL // 2, _POOL // 2)])
    width = received.shape[-1]
    pooled = sum((padded[..., i : i + width] for i in range(_POOL)), jnp.zeros_like(received)) / _POOL
    scores = tokens.mean_of_groups(pooled)
    return jnp.where(is_last, scores.max(axis=-1, keepdims=True) + 1, scores)


@token_scorer("h2o", needs=["attention"])
def _h2o(tokens: TokenMetadata) -> jax.Array:
    """Scores by the mean weight from all queries that see the token (H2O, Zhang et al., arXiv:2306.14048)."""
    num_seeing = jnp.minimum(
        tokens.num_tokens[:, None, None] - tokens.places, tokens.num_queries[:, None, None]
    )
    return tokens.mean_of_groups(_received(tokens) / _float(jnp.maximum(num_seeing, 1)))


@token_scorer("tova", needs=["attention"], num_last=1)
def _tova(tokens: TokenMetadata) -> jax.Array:
    """Scores by the last token's weights, one set for all heads (TOVA, Oren et al., arXiv:2401.06104)."""
    scores = _received(tokens).mean(axis=1)
    return jnp.where(tokens.is_last(1)[:, 0], scores.max(axis=-1, keepdims=True) + 1, scores)


@token_scorer("keydiff", needs=["k"])
def _keydiff(tokens: TokenMetadata) -> jax.Array:
    """Scores by how unlike a key is to the mean key (KeyDiff, Park et al., arXiv:2504.15364)."""
    assert tokens.k is not None
    unit = jnp.where(tokens.is_token[:, None, :, None], _unit(tokens.k), 0)
    return -jnp.sum(unit * _unit(unit.sum(axis=2, keepdims=True)), axis=-1)


@token_scorer("knorm", needs=["k"])
def _knorm(tokens: TokenMetadata) -> jax.Array:
    """Scores by how short a key is (Devoto et al., arXiv:2406.11430); of no use where keys are normalised."""
    assert tokens.k is not None
    return -jnp.linalg.norm(tokens.k, axis=-1)


@token_scorer("expected attention", needs=["k", "v", "queries"])
def _expected_attention(tokens: TokenMetadata) -> jax.Array:
    """Scores by the weight that queries to come give, times the value (Devoto et al., arXiv:2510.00636)."""
    assert tokens.k is not None and tokens.v is not None and tokens.queries is not None
    mean, covariance = tokens.queries
    dim, of_groups = tokens.k.shape[-1], (mean.shape[0], tokens.num_kv_heads, -1)
    mean, covariance = (x.reshape(*of_groups, *x.shape[2:]) for x in (mean, covariance))
    logits = jnp.einsum("nhsd,nhgd->nhgs", tokens.k, mean, precision="highest") / dim**0.5
    spread = jnp.einsum("nhsd,nhgde,nhse->nhgs", tokens.k, covariance, tokens.k, precision="highest")
    logits += spread / (2 * dim)
    is_scored = tokens.is_token[:, None] & (tokens.places >= _SINKS)
    least = jnp.finfo(logits.dtype).min  # no -inf, for a row may have sinks alone
    shares = jax.nn.softmax(jnp.where(is_scored[:, :, None], logits, least), axis=-1)
    length = jnp.where(is_scored, jnp.linalg.norm(tokens.v, axis=-1), 0)
    scores = (shares.mean(axis=2) + 1e-2) * length
    return jnp.where(tokens.places < _SINKS, scores.max(axis=-1, keepdims=True) + 1, scores)


@token_scorer("recency")
def _recency(tokens: TokenMetadata) -> jax.Array:
    """Scores later tokens higher, and the first four highest (Xiao et al., arXiv:2309.17453)."""
    places = jnp.broadcast_to(tokens.places[:, 0], tokens.is_token.shape).astype(jnp.float32)
    return jnp.where(places < _SINKS, jnp.inf, places)


@token_scorer("random", needs=["key"])
def _random(tokens: TokenMetadata) -> jax.Array:
    """Scores by chance, each head by its own."""
    assert tokens.key is not None
    num_rows, num_places = tokens.is_token.shape
    return jax.random.uniform(tokens.key, (num_rows, tokens.num_kv_heads, num_places))


def _received(tokens: TokenMetadata) -> jax.Array:
    """Sums the weights that each token gets, f32[n, num_q_heads, S]."""
    assert tokens.attention is not None
    return tokens.attention.sum(axis=2)


def _unit(vectors: jax.Array) -> jax.Array:
    """Scales vectors to the length 1; zeros stay, for `jax_debug_nans` would stop at 0 / 0."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(length > 0, length, 1)


def _float(counts: jax.Array) -> jax.Array:
    return jnp.asarray(counts).astype(jnp.float32)


_OPTIONS = "scale", "soft_cap", "sink_logits", "weights"


def _checked_queries(
    queries: Any, num_rows: int, num_kv_heads: int, key_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and covariance of queries, after a look at their shapes."""
    shapes = [getattr(x, "shape", None) for x in queries] if isinstance(queries, tuple | list) else []
    num_heads = shapes[0][1] if shapes and shapes[0] is not None and len(shapes[0]) == 3 else 0
    expected = (num_rows, num_heads, key_dim)
    if shapes != [expected, (*expected, key_dim)] or not num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"queries has shapes {shapes}, expected what future_queries returns, [{num_rows}, num_q_heads, "
            f"{key_dim}] and [{num_rows}, num_q_heads, {key_dim}, {key_dim}], with num_q_heads a multiple of "
            f"num_kv_heads = {num_kv_heads}"
        )
    for x in queries:
        arguments.require_floats("queries", x)
    return jnp.asarray(queries[0]), jnp.asarray(queries[1])


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
    """Scores each token of the step's rows in a layer, for `compress`.

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
      ValueError, TypeError: there is no such scorer, or it needs an argument that was not given.

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
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"token_scores got {sorted(unknown)}, expected options among {', '.join(_OPTIONS)}")
    group_id, _, pool = arguments.located(cache, layer, step)
    group = cache.config.groups[group_id]
    num_kv_heads, _, key_dim = keys_values_shapes(pool, group, options.get("weights")).k.shape
    if "key" in found.needs:
        arguments.require_key("key", key)
    if "queries" in found.needs:
        queries = _checked_queries(queries, step.seq_ids.shape[0], num_kv_heads, key_dim)
    places = jnp.arange(group.max_len, dtype=jnp.int32)
    is_token = places[None] < step.context_len[:, None]
    if (holes := cache.control.holes) is not None:
        of_rows = holes.of_rows(step.seq_ids).of_group(group_id)
        is_token &= ~of_rows.is_hidden(jnp.broadcast_to(places[None], is_token.shape))
    num_last, attention = found.options["num_last"], None
    if "attention" in found.needs:
        num_last = None if num_last is None else min(num_last, step.positions.shape[-1])
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
