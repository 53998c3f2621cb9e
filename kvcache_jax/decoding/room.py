"""Room for rows of the decode loop: whether all that run can go on to their ends, counted in blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockPool, Cache
from kvcache_jax.decoding.prompts import Retention
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div


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
        if (held_len := retention.max_held_len(config, 1)) is not None:
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
        if (held_len := retention.max_held_len(cache.config, 1)) is not None:
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
