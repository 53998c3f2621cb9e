"""Admission of prompts: as many start next as can go on to their ends."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from kvcache_jax.chunks.prompt_chunks import NOT_LOOKED_UP, PromptChunks
from kvcache_jax.compression.streaming import Streaming
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.layer_kinds.span import ceil_div
from kvcache_jax.core.state import Admission, Cache
from kvcache_jax.core.status import Status
from kvcache_jax.decoding.host import Host, Requests
from kvcache_jax.decoding.loop import DecodeState
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.lookup import lookup


def admit(
    state: DecodeState,
    requests: Requests,
    host: Host,
    chunks: PromptChunks,
    max_new_tokens: int,
    streaming: Streaming | None,
    chunk_len: int,
) -> tuple[DecodeState, dict[int, list[int]], int]:
    """Starts rows for prompts that wait, first come first served.

    A prompt waits until there are blocks for all that its samples and the running rows may still store. If
    the whole cache has too few blocks for a prompt, the prompt waits until it is alone. If a prompt can share
    more with another one that was just admitted, it waits until the other one is computed. Chunks that are
    stored are forgotten where prompts or running rows need their blocks; a prompt's own are held until the
    prompt is made of them.

    Args:
      state: With the rows that run.
      requests: The prompts that wait.
      host: The continuation of each row.
      chunks: Those of the prompts.
      max_new_tokens: Per continuation.
      streaming: The tokens that rows keep; None for all.
      chunk_len: Prompt tokens in one call of the model.

    Returns:
      The state; {first row: rows of all samples}; how many tokens of the prompts were cached.
    """
    admitted: dict[int, list[int]] = {}
    num_cached = 0
    cache = state.cache
    idle = [row for row in range(host.config.max_seqs) if row not in host.running]
    if not requests.waiting or len(idle) < requests.num_samples:
        return state, {}, 0
    history, seeds = np.array(state.history), np.array(state.sampling.seed)
    prompt_len, max_len = np.array(state.prompt_len), np.array(state.max_len)
    width = history.shape[1]
    while requests.waiting and len(idle) >= requests.num_samples:
        prompt_id = requests.waiting[0]
        prompt = requests.prompts[prompt_id]
        words = requests.namespaces[prompt_id]
        just_admitted = [host.running[row][0] for row in admitted]
        others = [
            requests.prompts[i][: chunks.plain_len(i)]
            for i in just_admitted
            if np.array_equal(requests.namespaces[i], words)
        ]
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(prompt)] = prompt
        tokens[0, chunks.plain_len(prompt_id) : len(prompt)] = NOT_LOOKED_UP
        if cache.config.enable_prefix_caching and _shares_more(cache, tokens, len(prompt), words, others):
            break
        num_held = len(prompt)
        if streaming is not None:
            num_held = min(num_held, streaming.max_held_len(host.config, chunk_len))
        cache, chunk_ids = chunks.hold(cache, prompt_id, idle[0])
        if chunk_ids is None:
            assert host.running  # alone it finds room: `prompt_spans` left out what does not fit
            break
        rows, others_idle = idle[: requests.num_samples], idle[requests.num_samples :]
        prompt_len[rows] = len(prompt)
        max_len[rows] = min(len(prompt) + max_new_tokens, width)
        forks = {row: group[0] for group in [*admitted.values(), rows] for row in group[1:]}
        started = [*host.running, *rows]
        fits = functools.partial(
            _fits, rows=started, max_len=max_len, forks=forks, prompt_len=prompt_len, streaming=streaming
        )
        start = functools.partial(
            _start,
            row=rows[0],
            num_tokens=num_held,
            tokens=tokens,
            namespace=words,
            fits=fits if host.running else None,
        )
        cache, admission = chunks.with_room(cache, start, kept=chunk_ids)
        if admission is None:
            break
        cache, idle = chunks.compose(cache, prompt_id, rows[0], chunk_ids), others_idle
        num_cached += int(admission.num_cached[0])
        requests.waiting.popleft()
        admitted[rows[0]] = rows
        for sample_id, row in enumerate(rows):
            host.running[row], host.num_streamed[row] = (prompt_id, sample_id), 0
            history[row, : len(prompt)] = prompt
            entropy = [*requests.seeds[prompt_id], sample_id]
            seeds[row] = np.random.SeedSequence(entropy).generate_state(1)[0]
    forks = {row: group[0] for group in admitted.values() for row in group[1:]}
    fits = functools.partial(
        _fits, rows=[*host.running], max_len=max_len, forks=forks, prompt_len=prompt_len, streaming=streaming
    )
    cache = chunks.forget_until(cache, fits)
    if not admitted:
        return dataclasses.replace(state, cache=cache), {}, 0
    started = [row for rows in admitted.values() for row in rows]
    length = np.array(state.length)
    length[started] = prompt_len[started]
    return (
        dataclasses.replace(
            state,
            cache=cache,
            history=jnp.asarray(history),
            prompt_len=jnp.asarray(prompt_len),
            length=jnp.asarray(length),
            max_len=jnp.asarray(max_len),
            sampling=dataclasses.replace(state.sampling, seed=jnp.asarray(seeds)),
        ),
        admitted,
        num_cached,
    )


def _start(
    cache: Cache,
    row: int,
    num_tokens: int,
    tokens: np.ndarray,
    namespace: np.ndarray,
    fits: Callable[[Cache], bool] | None,
) -> tuple[Cache, Admission | None]:
    """Allocates a prompt if all rows then fit; else returns the cache as it is, and no admission."""
    with_prompt, admission = allocate(cache, [row], [num_tokens], tokens=tokens, namespace=namespace)
    if int(admission.status[0]) != Status.OK or (fits is not None and not fits(with_prompt)):
        return cache, None
    return with_prompt, admission


def _fits(
    cache: Cache,
    rows: Sequence[int],
    max_len: np.ndarray,
    forks: Mapping[int, int],
    prompt_len: np.ndarray,
    streaming: Streaming | None,
) -> bool:
    """Tells whether `rows` can all go on to `max_len` i32[max_seqs] together.

    Args:
      cache: Holds them, except those that are still to be forked.
      rows: Those that run or start.
      max_len: i32[max_seqs], where each ends.
      forks: {row to be forked: row with its prompt}.
      prompt_len: i32[max_seqs].
      streaming: As in `admit`.
    """
    context_len = np.asarray(cache.context_len)
    forked = [row for row in rows if row not in forks]
    for group, pool in zip(cache.config.groups, cache.control.block_pools, strict=True):
        table, num_cached = np.asarray(pool.block_table), 0 if pool.cached is None else pool.cached.num_cached
        if streaming is not None:
            # Before any row grows all drop what they do not need, so what each may come to is what counts.
            held_len = streaming.max_held_len(cache.config, 1)
            most = [_most_blocks(group, min(int(max_len[row]) - 1, held_len)) for row in rows]
            if sum(most) > pool.num_blocks:
                return False
            continue
        num_held = (table < pool.num_blocks).sum(axis=1)
        num_to_come = 0
        for row in rows:
            # The last token of a row is drawn and not stored.
            most = _most_blocks(group, int(max_len[row]) - 1)
            held = num_held[forks.get(row, row)]
            if row in forks and prompt_len[row] % group.block_size:
                held -= 1  # the prompt's last block, which is copied
            num_to_come += max(most - held, 0)
        # Of the rows that share a block which is not full, all but the last to write copy it.
        is_partial = context_len[forked] % group.block_size > 0
        tails = table[forked, np.minimum(context_len[forked] // group.block_size, table.shape[1] - 1)]
        tails = np.unique(tails[is_partial & (tails < pool.num_blocks)])
        num_to_come += (np.asarray(pool.ref_count)[tails] - 1).sum()
        if pool.cached is not None:  # one that is found by others, hit in part, is copied by the last, too
            num_to_come += np.asarray(pool.cached.is_published)[tails].sum()
        if num_to_come > int(pool.num_free) + int(num_cached):
            return False
    return True


def _most_blocks(group: LayerGroup, num_tokens: int) -> int:
    """Counts the most blocks that a row of up to `num_tokens` tokens holds."""
    return min(ceil_div(num_tokens, group.block_size), group.max_held_blocks)


def _shares_more(
    cache: Cache, tokens: np.ndarray, num_tokens: int, namespace: np.ndarray, others: Sequence[np.ndarray]
) -> bool:
    """Tells whether a prompt (i32[1, P]) begins with more blocks of `others` than are cached."""
    block_size = cache.config.groups[cache.config.indexed_group].block_size
    common = 0
    for other in others:
        length = min(num_tokens - 1, len(other))
        differs = np.flatnonzero(tokens[0, :length] != other[:length])
        common = max(common, int(differs[0]) if len(differs) else length)
    num_common = common // block_size * block_size
    return num_common > 0 and num_common > int(lookup(cache, tokens, [num_tokens], namespace)[0])
