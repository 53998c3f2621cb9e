"""Admission of prompts: as many start next as can go on to their ends, counted in blocks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Admission, BlockPool, Cache
from kvcache_jax.core.status import Status, raise_for_status
from kvcache_jax.decoding.host import Host, WaitingPrompts
from kvcache_jax.decoding.loop import DecodeState
from kvcache_jax.decoding.own_prompts import CheckedRows, most_held
from kvcache_jax.decoding.prompts import NOT_LOOKED_UP, Retention
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.lookup import lookup


def admit(
    state: DecodeState,
    requests: WaitingPrompts,
    host: Host,
    prompt_rows: CheckedRows,
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
        if (held_len := most_held(retention, host.config, prefill_len)) is not None:
            num_held = min(num_held, held_len)
        cache, parts = prompt_rows.hold(cache, prompt_id, idle[0], may_wait=bool(host.running))
        if parts is None:
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
            if not host.running:  # no row will ever end, and give it room
                _, admission = allocate(cache, [rows[0]], [num_held], tokens=tokens, namespace=words)
                raise_for_status(admission.status, f"allocating prompt {prompt_id}, alone in the cache,")
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


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that run or start."""

    ids: Sequence[int]
    forks: Mapping[int, int]  # {row that is still to be forked: row with its prompt}
    prompt_len: np.ndarray  # i32[max_seqs]
    max_len: np.ndarray  # i32[max_seqs], where each ends


class _Growth(NamedTuple):
    """The columns of one row's table: those filled or reserved now, at its prompt's end, and at its own."""

    now: int
    prompt: int  # all samples of a prompt share them at first
    end: int  # the last token of a row is drawn and not stored
    num_copies: int  # 1 for a fork that copies the prompt's last block, else 0


def num_side_by_side(
    config: CacheConfig, prompt_len: int, max_len: int, num_samples: int, retention: Retention
) -> int:
    """Counts the samples of one prompt, at least 1, that can all go on to `max_len` in an idle cache."""
    num_fit = min(num_samples, config.max_seqs)
    for group in config.groups:
        if (held_len := most_held(retention, config, 1)) is not None:
            num_fit = min(num_fit, group.num_blocks // _most_held(group, max_len, held_len))
            continue
        prompt = ceil_div(prompt_len, group.block_size)
        num_reserved = min(prompt, group.max_held_blocks)
        # The first sample has the prompt's blocks, shared by the others: these add blocks to write into.
        first = _growth(group, prompt_len, max_len, num_reserved)
        fork = _growth(group, prompt_len, max_len)
        while num_fit > 1 and group.num_blocks < _most_needed(
            group, num_reserved, [first] + [fork] * (num_fit - 1)
        ):
            num_fit -= 1
    return max(num_fit, 1)


def rows_fit(cache: Cache, rows: Rows, retention: Retention) -> bool:
    """Tests whether `rows`, all that the cache holds or will fork, can go on to their ends together."""
    for group, pool in zip(cache.config.groups, cache.control.block_pools, strict=True):
        table, ref_count = np.asarray(pool.block_table), np.asarray(pool.ref_count)
        entries = table[table < pool.num_blocks]
        # Blocks that extras hold are no room, also after rows released them.
        is_room = ref_count <= np.bincount(entries, minlength=pool.num_blocks)
        if (held_len := most_held(retention, cache.config, 1)) is not None:
            # Rows drop tokens before any of them grows: compare their largest sizes, not the present ones.
            num_needed = sum(_most_held(group, int(rows.max_len[row]), held_len) for row in rows.ids)
        else:
            num_needed = sum(
                _needed_by(cache, group, pool, rows, sharing, is_room)
                for sharing in _sharing_rows(group, table, rows)
            )
        if num_needed > is_room.sum():
            return False
    return True


def _most_held(group: LayerGroup, max_len: int, held_len: int) -> int:
    num_tokens = min(max_len - 1, held_len)
    return min(ceil_div(num_tokens, group.block_size), group.max_held_blocks)


def _growth(group: LayerGroup, prompt_len: int, max_len: int, now: int | None = None) -> _Growth:
    """Counts the columns of a row that has filled or reserved `now`; None for one that is still forked."""
    prompt, end = (ceil_div(length, group.block_size) for length in (prompt_len, max_len - 1))
    # A fork copies the prompt's last block only if that is not full and the fork writes into it.
    is_copied = now is None and prompt_len % group.block_size > 0 and max_len - 1 > prompt_len
    return _Growth(prompt if now is None else now, prompt, end, int(is_copied))


def _most_needed(
    group: LayerGroup,
    num_held: int,
    growths: Sequence[_Growth],
    num_copies: int = 0,
    num_published: int = 0,
) -> int:
    """Counts the most blocks that rows which share blocks ever hold together.

    Either the blocks held now stay, each with some row, and each row takes blocks of its own beside; or
    the rows share nothing more, and each holds as many as a row can, which are few where windows release.
    Last blocks are copied `num_copies` times before they are written, `num_published` times by their last
    owner.
    """
    most, num_taken = group.max_held_blocks, 0
    for growth in growths:
        num_taken += min(most, max(growth.prompt - growth.now, 0))
        num_taken += min(most, max(growth.end - max(growth.prompt, growth.now), 0) + growth.num_copies)
    apart = sum(min(most, growth.end) for growth in growths)
    return min(num_held + num_taken + num_copies, apart + num_published)


def _needed_by(
    cache: Cache,
    group: LayerGroup,
    pool: BlockPool,
    rows: Rows,
    sharing: Sequence[int],
    is_room: np.ndarray,
) -> int:
    """Counts the most blocks that the rows `sharing`, all that share blocks, hold of those that `is_room`."""
    table, context_len = np.asarray(pool.block_table), np.asarray(cache.context_len)
    growths, forked = [], [row for row in sharing if row not in rows.forks]
    for row in sharing:
        now = None
        if row not in rows.forks:
            now = int(np.flatnonzero(table[row] < pool.num_blocks).max(initial=-1)) + 1
        growths.append(_growth(group, int(rows.prompt_len[row]), int(rows.max_len[row]), now))
    held = np.unique(table[forked])
    # Of the rows that share a block which is not full, all but the last to write copy it.
    is_partial = context_len[forked] % group.block_size > 0
    # A full row may have no last block: it is masked, so any column will do.
    tails = table[forked, np.minimum(context_len[forked] // group.block_size, table.shape[1] - 1)]
    tails = np.unique(tails[is_partial & (tails < pool.num_blocks)])
    num_copies, num_published = int((np.asarray(pool.ref_count)[tails] - 1).sum()), 0
    if pool.cached is not None:  # one that is found by others, hit in part, is copied by the last, too
        num_published = int(np.asarray(pool.cached.is_published)[tails].sum())
    num_held = int(is_room[held[held < pool.num_blocks]].sum())
    return _most_needed(group, num_held, growths, num_copies + num_published, num_published)


def _sharing_rows(group: LayerGroup, table: np.ndarray, rows: Rows) -> list[list[int]]:
    """Splits rows such that no two of different lists share a block of the group.

    Only windows release blocks that rows share, so elsewhere all are one list.
    """
    if group.span.keeps_all:
        return [list(rows.ids)]
    lists: list[tuple[list[int], set[int]]] = []
    for row in rows.ids:
        blocks = set(table[rows.forks.get(row, row)].tolist()) - {group.num_blocks}
        # A row that shares with several lists makes one list of them.
        together = [each for each in lists if each[1] & blocks]
        lists = [each for each in lists if each not in together]
        merged = [number for each in together for number in each[0]]
        lists.append(([*merged, row], blocks.union(*(each[1] for each in together))))
    return [each[0] for each in lists]
