"""Admission of prompts: as many start next as can go on to their ends."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from kvcache_jax.core.state import Admission, Cache
from kvcache_jax.core.status import Status
from kvcache_jax.decoding.host import Host, Requests
from kvcache_jax.decoding.loop import DecodeState
from kvcache_jax.decoding.prompts import NOT_LOOKED_UP, PromptRows, Retention
from kvcache_jax.decoding.room import Rows, num_side_by_side, rows_fit
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.lookup import lookup


def admit(
    state: DecodeState,
    requests: Requests,
    host: Host,
    prompt_rows: PromptRows,
    max_new_tokens: int,
    retention: Retention,
    prefill_len: int,
) -> tuple[DecodeState, dict[int, list[int]], int]:
    """Starts rows for prompts that wait, first come first served.

    As many samples of a prompt start together as fit side by side into an idle cache; the others wait, and
    start from the prompt again. A prompt waits until there are blocks for all that these samples and the
    running rows may still store. If the whole cache has too few blocks for one sample, it waits until it is
    alone. If a prompt can share more with another one that was just admitted, it waits until the other one is
    computed. Blocks that the prompts' features hold are given up where prompts or running rows need them, but
    for the parts of a prompt that is being put together.

    Returns also {first row: rows of all samples} of the prompts, and how many tokens of them were cached.
    """
    admitted: dict[int, list[int]] = {}
    num_cached = 0
    cache = state.cache
    idle = [row for row in range(host.config.max_seqs) if row not in host.running]
    if not requests.waiting or not idle:
        return state, {}, 0
    history, seeds = np.array(state.history), np.array(state.sampling.seed)
    prompt_len, max_len = np.array(state.prompt_len), np.array(state.max_len)
    width = history.shape[1]

    def all_rows(*new: int) -> Rows:
        forks = {row: group[0] for group in [*admitted.values(), new] for row in group[1:]}
        return Rows([*host.running, *new], forks, prompt_len, max_len)

    while requests.waiting and idle:
        prompt_id, sample_ids = requests.waiting[0]
        prompt = requests.prompts[prompt_id]
        end = min(len(prompt) + max_new_tokens, width)
        num_samples = num_side_by_side(host.config, len(prompt), end, len(sample_ids), retention)
        # Samples that can run side by side start together, because one prefill serves them all.
        if len(idle) < num_samples:
            break
        words = requests.namespaces[prompt_id]
        just_admitted = [host.running[row][0] for row in admitted]
        # Prompts of another namespace share nothing, even with equal tokens.
        others = [
            requests.prompts[i][: prompt_rows.prefix_len(i)]
            for i in just_admitted
            if np.array_equal(requests.namespaces[i], words)
        ]
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(prompt)] = prompt
        # A feature puts tokens after the prefix together: a lookup of prefixes must not find these.
        tokens[0, prompt_rows.prefix_len(prompt_id) : len(prompt)] = NOT_LOOKED_UP
        if cache.config.enable_prefix_caching and _shares_more(cache, tokens, len(prompt), words, others):
            break
        num_held = len(prompt)
        if (most_held := retention.max_held_len(host.config, prefill_len)) is not None:
            num_held = min(num_held, most_held)
        cache, parts = prompt_rows.hold(cache, prompt_id, idle[0])
        if parts is None:
            assert host.running  # alone it finds room: parts that do not fit were left out
            break
        rows, others_idle = idle[:num_samples], idle[num_samples:]
        prompt_len[rows], max_len[rows] = len(prompt), end
        # Alone all have room: they are as many as fit into an idle cache.
        fits = functools.partial(rows_fit, rows=all_rows(*rows), retention=retention)
        start = functools.partial(
            _start,
            row=rows[0],
            num_tokens=num_held,
            tokens=tokens,
            namespace=words,
            fits=fits if host.running else None,
        )
        cache, admission = prompt_rows.with_room(cache, start, kept=parts)
        if admission is None:
            break
        cache, idle = prompt_rows.fill(cache, prompt_id, rows[0], parts), others_idle
        num_cached += int(admission.num_cached[0])
        requests.waiting.popleft()
        if len(sample_ids) > num_samples:
            requests.waiting.appendleft((prompt_id, sample_ids[num_samples:]))
        admitted[rows[0]] = rows
        for sample_id, row in zip(sample_ids[:num_samples], rows, strict=True):
            host.running[row], host.num_streamed[row] = (prompt_id, sample_id), 0
            history[row, : len(prompt)] = prompt
            entropy = [*requests.seeds[prompt_id], sample_id]
            seeds[row] = np.random.SeedSequence(entropy).generate_state(1)[0]
    cache = prompt_rows.make_room(cache, functools.partial(rows_fit, rows=all_rows(), retention=retention))
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
    # A cache is a value: if the prompt does not fit, the one from before the call goes on.
    with_prompt, admission = allocate(cache, [row], [num_tokens], tokens=tokens, namespace=namespace)
    if int(admission.status[0]) != Status.OK or (fits is not None and not fits(with_prompt)):
        return cache, None
    return with_prompt, admission


def _shares_more(
    cache: Cache, tokens: np.ndarray, num_tokens: int, namespace: np.ndarray, others: list[np.ndarray]
) -> bool:
    """Tests whether a prompt (i32[1, P]) begins with more blocks of `others` than are cached."""
    block_size = cache.config.groups[cache.config.indexed_group].block_size
    common = 0
    for other in others:
        length = min(num_tokens - 1, len(other))
        differs = np.flatnonzero(tokens[0, :length] != other[:length])
        common = max(common, int(differs[0]) if len(differs) else length)
    num_common = common // block_size * block_size
    return num_common > 0 and num_common > int(lookup(cache, tokens, [num_tokens], namespace)[0])
