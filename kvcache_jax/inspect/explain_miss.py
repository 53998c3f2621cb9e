"""Reasons, in words, why a prompt found no more of itself in the cache. Host-side, to look into a miss."""

import collections
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core import arguments, token_arguments
from kvcache_jax.core.cache_checks import require_values
from kvcache_jax.core.state import Cache
from kvcache_jax.operations.lookup import lookup, with_junction
from kvcache_jax.prefix.content_hash import block_hashes, root_hash


@explicit_transfers
def explain(
    cache: Cache, tokens: Any, num_tokens: int | None = None, namespace: Any = None, *, items: Any = None
) -> str:
    """States how many tokens of one prompt `allocate` would find cached, and why not more.

    The reason is a junction, where keys are cached further than the states of recurrent layers; or that a row
    holds the next block and has not published it, or that the block was evicted (known as long as nothing
    else was published in its place), with what extras know of it, such as a retention that lapsed; or else
    the first token that the nearest cached sequence of the namespace does not have. Of other namespaces the
    answer tells whether `allocate` would find more of the prompt in one, and nothing else: keep even that
    from tenants.

    Args:
      cache: Concrete (not traced, not batched).
      tokens: i32[P], the prompt.
      num_tokens: Number of tokens that count. Default: all.
      namespace: u32[4]. Default: all zero.
      items: i32[I, 2], where the prompt has multimodal items, as a row of `allocate`'s.

    Returns:
      A few sentences.

    Raises:
      TypeError: the cache is traced or has no values, or `tokens` are no integers.
      ValueError: the cache is batched or was donated, or shapes and counts do not fit.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> layers = [kv.FullAttention(1, 8)]
      >>> config = kv.CacheConfig(layers, num_blocks=8, block_size=4, enable_prefix_caching=True)
      >>> cache, _ = kv.allocate(kv.init(config), [0], [8], tokens=[[1, 2, 3, 4, 5, 6, 7, 8]])
      >>> cache, _ = kv.extend(cache, [8], max_new=8, seq_ids=[0], tokens=[[1, 2, 3, 4, 5, 6, 7, 8]])
      >>> cache, _ = kv.commit(cache, [0])
      >>> print(kv.inspect.explain(cache, [1, 2, 3, 4, 5, 6, 9, 9, 9]))
      4 of 9 tokens are cached. At position 6 the prompt has token 9, where the nearest cached sequence has 7.
    """
    require_values("explain", cache)
    tokens = token_arguments.host_tokens("tokens", tokens)
    num_tokens = len(tokens) if num_tokens is None else num_tokens
    num_tokens = static_count("num_tokens", num_tokens, 0, most=len(tokens), most_name="tokens")
    words = np.asarray(arguments.namespace_words(namespace, 1))[0]
    spans = token_arguments.item_spans_of_one(items)
    if cache.control.prefix_index is None:
        return (
            f"0 of {num_tokens} tokens are cached: the cache was built without prefix caching, see "
            "CacheConfig(enable_prefix_caching=True)."
        )
    if num_tokens == 0:
        return "0 of 0 tokens are cached: the prompt is empty."
    if num_tokens > cache.config.max_seq_len:
        return (
            f"0 of {num_tokens} tokens are cached: allocate refuses prompts of more than "
            f"{cache.config.max_seq_len} tokens, the cache's max_seq_len."
        )

    def num_found(namespace: np.ndarray, spans: arguments.Array | None) -> int:
        return int(lookup(cache, tokens[None], [num_tokens], namespace, items=spans)[0])

    view = _view(cache)
    found, uncut = num_found(words, spans), num_found(words, None)
    said = [f"{found} of {num_tokens} tokens are cached."]
    most = (num_tokens - 1) // view.block_size
    chain = _chain(view, tokens, most, words)
    reach = len(chain) * view.block_size
    if found < uncut:
        said.append(f"The blocks of {uncut} are there, but what is reused must not end within an item.")
    _, [junction] = with_junction(cache, tokens[None], [num_tokens], words)
    if junction:
        said.append(
            f"The keys of {junction} are, and no state of the recurrent layers, or no window before it, "
            f"after more than {uncut}: this prompt parts from others there, and a row that computes it keeps "
            "both, for the next one."
        )
    elif uncut < reach:
        said.append(
            f"The first layer group with full attention has {reach}, but another has let go of blocks that "
            "are needed at that length, or none of its blocks ends there."
        )
    elif cache.config.partial_hits and found == num_tokens - 1:
        said.append("That is all that can be: the last token is always computed.")
    elif not cache.config.partial_hits and found == most * view.block_size:
        said.append(
            f"That is all that can be: the last token is always computed, and blocks have {view.block_size} "
            "tokens."
        )
    elif len(chain) < most:
        said.append(_why_not_more(cache, view, tokens, chain, words))
    others = np.unique(view.namespace[view.is_published], axis=0)
    if any(
        len(_chain(view, tokens, most, other)) * view.block_size > found and num_found(other, spans) > found
        for other in others
    ):
        said.append("More of it is cached in another namespace, where this one may not look.")
    return " ".join(said)


class _View(NamedTuple):
    """The indexed group in numpy; see `PrefixIndex`, `BlockPool` and `Control` for the arrays.

    Eviction leaves a block's hash, until another is published in its place; reset and scrub do not.

    `children` are the published blocks after a parent, in a namespace's bytes; the first ones of sequences
    have the parent `len(parent)`.
    """

    block_size: int
    is_published: np.ndarray
    block_tokens: np.ndarray
    block_hash: np.ndarray
    parent: np.ndarray
    namespace: np.ndarray
    block_table: np.ndarray
    context_len: np.ndarray
    row_namespace: np.ndarray
    hash_key: np.ndarray
    children: dict[tuple[int, bytes], list[int]]


def _view(cache: Cache) -> _View:
    control, group_id = cache.control, cache.config.indexed_group
    index, pool = control.prefix_index, control.block_pools[group_id]
    assert index is not None and pool.cached is not None
    is_published, parent, namespace = (
        np.asarray(array) for array in (pool.cached.is_published, index.parent, index.namespace)
    )
    children = collections.defaultdict(list)
    for block in np.flatnonzero(is_published).tolist():
        children[int(parent[block]), namespace[block].tobytes()].append(block)
    return _View(
        cache.config.groups[group_id].block_size,
        is_published,
        np.asarray(index.block_tokens),
        np.asarray(index.block_hash),
        parent,
        namespace,
        np.asarray(pool.block_table),
        np.asarray(control.context_len),
        np.asarray(control.namespace),
        np.asarray(control.hash_key),
        children,
    )


def _children(view: _View, chain: list[int], namespace: np.ndarray) -> np.ndarray:
    """Finds the published blocks after the `chain`, or blocks that begin a sequence."""
    parent = chain[-1] if chain else len(view.parent)
    return np.array(view.children.get((parent, namespace.tobytes()), ()), int)


def _chain(view: _View, tokens: np.ndarray, most: int, namespace: np.ndarray) -> list[int]:
    """Finds the published blocks that hold the first tokens, at most `most`."""
    chain = []
    for block in tokens[: most * view.block_size].reshape(most, view.block_size):
        children = _children(view, chain, namespace)
        equal = children[(view.block_tokens[children] == block).all(axis=1)]
        if not len(equal):
            break
        chain.append(int(equal[0]))
    return chain


def _why_not_more(
    cache: Cache, view: _View, tokens: np.ndarray, chain: list[int], namespace: np.ndarray
) -> str:
    """States why the block after the `chain` is not found."""
    start = len(chain) * view.block_size
    block = tokens[start : start + view.block_size]
    if _is_held(view, tokens, start + view.block_size, namespace):
        return f"A row holds the tokens from position {start} on, but they are not published: commit it."
    if (evicted := _evicted(view, chain, block, namespace)) is not None:
        known = cache.config.hooks.explain_evicted(cache.control, evicted)
        return f"The block from position {start} on was cached, and evicted since." + known
    children = _children(view, chain, namespace)
    if len(children):
        is_same = view.block_tokens[children] == block
        num_same = np.where(is_same.all(axis=1), view.block_size, is_same.argmin(axis=1))
        nearest, same = children[num_same.argmax()], int(num_same.max())
        return (
            f"At position {start + same} the prompt has {_named(block[same], 'token ')}, where the nearest "
            f"cached sequence has {_named(view.block_tokens[nearest][same])}."
        )
    why = "never committed, or evicted, reset or scrubbed since"
    if not chain and not (view.is_published & (view.namespace == namespace).all(axis=1)).any():
        return f"Nothing is cached in this namespace: {why}."
    return f"No cached sequence goes on after position {start}: {why}."


def _named(word: np.integer, kind: str = "") -> str:
    """Names a token by its id; a word of an item is withheld, for a digest gives access (`item_tokens`)."""
    return f"{kind}{word}" if word >= 0 else "a word of an item"


def _is_held(view: _View, tokens: np.ndarray, length: int, namespace: np.ndarray) -> bool:
    """Tests whether an active row of the namespace begins with the first `length` tokens."""
    num_blocks = length // view.block_size
    is_candidate = (view.context_len >= length) & (view.row_namespace == namespace).all(axis=1)
    for row in np.flatnonzero(is_candidate):
        blocks = view.block_table[row, :num_blocks]
        if (view.block_tokens[blocks].reshape(-1) == tokens[:length]).all():
            return True
    return False


def _evicted(view: _View, chain: list[int], block: np.ndarray, namespace: np.ndarray) -> int | None:
    """Finds the block that still has the hash of these tokens after the `chain`, which are not cached."""
    start, hash_key = len(chain) * view.block_size, jnp.asarray(view.hash_key)
    before = view.block_hash[chain[-1]] if chain else root_hash(hash_key, jnp.asarray(namespace))
    added = block_hashes(hash_key, jnp.asarray(block), jnp.int32(start))
    found = np.flatnonzero((view.block_hash == np.asarray(before + added)).all(axis=1))
    return int(found[0]) if len(found) else None
