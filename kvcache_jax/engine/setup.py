"""Sizes and choices of an engine, checked and worked out."""

import dataclasses
from collections.abc import Callable
from typing import Any

from kvcache_jax.arrays.number_checks import finite_number, static_count
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.engine.chunk import piece_sizes
from kvcache_jax.engine.options import Options


def share(name: str, value: Any) -> float:
    """Checks a share, 0 to below 1."""
    value = finite_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}, expected 0 to below 1")
    return value


def with_budget(options: Options, config: CacheConfig, token_budget: int | None) -> Options:
    """Shares a step's tokens between the rows' next ones and prompts."""
    num_next = config.max_seqs * options.width
    if token_budget is None:
        token_budget = num_next + min(256, config.max_seq_len)
    num_prompt = static_count("token_budget", token_budget) - num_next
    if num_prompt < 1:
        raise ValueError(
            f"token_budget is {token_budget}, expected more than {num_next}, the next tokens of "
            f"{config.max_seqs} rows of {options.width}: raise it, or lower max_seqs"
        )
    num_pieces, piece_len = piece_sizes(num_prompt)
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
