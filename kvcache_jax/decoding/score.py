"""Log-probabilities of continuations that share a context: the context is computed once and forked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_list
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.arguments import namespace_words
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Admission, Cache
from kvcache_jax.core.status import Status, raise_for_status
from kvcache_jax.decoding.arguments import (
    check_model,
    committed_shardings,
    model_tokens,
    usable_prefill_len,
)
from kvcache_jax.decoding.forward import Forward, prepared
from kvcache_jax.decoding.host import idle_cache
from kvcache_jax.decoding.own_prompts import CheckedRows, namespaces_within
from kvcache_jax.decoding.prefill import feed, prefill
from kvcache_jax.decoding.prompts import KEEP_ALL, NOT_LOOKED_UP, PromptCall, PromptSource
from kvcache_jax.decoding.sampling import are_numbers
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.fork import fork
from kvcache_jax.operations.free import free
from kvcache_jax.operations.stats import num_available_blocks, num_blocks_needed


@dataclasses.dataclass
class ScoreResult:
    """Result of `score`.

    Attributes:
      logprobs: f32[len(continuation)] log-probability of each token, per continuation.
      is_greedy: bool[len(continuation)] whether no token is more probable, per continuation.
      cache: The cache at the end, all rows idle; with prefix caching it still knows the context.
      num_cached_tokens: Tokens of the context that the prefix cache had.
      num_reused_tokens: Tokens of the context that `prompts` put into its row, not computed.
      num_stored_tokens: Tokens that were computed to be reused.
    """

    logprobs: list[np.ndarray]
    is_greedy: list[np.ndarray]
    cache: Cache
    num_cached_tokens: int
    num_reused_tokens: int
    num_stored_tokens: int


def score(
    forward: Forward,
    params: Any,
    context: Sequence[int] | PromptSource,
    continuations: Sequence[Sequence[int]],
    config: CacheConfig,
    *,
    cache: Cache | None = None,
    namespace: ArrayLike | None = None,
    prefill_len: int = 128,
) -> ScoreResult:
    """Computes the log-probability of each continuation of one context, token by token.

    Args:
      forward: As in `generate`.
      params: Passed on to `forward`.
      context: Token ids, at least one; or a feature's `PromptSource` of one prompt.
      continuations: Token ids of each; an empty one scores as an empty array, an id that the model's logits
        do not reach as NaN, the only one there is.
      config: The cache's, with at least 2 rows. There may be more continuations than rows; they take turns.
      cache: From an earlier call with the same config, to find its prefixes; donated. Default: an empty one.
      namespace: u32[4], who may share the context's blocks. A cache that served other parameters needs
        another, `kv.namespace(weights=...)`. Default: all zero.
      prefill_len: Tokens of all rows in one call of the model, as in `generate`.

    Returns:
      A `ScoreResult`.

    Raises:
      ValueError, TypeError: nothing to condition on, ids that are none, a continuation too long for a row, a
        cache of another config, a call within `jit`, or a `forward` without a hash.
      StatusError: the cache has too few blocks for the context and one continuation.
      FloatingPointError: logits that a token is scored by hold NaN or +inf, or are all -inf. A `cache` that
        was passed in is lost.
    """
    check_model("score", forward, config, params, cache)
    prompts = context if isinstance(context, PromptSource) else PromptSource([context])
    contexts = as_list("context", prompts.tokens, "one prompt")
    if len(contexts) != 1:
        raise ValueError(f"context has {len(contexts)} prompts, expected one")
    shared = model_tokens("context", contexts[0], least=1)
    words = namespaces_within(prompts, np.asarray(namespace_words(namespace, 1)))
    continuations = as_list("continuations", continuations, "continuations, each a list of token ids")
    own = [model_tokens(f"continuation {i}", tokens) for i, tokens in enumerate(continuations)]
    if config.max_seqs < 2:
        raise ValueError(
            f"max_seqs is {config.max_seqs}, expected at least 2: the context and a continuation"
        )
    longest = len(shared) + max((len(tokens) for tokens in own), default=0)
    if longest > config.max_seq_len:
        raise ValueError(
            f"context and continuation have {longest} tokens, expected at most {config.max_seq_len}"
        )
    prefill_len = usable_prefill_len(prefill_len, config)
    params = prepared(forward, params)
    committed_shardings(params=params, cache=cache)
    context_rows = CheckedRows(
        prompts,
        PromptCall(
            caller="score",
            forward=forward,
            params=params,
            config=config,
            tokens=[shared],
            namespaces=words,
            prefill_len=prefill_len,
            retention=KEEP_ALL,
        ),
    )
    context_len = np.zeros(config.max_seqs, np.int32)
    context_len[0] = len(shared)
    history = np.zeros((config.max_seqs, config.max_seq_len), np.int32)
    history[:, : len(shared)] = shared

    found_by = history[:1].copy()
    found_by[0, context_rows.prefix_len(0) : len(shared)] = NOT_LOOKED_UP
    num_more = np.where(np.arange(config.max_seqs) == 0, longest - len(shared), 0)

    def start(cache: Cache) -> tuple[Cache, Admission]:
        return allocate(cache, [0], context_len[:1], tokens=found_by, namespace=words)

    def has_room(cache: Cache) -> bool:
        """Tests whether the longest continuation finds blocks beside the context, in a fork of its row."""
        return all(
            num_blocks_needed(cache, num_more, group=g)[0] < num_available_blocks(cache, group=g)
            for g in range(len(config.groups))
        )

    @explicit_transfers
    def hold_context(cache: Cache) -> tuple[Cache, int, np.ndarray]:
        """Holds the context in row 0; returns also how many tokens were cached, and f32[vocab] scores."""
        cache, parts = context_rows.hold(cache, 0, 0, may_wait=False)
        assert parts is not None
        cache = context_rows.make_room(
            cache, lambda cache: int(start(cache)[1].status[0]) == Status.OK, parts
        )
        cache, admission = start(cache)
        raise_for_status(admission.status, "allocating the context")
        cache = context_rows.fill(cache, 0, 0, parts)
        cache, fed = prefill(
            forward, params, cache, history, context_len, prefill_len=prefill_len, is_scoring=True
        )
        raise_for_status(fed.status, "prefilling the context")
        cache = context_rows.make_room(cache, has_room)
        logits = fed.logits[0]
        if not are_numbers(logits):
            raise FloatingPointError(_NO_SCORE.format("the context"))
        return cache, int(admission.num_cached[0]), np.asarray(jax.nn.log_softmax(logits))

    @explicit_transfers
    def score_some(cache: Cache, wave: Sequence[int], first_row: int) -> tuple[Cache, list[int]]:
        """Scores continuations in rows from `first_row` on, forks of row 0 or it; returns each status too."""
        rows = range(first_row, first_row + len(wave))
        length = np.zeros(config.max_seqs, np.int32)
        for row, i in zip(rows, wave, strict=True):
            length[row] = len(shared) + len(own[i])
            history[row, len(shared) : length[row]] = own[i]
        ids = np.where(length > 0, np.arange(config.max_seqs), config.max_seqs)
        forks = np.where(ids > 0, ids, config.max_seqs)
        cache, _ = fork(cache, np.where(forks < config.max_seqs, 0, config.max_seqs), forks)
        cache, fed = feed(
            forward, params, cache, history, length - 1, prefill_len=prefill_len, is_scoring=True
        )
        found = [np.ones(history.shape, dtype) for dtype in (np.float32, bool, bool)]
        found_logprobs, found_greedy, is_scored = found
        for pieces, scores in fed.scores:
            scores = jax.device_get(scores)
            for i, num_tokens in enumerate(pieces.num_tokens):
                behind = pieces.rows[i], slice(pieces.first[i] + 1, pieces.first[i] + 1 + num_tokens)
                if num_tokens:
                    for values, new in zip(found, scores, strict=True):
                        values[behind] = new[i, :num_tokens]
        status = np.asarray(fed.status)[rows].tolist()
        for row, i, end in zip(rows, wave, status, strict=True):
            if end != Status.OK:
                continue
            if not is_scored[row].all():
                nth = int(is_scored[row].argmin()) - len(shared) - 1
                raise FloatingPointError(_NO_SCORE.format(f"token {nth} of continuation {i}"))
            results[i][1:] = found_logprobs[row, len(shared) + 1 : length[row]]
            is_greedy[i][1:] = found_greedy[row, len(shared) + 1 : length[row]]
        return free(cache, ids)[0], status

    held, num_cached_tokens, firsts = hold_context(idle_cache("score", cache, config))
    num_reused_tokens, _ = context_rows.counts  # may be held again, and counts once
    results = [np.full(len(tokens), np.nan, np.float32) for tokens in own]
    is_greedy = [np.zeros(len(tokens), bool) for tokens in own]
    for i, tokens in enumerate(own):
        if len(tokens) and tokens[0] < len(firsts):
            results[i][0], is_greedy[i][0] = firsts[tokens[0]], firsts[tokens[0]] >= firsts.max()
    # Only continuations of more than one token need a row: the context's logits score the first.
    waiting, lonely = [i for i, tokens in enumerate(own) if len(tokens) > 1], []
    most = config.max_seqs - 1
    while waiting:
        wave, waiting = waiting[:most], waiting[most:]
        held, status = score_some(held, wave, 1)
        failed = [i for i, found in zip(wave, status, strict=True) if found != Status.OK]
        if len(wave) == 1:
            lonely += failed
        elif failed:  # fewer at a time leave each other more blocks
            waiting, most = failed + waiting, max(1, len(wave) // 2)
    # In the context's own row: a fork holds the blocks that its windows reach, beside the context's.
    for nth, i in enumerate(lonely):
        if nth > 0:
            held, *_ = hold_context(held)
        held, status = score_some(held, [i], 0)
        raise_for_status(np.asarray(status), f"scoring continuation {i}")
    held, _ = free(held, [0])
    return ScoreResult(
        logprobs=results,
        is_greedy=is_greedy,
        cache=held,
        num_cached_tokens=num_cached_tokens,
        num_reused_tokens=num_reused_tokens,
        num_stored_tokens=context_rows.counts[1],
    )


_NO_SCORE = (
    "the logits after {} hold NaN or +inf, or all are -inf, expected numbers to score by: look for a weight "
    "that is not finite"
)
