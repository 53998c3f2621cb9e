"""Checks for code that uses a cache, and for the cache itself.

* The token test: a fake model stores each token's id as its key and value, and every slot that
  attention would read is compared with the tokens expected there. Without any arithmetic, the test finds
  stale, aliased, leaked and misordered blocks.
* `poison`: NaN in every slot that no row may read, so that a stray read shows.
* `check_forward`: takes a model's step and checks that caching changes nothing.
* `interpreted`: within it, kernels for accelerators run on the CPU, where their races are looked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvcache_jax.arrays.number_checks import as_list, static_count
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.attention.mosaic import interpreted
from kvcache_jax.attention.write import write
from kvcache_jax.core.arguments import integers, pool_of
from kvcache_jax.core.cache_checks import require_values, takes_one
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.layers.layer_kind import LayerKind
from kvcache_jax.testing.forward_checks import check_forward
from kvcache_jax.testing.poisoned_slots import poison

__all__ = [
    "check_forward",
    "check_tokens",
    "interpreted",
    "poison",
    "token_codes",
    "write_tokens",
]


def token_codes(tokens: Any, layer: int, num_heads: int, head_dim: int, is_value: bool) -> Any:
    """Computes numbers that tell a token, its layer and its head, exact in every storage dtype.

    Args:
      tokens: int[...], ids below 2**14, or in float32 any of 32 bits; numpy or jax.
      layer: Model layer.
      num_heads: Heads to make codes for.
      head_dim: Width; the code repeats every five places.
      is_value: Values differ from keys.

    Returns:
      f32[..., num_heads, head_dim]: token % 128, token // 128, layer, head, is_value, ...
    """
    # Of as many axes as the result, for jax may be told to refuse others.
    place = np.arange(head_dim).reshape(*[1] * (tokens.ndim + 1), head_dim) % 5
    heads = np.arange(num_heads)[:, None]
    fixed = (place == 2) * layer + (place == 3) * heads + (place == 4) * int(is_value)
    low, high = (part[..., None, None].astype(np.float32) for part in (tokens & 127, tokens >> 7))
    is_low, is_high = (np.asarray(place == i, np.float32) for i in range(2))
    return low * is_low + high * is_high + fixed.astype(np.float32)


@takes_one
def write_tokens(cache: Cache, tokens: jax.Array, step: Step) -> Cache:
    """Writes each new token's code as its key and value in every layer.

    Args:
      cache: Not changed, unless donated.
      tokens: int, shaped like `step.positions`.
      step: From `extend`.

    Raises:
      TypeError: `tokens` are no integers.
      ValueError: they have another shape, or the cache was built with `storage=False`.
    """
    numbers = integers("tokens", tokens)
    for layer in cache.config.own_layers:
        codes = _layer_codes(cache.config.layers[layer], numbers, layer)
        cache = write(cache, layer, codes["k"], codes.get("v"), step)
    return cache


def _layer_codes(kind: LayerKind, tokens: Any, layer: int) -> dict[str, Any]:
    """Makes the inputs of a layer that a model would hand in, of token codes."""
    return {
        name: token_codes(tokens, layer, *shape, is_value=name == "v") for name, shape in kind.inputs.items()
    }


@explicit_transfers
def check_tokens(cache: Cache, expected: Mapping[int, Sequence[int | None]]) -> list[str]:
    """Runs the token test on every slot that a row or a chunk holds, in all layers and heads.

    Args:
      cache: Filled by `write_tokens`, and with chunks whose keys were not rotated.
      expected: All tokens of each row that is looked at; None at a place between chunks, which holds zeros.

    Returns:
      One sentence per row that holds another number of tokens, and per row or chunk and layer that reads
      something else; empty if all is well.

    Raises:
      TypeError: the cache is traced or has no values, or `expected` has rows or tokens that are no integers.
      ValueError: the cache is batched, was donated or has no storage, or a row or a token is out of range.
    """
    require_values("check_tokens", cache, pools=True)
    pool_of(cache, 0)
    cache = cache.config.keeper.settle(cache)
    rows, found = _texts_of_rows(cache, expected)
    chunks = _texts_of_chunks(cache)
    texts = {f"row {row}": text for row, text in rows.items()}
    texts |= {f"chunk {chunk}": text for chunk, text in chunks.items()}
    names = [*texts]
    holders = np.repeat(np.arange(len(texts)), [len(text) for text in texts.values()])
    places = np.concatenate([np.arange(0), *(np.arange(len(text)) for text in texts.values())])
    tokens = np.array([token or 0 for text in texts.values() for token in text], int)
    is_empty = np.array([token is None for text in texts.values() for token in text], bool)
    pools = jax.tree.map(np.asarray, cache.pools)
    for group_id, group in enumerate(cache.config.groups):
        if group.holds_sources or not group.kind.inputs:
            continue
        lines, firsts = _held_blocks(cache, group_id, [*rows], [*chunks])
        at = firsts[holders] + places
        blocks, num_blocks = (
            lines[holders, at // group.block_size],
            cache.control.block_pools[group_id].num_blocks,
        )
        held = blocks < num_blocks
        for index, layer in enumerate(group.layer_ids):
            block, offset = index * num_blocks + blocks[held], at[held] % group.block_size
            want = group.kind.encode(**_layer_codes(group.kind, tokens[held], layer))
            for name, array in group.arrays:
                found_there = pools[group_id].arrays[name][(block, *array.before_tokens, offset)]
                codes = np.asarray(want[name]).astype(found_there.dtype)
                codes[is_empty[held]] = 0
                is_wrong = (found_there != codes).any(axis=tuple(range(1, codes.ndim)))
                if not is_wrong.any():
                    continue
                what = {"k": "keys", "v": "values"}.get(name, name)
                for holder in sorted({*holders[held][is_wrong].tolist()}):
                    wrong = places[held][is_wrong & (holders[held] == holder)].tolist()
                    found.append(f"{names[holder]} reads wrong {what} in layer {layer} at {wrong}")
    return found


def _texts_of_rows(
    cache: Cache, expected: Mapping[int, Sequence[int | None]]
) -> tuple[dict[int, list[int | None]], list[str]]:
    """Checks `expected`; returns its tokens as far as rows reach, and names rows of other lengths."""
    if not isinstance(expected, Mapping):
        raise TypeError(f"expected is {expected!r}, expected a dict: row -> tokens")
    texts, found, lengths = {}, [], np.asarray(cache.context_len).tolist()
    for row, text in expected.items():
        row = static_count("row", row, 0, cache.max_seqs - 1, "max_seqs - 1")
        tokens = [
            None if token is None else static_count("token", token, -(2**31), 2**31 - 1, "2**31 - 1")
            for token in as_list("tokens", text, "token ids")
        ]
        if len(tokens) != lengths[row]:
            found.append(f"row {row} holds {lengths[row]} tokens, expected {len(tokens)}")
        texts[row] = tokens[: lengths[row]]
    return texts, found


def _texts_of_chunks(cache: Cache) -> dict[int, list[int]]:
    """Reads the tokens of the chunks that are stored, by id."""
    if (chunks := cache.control.extras.get("chunks")) is None:
        return {}
    tokens, lengths = np.asarray(chunks.tokens), np.asarray(chunks.length)
    return {i: tokens[i, : lengths[i]].tolist() for i in np.flatnonzero(lengths).tolist()}


def _held_blocks(
    cache: Cache, group_id: int, rows: Sequence[int], chunk_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Lists the blocks of rows, then of chunks, and where in the first block each begins."""
    pool, block_size = cache.control.block_pools[group_id], cache.config.groups[group_id].block_size
    lines = np.full((len(rows) + len(chunk_ids), pool.max_blocks_per_seq), pool.num_blocks)
    firsts = np.zeros(len(lines), int)
    lines[: len(rows)] = np.asarray(pool.block_table)[[*rows]]
    if (chunks := cache.control.extras.get("chunks")) is not None:
        blocks = np.asarray(chunks.block_ids[group_id])[[*chunk_ids]]
        lines[len(rows) :, : blocks.shape[1]] = blocks
        firsts[len(rows) :] = np.asarray(chunks.start)[[*chunk_ids]] % block_size
    return lines, firsts
