"""Sizes and choices of an engine, checked and worked out."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.core.config import CacheConfig, ceil_div
from kvcache_jax.engine.options import MOST, Limits, Options, size
from kvcache_jax.engine.requests import GenerationRequest, TableSizes
from kvcache_jax.engine.table import RequestTable

_LEAST_PROMPT_TOKENS = 256
"""Of a step, by default; with more rows as many as there are, for rows that end make room."""
_LEAST_PIECES = 4
_PIECE_LEN = 128
"""Tokens of a piece where the budget has more of them: a prompt then wastes little of its last one."""


def table_sizes(limits: Limits, config: CacheConfig) -> TableSizes:
    """Works out the sizes of a table of requests."""
    num_slots = max(4 * config.max_seqs, 64) if limits.max_requests is None else limits.max_requests
    longest, num_tokens = config.max_seq_len + 1, limits.max_tokens
    if num_tokens is None:
        num_tokens = min(max(num_slots // 4, config.max_seqs, 2) * longest, MOST)
    return TableSizes(
        num_slots=size("max_requests", num_slots),
        num_tokens=size("max_tokens", num_tokens, longest),
        num_stops=max(limits.max_stop_tokens, 1),
        num_clients=limits.num_clients,
        num_items=limits.max_items,
    )


def inbox_sizes(sizes: TableSizes, config: CacheConfig) -> TableSizes:
    """Works out the sizes of the inbox of one dispatch, for a table of these sizes."""
    most = most_entering(config.max_seqs)
    return dataclasses.replace(
        sizes,
        num_slots=min(sizes.num_slots, most),
        num_tokens=max(config.max_seq_len + 1, min(sizes.num_tokens, 256 * most)),
    )


def most_admissions(max_seqs: int) -> int:
    """Returns how many requests a step looks at for admission: rows are full within some dozens of steps."""
    return max(4, max_seqs // 64)


def most_entering(max_seqs: int) -> int:
    """Returns how many requests a dispatch takes in, enough for its steps to admit."""
    return max(64, max_seqs // 4)


def with_budget(options: Options, config: CacheConfig, token_budget: int | None) -> Options:
    """Shares a step's tokens between the rows' next ones and prompts."""
    num_next = config.max_seqs * options.width
    if token_budget is None:
        token_budget = num_next + max(min(_LEAST_PROMPT_TOKENS, config.max_seq_len), config.max_seqs)
    num_prompt = size("token_budget", token_budget) - num_next
    if num_prompt < 1:
        raise ValueError(
            f"token_budget is {token_budget}, expected more than {num_next}, the next tokens of "
            f"{config.max_seqs} rows of {options.width}: raise it, or lower max_seqs"
        )
    num_pieces, piece_len = (num_prompt, 1) if options.batch_invariant else piece_sizes(num_prompt)
    return dataclasses.replace(options, num_pieces=num_pieces, piece_len=piece_len)


def check_drafts(options: Options, config: CacheConfig, process_logits: Callable | None) -> None:
    """Refuses drafts where a hook, the cache's steps or its windows cannot take them."""
    if options.num_drafts == 0:
        return
    if process_logits is not None:
        raise ValueError(
            f"got num_drafts = {options.num_drafts} and process_logits, expected one of them: the hook sees "
            "one next token per row, and drafts are several"
        )
    if options.width > config.query_len_limit:
        raise ValueError(
            f"num_drafts is {options.num_drafts}, expected below max_query_len = {config.query_len_limit}"
        )
    for group in config.groups:
        if group.window is not None and group.max_rollback < options.num_drafts:
            raise ValueError(
                f"num_drafts is {options.num_drafts} and a window takes back {group.max_rollback} tokens, "
                f"expected SlidingWindow(max_rollback={options.num_drafts})"
            )


def check_batch_invariant(options: Options, config: CacheConfig) -> None:
    """Refuses the batch-invariant mode with kernels, whose splits of a row depend on the other rows."""
    if options.batch_invariant and config.implementation not in (None, "xla"):
        raise ValueError(
            f"batch_invariant is True and implementation {config.implementation!r}, expected 'xla': how a "
            "kernel splits a row, and so how it rounds, may depend on the other rows"
        )


def with_same_shapes(params: Any, like: Any) -> Any:
    """Refuses parameters that the program was not compiled for, and returns them as it wants them."""
    new, old = jax.tree.structure(params), jax.tree.structure(like)
    if new != old:
        raise ValueError(f"params has the structure {new}, expected that of the engine's, {old}")

    def same(path: Any, leaf: Any, old_leaf: Any) -> Any:
        types = [jax.typeof(x) for x in (leaf, old_leaf)]
        found, expected = (f"{x.dtype}{list(x.shape)}" for x in types)
        if found == expected and types[1].weak_type and not types[0].weak_type:
            expected = f"a Python number, {expected} of a weak type,"
        if found != expected:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {found}, expected {expected} like the engine's: its "
                "program is compiled for these"
            )
        is_weaker = types[0].weak_type and not types[1].weak_type
        numpy = jnp if isinstance(leaf, jax.Array) else np
        return numpy.asarray(leaf, types[1].dtype) if is_weaker else leaf

    return jax.tree.map_with_path(same, params, like)


def check_fits(request: GenerationRequest, sizes: TableSizes, max_seq_len: int) -> None:
    """Refuses a request that has more of something than the table takes of any."""
    for what, value, most, name in (
        ("stop tokens", len(request.stop_tokens), sizes.num_stops, "max_stop_tokens"),
        ("items", len(request.items), sizes.num_items, "max_items"),
        ("samples", request.num_samples, sizes.num_slots, "max_requests"),
        ("as its client", request.client, sizes.num_clients - 1, "num_clients"),
    ):
        if value > most:
            raise ValueError(
                f"a request has {value} {what}, expected at most {most}: make the Engine with a larger "
                f"{name} in its kv.engine.Limits"
            )
    # No token is stored of a request that the device will refuse.
    is_long = request.num_tokens - 1 > max_seq_len
    num_tokens = 0 if is_long else request.num_samples * request.num_tokens
    if num_tokens > sizes.num_tokens:
        raise ValueError(
            f"a request has {num_tokens} tokens in {request.num_samples} samples, expected at most "
            f"{sizes.num_tokens}: make the Engine with a larger max_tokens in its kv.engine.Limits"
        )


def piece_sizes(num_tokens: int) -> tuple[int, int]:
    """Cuts `num_tokens` of a step into pieces: how many, and tokens of each."""
    piece_len = ceil_div(num_tokens, max(_LEAST_PIECES, num_tokens // _PIECE_LEN))
    return max(num_tokens // piece_len, 1), piece_len


def checked_ids(
    requests: list[Any], tables: Sequence[RequestTable], sizes: TableSizes, max_seq_len: int
) -> set[Hashable]:
    """Refuses anything but requests that fit, and returns the ids that they name."""
    ids = set[Hashable]()
    for request in requests:
        if not isinstance(request, GenerationRequest):
            raise TypeError(f"requests has a {type(request).__name__}, expected GenerationRequests")
        if request.id is not None and (request.id in ids or any(request.id in table for table in tables)):
            raise ValueError(
                f"requests has the id {request.id!r}, which another request has that has not ended, "
                "expected one of its own, or none"
            )
        ids.add(request.id)
        check_fits(request, sizes, max_seq_len)
    num_left = min(table.num_left for table in tables)
    if sum(request.num_samples for request in requests) > num_left:
        raise ValueError(
            f"got {len(requests)} requests and this engine can number {num_left} more samples, expected "
            "fewer: make another Engine, and push them there"
        )
    return ids
